"""Every command and every Python block in the docs runs, in the order in which a reader meets them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SHORTENED = "howto-"
"""Pages of commands that take hours: `tests/run/test_maniskill_documents.py` runs them shortened."""
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.M | re.S)
ELSEWHERE = ("make ", "git ", "cd ", "pip ", ".venv/bin/pre-commit ")
"""Commands that other tests and CI itself run, or that only make sense in a clone."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


def commands(text: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *ELSEWHERE))]


def runnable(page: Path) -> list[tuple[str, str]]:
    if page.name.startswith(SHORTENED):
        return []
    return [(kind, text) for kind, text in blocks(page) if kind == "python" or commands(text)]


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    for kind, text in runnable(page):
        script = text if kind == "python" else "\n".join(["set -e", *commands(text)])
        program = [sys.executable, "-c"] if kind == "python" else ["bash", "-c"]
        result = subprocess.run(
            [*program, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
        )
        assert result.returncode == 0, f"{script}\n{result.stdout}\n{result.stderr}"


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
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_two_readmes_have_the_same_commands():
    english, chinese = (
        [text for kind, text in blocks(ROOT / name) if kind == "bash"]
        for name in ("README.md", "README.zh-CN.md")
    )
    strip = [
        [re.sub(r"#.*", "", line).strip() for line in "".join(b).splitlines()] for b in (english, chinese)
    ]
    assert strip[0] == strip[1]
