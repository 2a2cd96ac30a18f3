"""Imports go one way: a package uses those of the layers below its own, and Ray stays in `distributed`."""

import ast
import re
from pathlib import Path

import pytest

import guerdon

LAYERS = [
    {"core"},
    {"config", "web"},
    {"envs"},
    {"data"},
    {"rewards"},
    {"agents", "fit"},
    {"monitoring", "distributed"},
    {"training"},
    {"integrations"},
    {"api"},
    {"cli"},
]
"""From below; packages of one layer do not use each other. `docs/architecture.md` draws the same."""
PUBLIC = {"collect", "datasets", "models", "serve", "run", "wrappers"}
"""Modules that only give public names a stable place: nothing of ours imports them."""
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
ROOT = Path(guerdon.__file__).parent


def package_of(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def imports_of(path: Path, root: Path) -> list[str]:
    """Absolute names of everything a file imports, inside functions too."""
    names = []
    package = ["guerdon", *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [module] + [f"{module}.{alias.name}" for alias in node.names]
    return names


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        package, place = package_of(path, root), path.relative_to(root)
        if package in ("__init__", "__main__") or package in PUBLIC:
            continue
        if package not in HEIGHT:
            found.append(f"{place}: {package} has no place in the layers")
            continue
        for name in imports_of(path, root):
            parts = name.split(".")
            if parts[0] == "ray" and package != "distributed":
                found.append(f"{place} imports Ray")
            if parts[0] != "guerdon" or len(parts) == 1 or parts[1] == package:
                continue
            if parts[1] in PUBLIC:
                found.append(f"{place} imports {name}, a public name: import its home")
            elif parts[1] in HEIGHT and HEIGHT[parts[1]] >= HEIGHT[package]:
                found.append(f"{place} imports {name}, which does not lie below it")
    return sorted(set(found))


def test_no_package_imports_one_that_does_not_lie_below_it():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("data/bad.py", "from guerdon.rewards import BaseRewardModel\n", "imports guerdon.rewards"),
        ("data/bad.py", "from guerdon.collect import RewardDataCollector\n", "a public name"),
        ("fit/bad.py", "from guerdon.agents import ppo\n", "imports guerdon.agents"),
        ("data/bad.py", "def f():\n    import guerdon.cli.main\n", "imports guerdon.cli.main"),
        ("core/bad.py", "from ..envs import make\n", "imports guerdon.envs"),
        ("fit/bad.py", "import ray\n", "imports Ray"),
        ("fit/bad.py", "from ray import remote\n", "imports Ray"),
        ("helpers.py", "", "no place in the layers"),
    ],
)
def test_the_test_itself_notices(tmp_path, file, text, complaint):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert len(violations(tmp_path)) >= 1
    assert any(complaint in line for line in violations(tmp_path))


def test_ray_is_welcome_in_distributed(tmp_path):
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "engine.py").write_text("import ray\n")
    assert violations(tmp_path) == []


def test_importing_the_package_is_light():
    import subprocess
    import sys

    heavy = ("torch", "hydra", "gymnasium", "numpy", "ray")
    code = f"import sys, guerdon; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["collect", "collect.save_dir=more", "collect.target_success=1", "collect.target_failure=1"],
        ["data", "inspect", "data"],
        ["data", "audit", "data"],
        ["data", "convert", "data", "copy", "--to", "npy-trajectory"],
    ],
    ids=["collect", "inspect", "audit", "convert"],
)
def test_commands_that_compute_no_gradient_start_without_torch(tmp_path, arguments):
    """It takes most of the time that such a command takes."""
    import subprocess
    import sys

    from tests.fit.synthetic import write_store

    write_store(tmp_path / "data")
    run = f"import sys; from guerdon.cli.main import main; code = main({arguments})"
    code = f"{run}; print('torch' in sys.modules, code)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False 0", result.stdout + result.stderr


def test_the_files_of_a_run_are_written_in_one_place():
    written = re.compile(r"def _?write_(config|summary)\(")
    files = [path for path in ROOT.rglob("*.py") if written.search(path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in files] == ["training/folders.py"]
