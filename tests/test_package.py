"""The package as others get it: texts agree, workflows run our targets, the wheel works elsewhere."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import guerdon

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
TEXTS = ("guerdon/__init__.py", "CHANGELOG.md", "CITATION.cff")
DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv_python", "hydra": "hydra_core", "mlflow": "mlflow_skinny"}
DISTRIBUTIONS |= {"rerun": "rerun_sdk", "yaml": "pyyaml"}
"""Modules whose distribution has another name."""


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_script("release")
PYPROJECT = (ROOT / "pyproject.toml").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def targets_of(workflow):
    """What the workflow tells `make` to make."""
    commands = [line for step in steps_of(workflow) for line in step.get("run", "").splitlines()]
    words = [line.split()[1:] for line in commands if line.startswith("make ")]
    return {word for line in words for word in line if "=" not in word}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_targets_that_exist(file):
    workflow = yaml.safe_load(file.read_text())
    assert targets_of(workflow) and targets_of(workflow) <= TARGETS
    assert workflow["permissions"].keys() == {"contents"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    actions = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert actions and all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in actions)
    # A branch or a tag may be named like a command: it reaches a shell as a variable only.
    assert not any("${{ github." in step.get("run", "") for step in steps_of(workflow))


def test_the_workflows_run_what_a_change_must_pass():
    made = {file.stem: targets_of(yaml.safe_load(file.read_text())) for file in WORKFLOWS}
    assert made["ci"] >= {"lint", "test", "release-check", "docs-site"}
    assert "test-full" in made["nightly"]
    assert made["release"] >= {"lint", "test", "release-check"}


def test_ci_runs_the_python_versions_that_the_package_names():
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT))
    tested = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]
    assert set(tested["matrix"]["python"]) == named
    (least,) = re.findall(r'^requires-python = ">=(3\.\d+)"$', PYPROJECT, re.M)
    assert least == min(named, key=lambda version: int(version.partition(".")[2]))
    assert f"Guerdon needs Python {least} or later" in (ROOT / "docs/howto/install.md").read_text()


def imported_modules():
    """Top-level names of the modules that the package imports, but for Python's and its own."""
    nodes = [
        node for file in (ROOT / "guerdon").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))
    ]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"guerdon"}


def test_what_the_package_imports_is_among_its_dependencies():
    project = tomllib.loads(PYPROJECT)["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(each for name in extras if name != "dev" for each in extras[name])]
    declared = {re.split(r"[\[>=]", text)[0].replace("-", "_").lower() for text in listed}
    imported = {DISTRIBUTIONS.get(name, name).lower() for name in imported_modules()}
    assert {"torch", "pyyaml", "omegaconf"} <= imported <= declared


def test_every_extra_is_checked_explained_and_pinned():
    from guerdon.cli.check import EXTRAS

    extras = tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]
    extras = {name: extras[name] for name in extras if name not in ("dev", "docs")}
    assert EXTRAS.keys() == extras.keys()
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    page = (ROOT / "docs/howto/install.md").read_text()
    for name, (distribution, _) in EXTRAS.items():
        needed = {re.split(r"[\[>=]", text)[0] for text in extras[name]}
        assert distribution.replace("_", "-") in {each.replace("_", "-") for each in needed}
        assert {each.lower().replace("_", "-") for each in needed} <= {
            each.lower().replace("_", "-") for each in pinned
        }
        assert f"`{name}`" in page


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda f: f.stem
)
def test_issue_templates_are_forms(file):
    form = yaml.safe_load(file.read_text())
    if file.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    kinds = {part["type"] for part in form["body"]}
    assert kinds <= {"textarea", "checkboxes", "markdown", "input", "dropdown"}
    assert len({part["id"] for part in form["body"]}) == len(form["body"])


def test_the_version_stands_in_one_place():
    assert release.version() == guerdon.__version__
    assert 'dynamic = ["version"]' in PYPROJECT and not re.search(r'^version = "', PYPROJECT, re.M)
    assert release.check_texts() == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == guerdon.__version__ and citation["license"] == release.LICENSE


def test_make_names_the_python_that_it_needs(tmp_path):
    """The pinned versions have no wheels for Python 3.10."""
    old = tmp_path / "python3.10"
    old.write_text(
        "#!/bin/bash\nexec " + sys.executable + ' -c "import sys; sys.version_info = (3, 10); $2"\n'
    )
    old.chmod(0o755)
    command = ["make", "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and "need Python 3.11 or later" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "guerdon").mkdir()
    for name in TEXTS:
        shutil.copy(ROOT / name, tmp_path / name)
    ready = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2027-01-31\n\n### Added\n- All.\n"
    (tmp_path / "CHANGELOG.md").write_text(ready)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "before", "after", "complaint"),
    [
        ("guerdon/__init__.py", '"0.1.0"', '"0.2.0"', "no section [0.2.0]"),
        ("CITATION.cff", "version: 0.1.0", "version: 0.0.9", "CITATION.cff has version 0.0.9"),
        ("CHANGELOG.md", "- 2027-01-31", "(not published)", "must end in a date"),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n- More.\n", "move what is [Unreleased]"),
    ],
)
def test_texts_that_disagree_are_named(texts, file, before, after, complaint):
    (texts / "guerdon/__init__.py").write_text('__version__ = "0.1.0"\n')
    assert release.check_texts(texts, tag="v0.1.0") == []
    assert any("the tag must be v0.1.0" in line for line in release.check_texts(texts, tag="v0.3.0"))
    text = (texts / file).read_text()
    assert before in text
    (texts / file).write_text(text.replace(before, after, 1))
    assert any(complaint in line for line in release.check_texts(texts, tag="v0.1.0"))


