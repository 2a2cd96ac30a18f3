"""Every command and every Python block in the docs runs, in the order in which a reader meets them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import guerdon
from docs import site_pages
from guerdon.cli.main import VERBS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SHORTENED = {
    ROOT / "docs" / name
    for name in ("howto/ppo-cnn.md", "howto/sac-cnn.md", "howto/resnet-reward.md", "tutorials/robot.md")
}
"""Pages of commands that take hours; `test_maniskill_documents.py` and `tests/robot/` run them shortened."""
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.M | re.S)
FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```', re.M | re.S)
"""A file that the reader makes beside the commands."""
ELSEWHERE = ("make ", "git ", "cd ", "pip ", ".venv/bin/pre-commit ")
"""Commands that other tests and CI itself run, or that only make sense in a clone."""
MEASURED = {"own-env.md": {"learned reward": (16, 20), "zero reward": (0, 8)}}
"""Page -> what its blocks print, `name: N of 20`, and between which numbers N lies."""
CHECK = "guerdon check"
RECIPE = "maniskill_rlpd_learned_reward"
"""Blocks with it are run by `tests/training/test_maniskill_recipe.py`, shortened."""


def blocks(page: Path) -> list[tuple[str, str]]:
    found = [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]
    return [(kind, text) for kind, text in found if RECIPE not in text]


def commands(text: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *ELSEWHERE))]


def pages_to_run() -> dict[Path, list[tuple[str, str]]]:
    """Pages with what a test runs of them: (kind, script), in order.

    What says the same wherever it stands runs once: `guerdon check`, which starts Ray and a simulator, on
    the first page that has it, and a page in another language with the very same commands not at all.
    """
    found: dict[Path, list[tuple[str, str]]] = {}
    checked = False
    for page in PAGES:
        if page in SHORTENED:  # run by a test of its own
            continue
        steps = []
        for kind, text in blocks(page):
            lines = [text] if kind == "python" else commands(text)
            steps.append((kind, [line for line in lines if not (checked and line == CHECK)]))
            checked = checked or CHECK in lines
        scripts = [(kind, "\n".join(lines)) for kind, lines in steps if lines]
        if scripts and all(commands_of(page) != commands_of(other) for other in found):
            found[page] = scripts
    return found


def commands_of(page: Path) -> list[list[str]]:
    return [[text] if kind == "python" else commands(text) for kind, text in blocks(page)]


TO_RUN = pages_to_run()


@pytest.mark.parametrize("page", TO_RUN, ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.slow
def test_the_blocks_of_a_page_run(page, tmp_path, request):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if page.name != "README.md":  # its programs are those that a newcomer has
        server = "simulator_commands" if page.name == "maniskill.md" else "command_server"
        path = request.getfixturevalue(server).path
    environment = {**os.environ, "PATH": path}
    for name, text in FILE.findall(page.read_text()):
        (tmp_path / name).write_text(text)
    printed = ""
    for kind, script in TO_RUN[page]:
        program = ["python", "-c"] if kind == "python" else ["bash", "-e", "-c"]
        result = subprocess.run(
            [*program, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, f"{script}\n{result.stdout}\n{result.stderr}"
        printed += result.stdout
    for name, (least, most) in MEASURED.get(page.name, {}).items():
        (found,) = re.findall(rf"^{name}: (\d+) of 20$", printed, re.M)
        assert least <= int(found) <= most, f"{name}: {found} of 20"


def test_no_command_of_the_docs_is_left_out():
    pages = [page for page in PAGES if page not in SHORTENED]
    wanted = {line for page in pages for lines in commands_of(page) for line in lines}
    run = {line for steps in TO_RUN.values() for kind, text in steps for line in [text, *text.splitlines()]}
    assert wanted <= run and CHECK in run and len(TO_RUN) >= 9


def test_make_commands_in_the_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"^make ([a-z-]+)", page.read_text(), re.M)}
    assert named <= targets
    assert {"demo", "test"} <= named


def test_links_lead_somewhere():
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists() and not generated(page.parent / target)
    ]
    assert broken == []


def generated(path: Path) -> bool:
    """Whether the documentation site makes this page of the code."""
    return os.path.relpath(path, ROOT / "docs") in site_pages.PAGES


def test_every_setting_has_a_meaning():
    for _, root in site_pages.TREES.values():
        for name, cls in [("", root), *site_pages.sections(root)]:
            plain = {path for path, _ in site_pages.sections(cls)}
            for field, (_, meaning) in site_pages.meanings(cls).items():
                assert field in plain or meaning, f"{cls.__name__}.{field} ({name}) has no text under it"
            assert cls.__doc__


def test_generated_pages_show_the_code_as_it_is():
    settings = site_pages.settings_page()
    assert (
        "| `seed` | `0` | int, at least 0 | Seeds environments, policies, splits and training. |" in settings
    )
    assert "| `cluster.node_groups[].label` | `null` |" in settings
    assert (
        "`collect.policy` | `random` | `random` · `scripted` · `motion_planner` · `checkpoint` |" in settings
    )
    command = site_pages.command_page()
    assert all(f"## guerdon {verb.name}\n" in command for verb in VERBS)
    gail = site_pages.model_page("gail")
    assert "`reward_form`" in gail and "| cartpole_gail | guerdon |" in gail and "Ho and Ermon" in gail
    for name in site_pages.REWARD_MODELS:
        page = site_pages.model_page(name)
        assert page.startswith(f"# `{name}`\n") and "## Settings" in page
    assert "::: guerdon.rewards.image.scorer.RewardManager" in site_pages.api_page()


@pytest.mark.slow
def test_the_site_builds_in_strict_mode(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    site = tmp_path / "site" / guerdon.__version__
    assert "RewardManager" in (site / "reference" / "api" / "index.html").read_text()
    assert (site / "reward-models" / "gail" / "index.html").exists()
    assert json.loads((site.parent / "versions.json").read_text())[0]["version"] == guerdon.__version__
    assert "reward hacking" in (site / "search" / "search_index.json").read_text()


def test_the_readmes_fit_two_screens():
    for name in ("README.md", "README.zh-CN.md"):
        assert len((ROOT / name).read_text().splitlines()) <= 150


def test_the_two_readmes_have_the_same_commands():
    english, chinese = (
        [text for kind, text in blocks(ROOT / name) if kind == "bash"]
        for name in ("README.md", "README.zh-CN.md")
    )
    strip = [
        [re.sub(r"#.*", "", line).strip() for line in "".join(b).splitlines()] for b in (english, chinese)
    ]
    assert strip[0] == strip[1]


def test_the_two_readmes_have_the_same_numbers_tables_and_links():
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    for pattern in (r"\d+(?:\.\d+)?", r"^#+ ", r"^\|"):
        assert sorted(re.findall(pattern, english, re.M)) == sorted(re.findall(pattern, chinese, re.M))
    links = [set(re.findall(r"\]\((docs/[^)]+)\)", text)) for text in (english, chinese)]
    assert links[1] - links[0] == {"docs/zh/rlinf.md", "docs/zh/di-engine.md"} and links[0] <= links[1]
