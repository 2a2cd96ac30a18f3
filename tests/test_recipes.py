"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import guerdon

ROOT = Path(guerdon.__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^### A new ([^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))
STEP = re.compile(
    r"^\d\. `([^`]+)`(?:,? \(?(new|at the end|in|before|after)\)?(?: `([^`]+)`)?)?:(.*?)(?=^\S|\Z)",
    re.M | re.S,
)


def steps(recipe):
    """(file, how, where, code) of each step that has code."""
    for path, how, where, rest in STEP.findall(RECIPES[recipe]):
        block = re.search(r"```\w+\n(.*?)```", rest, re.S)
        if block is not None:
            yield path, how, where, textwrap.dedent("   " + block.group(1).lstrip(" "))


def line_of(text, how, where):
    """Before which line (from 0) of `text` the code goes, and how far it is indented."""
    lines = text.splitlines()
    if how == "at the end":
        return len(lines), 0
    if how == "after":
        return next(number for number, line in enumerate(lines) if where in line) + 1, 0
    for node in ast.parse(text).body:
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if where not in (getattr(node, "name", None), getattr(target, "id", None)):
            continue
        if how == "before":
            return node.lineno - 1, 0
        if isinstance(node, ast.ClassDef):
            return node.end_lineno, 4
        table = node.value.generators[0].iter if isinstance(node.value, ast.DictComp) else node.value
        return table.end_lineno - 1, lines[table.end_lineno - 2].index(lines[table.end_lineno - 2].lstrip())
    raise AssertionError(f"there is no {where}")


def follow(recipe, root):
    """Carry out the steps of a recipe in the tree at `root`; returns the files that changed."""
    changed = []
    for path, how, where, code in steps(recipe):
        file = root / path
        changed.append(path)
        if how == "new":
            assert not file.exists()
            file.write_text(code)
            continue
        text = file.read_text()
        number, indent = line_of(text, how, where)
        lines = text.splitlines()
        lines[number:number] = [
            *textwrap.indent(code, " " * indent).rstrip().splitlines(),
            *[""] * 2 * (indent == 0),
        ]
        file.write_text("\n".join(lines) + "\n")
    return changed


@pytest.fixture
def copy(tmp_path):
    """The package and its docs, and a way to run Python on them."""
    shutil.copytree(ROOT / "guerdon", tmp_path / "guerdon")  # with what is compiled
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images"))

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    run.root = tmp_path
    return run


def test_there_are_eight_recipes_and_their_files_exist():
    assert set(RECIPES) == {
        "encoder", "reward model", "data format", "simulator", "robot driver", "agent", "alarm", "verb",
    }  # fmt: skip
    for name, text in RECIPES.items():
        text = re.sub(r"```.*?```", "", text, flags=re.S)
        named = set(re.findall(r"`((?:guerdon|tests|docs)/[^`]+)`(?! \(new\))", text))
        missing = {path for path in named if not (ROOT / path).exists()}
        assert not missing, name
        assert any(path.startswith("tests/") for path in re.findall(r"`([^`]+)`", text)), name


def test_a_new_alarm(copy):
    changed = follow("alarm", copy.root)
    assert changed == [
        "guerdon/monitoring/alarms.py",
        "guerdon/monitoring/alarms.py",
        "guerdon/config/schema_monitor.py",
        "docs/tutorials/train.md",
    ]
    (copy.root / "use.py").write_text(
        textwrap.dedent("""
        import sys
        from pathlib import Path
        import numpy as np
        from guerdon.config import load_config
        from guerdon.monitoring.monitor import RewardMonitor, ScoredRollout
        from guerdon.rewards.image.contract import Contract

        cfg = load_config("train", ["monitor.max_missed_successes=0.4"]).monitor
        found = []
        for seen in (0.9, 0.1):
            contract = Contract(model={"num_members": 1}, threshold=0.5)
            monitor = RewardMonitor(cfg, contract, 0.5, Path.cwd(), knows_success=True)
            for number in range(12):
                done = np.zeros((10, 8), bool)
                done[-1] = True
                alarms = monitor.observe(number, ScoredRollout(
                    prob_success=np.full((10, 8), seen, np.float32), done=done, env_success=done | True,
                    elapsed=np.repeat(np.arange(10)[:, None], 8, axis=1),
                    frame=lambda t, n: np.zeros((4, 4, 3), np.uint8),
                ))
                found += [(seen, alarm.name, alarm.limit, len(alarm.frames)) for alarm in alarms]
            assert monitor.metrics()["monitor/missed_successes"] == float(seen < 0.5)
        print(found)
        """)
    )
    result = copy("use.py")
    assert result.stdout.strip() == "[(0.1, 'missed_successes', 0.4, 8)]", result.stderr
    (line,) = (copy.root / "alarms.jsonl").read_text().splitlines()
    assert json.loads(line)["remedy"].startswith("lower reward.reward_threshold")
    assert "| missed successes |" in (copy.root / "docs/tutorials/train.md").read_text()


def write_npz(folder):
    folder.mkdir()
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    for number, last in enumerate((0, 1, 1)):
        np.savez(folder / f"{number}.npz", frames=frames, labels=np.array([0, 0, last], np.float32))
    (folder / "9.npz").write_bytes(b"PK nonsense")
    return folder


def test_a_new_format(copy):
    data = write_npz(copy.root / "data")
    before = copy("-m", "guerdon.cli.main", "data", "inspect", data)
    assert before.returncode == 1 and "holds no known format" in before.stderr
    changed = follow("data format", copy.root)
    assert changed[0] == "guerdon/data/formats/npz_episodes.py"
    result = copy("-m", "guerdon.cli.main", "data", "inspect", data, "--json")
    printed = json.loads(result.stdout)
    assert (printed["format"], printed["num_episodes"], printed["num_success_episodes"]) == (
        "npz-episodes",
        3,
        2,
    )
    assert [Path(fault["path"]).name for fault in printed["faults"]] == ["9.npz"]
    result = copy("-m", "guerdon.cli.main", "data", "convert", data, copy.root / "store", "--to", "native")
    assert result.returncode == 0 and "3 episodes" in result.stdout


def test_a_new_verb(copy):
    from tests.fit.synthetic import write_store

    write_store(copy.root / "data")
    before = copy("-m", "guerdon.cli.main", "data", "count", "data")
    assert before.returncode == 2 and "invalid choice" in before.stderr
    assert follow("verb", copy.root) == ["guerdon/cli/data.py", "guerdon/cli/main.py"]
    printed = json.loads(copy("-m", "guerdon.cli.main", "data", "count", "data", "--json").stdout)
    assert printed["num_episodes"] > 0
    assert (
        copy("-m", "guerdon.cli.main", "data", "count", "data").stdout
        == f"{printed['num_episodes']} episodes\n"
    )
    assert "the number of episodes" in copy("-m", "guerdon.cli.main", "data", "--help").stdout
    assert copy("-m", "guerdon.cli.main", "data", "count", "nowhere").returncode == 1