def test_release_notes_are_the_section_of_the_changelog():
    newer = "## [2.0] - 2027-01-01\n\n### Added\n- One thing\n  in two lines.\n- Two.\n"
    changelog = f"# Changes\n\n{newer}\n## [1.0]\n- Old.\n"
    assert release.notes(changelog, "2.0") == "### Added\n- One thing in two lines.\n- Two.\n"
    assert release.notes(changelog, "1.0") == "- Old.\n"
    with pytest.raises(SystemExit, match=r"no section \[3.0\]; it has 2.0, 1.0"):
        release.notes(changelog, "3.0")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel."""
    return release.build(tmp_path_factory.mktemp("dist"))


@pytest.mark.slow
def test_what_is_built_passes_the_checks(built, tmp_path):
    sdist, wheel = built
    assert release.check_wheel(wheel) == [] and release.check_sdist(sdist) == []
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.count("PASSED") == 2
    lacking = tmp_path / wheel.name
    shutil.copy(wheel, lacking)
    (tmp_path / "guerdon").mkdir()
    (tmp_path / "guerdon/__init__.py").write_text(
        '__version__ = "0.1.0"\n'.replace("0.1.0", guerdon.__version__)
    )
    (tmp_path / "guerdon/page.html").write_text("new")
    problems = release.check_wheel(lacking, tmp_path)
    assert "the wheel lacks guerdon/page.html" in problems
    assert any("guerdon/cli/main.py, which is no file of the package" in line for line in problems)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Folders with the package as it is installed from each of the two files, outside of the repository."""
    folders = []
    for source in built:
        folders.append(tmp_path_factory.mktemp("installed"))
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", folders[-1]]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, source]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return folders


@pytest.mark.slow
def test_both_files_install_the_same_package(installed):
    """What one of them is tested with holds for the other."""
    contents = [
        {
            path.relative_to(folder): path.read_bytes()
            for path in (folder / "guerdon").rglob("*.*")
            if path.is_file()
        }
        for folder in installed
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 200 and (installed[0] / "bin" / "guerdon").is_file()
    assert (installed[1] / "bin" / "guerdon").is_file()


@pytest.fixture(scope="module")
def elsewhere(installed, tmp_path_factory):
    """Runs Python with the package installed from the source distribution, outside of the repository."""
    site, folder = installed[0], tmp_path_factory.mktemp("work")

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )

    place = run("-c", "import guerdon; print(guerdon.__file__, guerdon.__version__)").stdout.split()
    assert place == [str(site / "guerdon/__init__.py"), guerdon.__version__]
    return run


@pytest.mark.slow
def test_an_installed_package_works_outside_of_the_repository(elsewhere):
    assert f"guerdon {guerdon.__version__}" in elsewhere("-m", "guerdon.cli.main", "--version").stdout
    small = ["env.train.num_envs=4", "env.train.init_params.image_size=[16,16]"]
    small += ["collect.target_success=2", "collect.target_failure=2", "collect.save_dir=data", "--json"]
    result = elsewhere("-m", "guerdon.cli.main", "collect", *small)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["num_success"] == 2
    result = elsewhere("-m", "guerdon.cli.main", "config", "show", "cartpole_gail", "--changed")
    assert result.returncode == 0 and "# guerdon/conf/zoo/cartpole_gail.yaml" in result.stdout
    listed = elsewhere("-m", "guerdon.cli.main", "zoo", "list", "--json")
    assert {"gail", "rnd"} <= {model["name"] for model in json.loads(listed.stdout)["models"]}
    options = [
        "fit.data.path=data",
        "fit.epochs=1",
        "reward.model.width=8",
        "reward.model.image_size=[3,32,32]",
    ]
    result = elsewhere("-m", "guerdon.cli.main", "train-reward", *options, "--json")
    assert result.returncode == 0, result.stderr
    checkpoint = json.loads(result.stdout)["checkpoint"]
    options = ["--checkpoint", checkpoint, "--data", "data", "--out", "card.html", "--json"]
    result = elsewhere("-m", "guerdon.cli.main", "reward", "card", *options)
    assert result.returncode == 0, result.stderr


def test_the_source_distribution_is_told_what_to_leave_out(tmp_path):
    """`check_sdist` sees a file that does not belong."""
    names = ["guerdon-0/tests/test_x.py", *(f"guerdon-0/{name}" for name in release.BUILT_FROM)]
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    assert release.check_sdist(tmp_path / "x.tar.gz") == ["the source distribution holds tests"]
