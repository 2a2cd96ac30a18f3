"""Data moves one way down the street: a stage imports only from the stages before it."""

import ast
from pathlib import Path

import pytest

import guerdon

STREET = [
    "errors",
    "types",
    "strict_json",
    "images",
    "moments",
    "adam",
    "progress",
    "orphans",
    "interrupts",
    "web",
    "config",
    "store",
    "envs",
    "collect",
    "datasets",
    "models",
    "rewards",
    "fit",
    "serve",
    "learn",
    "watch",
    "wrappers",
    "parallel",
    "run",
    "verbs",
    "cli",
]
ROOT = Path(guerdon.__file__).parent


def stage_of(path: Path, root: Path) -> str:
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
        stage = stage_of(path, root)
        if stage in ("__init__", "conf"):
            continue
        if stage not in STREET:
            found.append(f"{path.name}: {stage} has no place in the street")
            continue
        for name in imports_of(path, root):
            parts = name.split(".")
            if parts[0] == "ray" and stage != "parallel":
                found.append(f"{path.relative_to(root)} imports Ray")
            ours = parts[0] == "guerdon" and len(parts) > 1 and parts[1] in STREET
            if ours and STREET.index(parts[1]) > STREET.index(stage):
                found.append(f"{path.relative_to(root)} imports {name}, which lies downstream")
    return sorted(set(found))


def test_no_stage_imports_a_stage_downstream_of_it():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("store/bad.py", "from guerdon.collect import RewardDataCollector\n", "imports guerdon.collect"),
        ("store/bad.py", "def f():\n    import guerdon.cli\n", "imports guerdon.cli"),
        ("store/bad.py", "from ..envs import make\n", "imports guerdon.envs"),
        ("fit/bad.py", "import ray\n", "imports Ray"),
        ("fit/bad.py", "from ray import remote\n", "imports Ray"),
        ("helpers.py", "", "no place in the street"),
    ],
)
def test_the_test_itself_notices(tmp_path, file, text, complaint):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert len(violations(tmp_path)) >= 1
    assert any(complaint in line for line in violations(tmp_path))


def test_ray_is_welcome_in_parallel(tmp_path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "engine.py").write_text("import ray\n")
    assert violations(tmp_path) == []


def test_importing_the_package_is_light():
    import subprocess
    import sys

    code = (
        "import sys, guerdon; print([m for m in ('torch', 'hydra', 'gymnasium', 'ray') if m in sys.modules])"
    )
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
    run = f"import sys; from guerdon.cli import main; code = main({arguments})"
    code = f"{run}; print('torch' in sys.modules, code)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False 0", result.stdout + result.stderr
