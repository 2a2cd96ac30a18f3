"""What a release must pass, and its notes.

    python scripts/release.py check [--tag v0.2.0] [--out dist]
    python scripts/release.py notes [0.2.0]

`check` compares version, changelog and citation, builds the source distribution and the wheel, and looks into
both. With `--tag` the changelog must be ready for publication: the version has a date, nothing is unreleased.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
BUILT_FROM = (
    "guerdon", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff",
    "SECURITY.md", "constraints.txt",
)  # fmt: skip
"""What is copied and built: leftovers of earlier builds in the checkout must not get in."""
LICENSE = "Apache-2.0"


def version(root: Path = ROOT) -> str:
    """The one version number, read without importing the package."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "guerdon/__init__.py").read_text(), re.M)
    if found is None:
        raise SystemExit('guerdon/__init__.py has no line __version__ = "..."')
    return found[1]


def sections(changelog: str) -> dict[str, tuple[str, str]]:
    """Version (or `Unreleased`) -> what follows it in the heading, and the text of its section."""
    found = re.findall(r"^## \[([^\]]+)\]([^\n]*)\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    return {name: (heading.strip(), text.strip()) for name, heading, text in found}


def notes(changelog: str, name: str) -> str:
    """The section of a version, without the line breaks of the source."""
    if name not in sections(changelog):
        known = ", ".join(sections(changelog))
        raise SystemExit(f"CHANGELOG.md has no section [{name}]; it has {known}")
    return re.sub(r"\n {2,}(?=\S)", " ", sections(changelog)[name][1]) + "\n"


def check_texts(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """What is wrong with version, changelog and citation."""
    number, known = version(root), sections((root / "CHANGELOG.md").read_text())
    problems = []
    if number not in known:
        problems.append(f"CHANGELOG.md has no section [{number}], the version in guerdon/__init__.py")
    cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.M)
    if cited is None or cited[1] != number:
        problems.append(f"CITATION.cff has version {cited and cited[1]}, not {number}")
    if tag is not None:
        if tag != f"v{number}":
            problems.append(f"the tag is {tag}, the version {number}: the tag must be v{number}")
        if not re.fullmatch(r"- \d{4}-\d\d-\d\d", known.get(number, ("", ""))[0]):
            problems.append(f"CHANGELOG.md: the heading of [{number}] must end in a date: - YYYY-MM-DD")
        if known.get("Unreleased", ("", ""))[1]:
            problems.append(f"CHANGELOG.md: move what is [Unreleased] to [{number}]")
    return problems


def build(out: Path, root: Path = ROOT) -> tuple[Path, Path]:
    """Source distribution and wheel, made of a copy of the checkout with the tools that are installed."""
    with tempfile.TemporaryDirectory() as folder:
        for name in BUILT_FROM:
            source, target = root / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out.resolve()), folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    number = version(root)
    return out / f"guerdon-{number}.tar.gz", out / f"guerdon-{number}-py3-none-any.whl"


def check_wheel(wheel: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with the wheel: files, version, licence, the command."""
    number = version(root)
    info = f"guerdon-{number}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
        commands = archive.read(f"{info}/entry_points.txt").decode()
    own = {
        path.relative_to(root).as_posix()
        for path in (root / "guerdon").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in names if not name.startswith(f"{info}/")}
    problems = [f"the wheel lacks {name}" for name in sorted(own - packed)]
    problems += [f"the wheel holds {name}, which is no file of the package" for name in sorted(packed - own)]
    if f"{info}/licenses/LICENSE" not in names or metadata["License-Expression"] != LICENSE:
        problems.append(f"the wheel has no LICENSE or names {metadata['License-Expression']}, not {LICENSE}")
    if metadata["Version"] != number:
        problems.append(f"the wheel has version {metadata['Version']}, not {number}")
    if "guerdon = guerdon.cli:command" not in commands:
        problems.append("the wheel installs no command `guerdon`")
    return problems


def check_sdist(sdist: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with the source distribution."""
    with tarfile.open(sdist) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    files = [name for name in BUILT_FROM if (root / name).is_file()]
    problems = [f"the source distribution lacks {name}" for name in files if name not in names]
    allowed = {"guerdon", "guerdon.egg-info", "PKG-INFO", "setup.cfg", ".", *files}
    more = sorted({name.partition("/")[0] for name in names} - allowed)
    return problems + [f"the source distribution holds {name}" for name in more]


def check(out: Path, tag: str | None) -> list[str]:
    """Everything; what was built stays in `out`."""
    problems = check_texts(tag=tag)
    sdist, wheel = build(out)
    command = [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)]
    twine = subprocess.run(command, capture_output=True, text=True)
    if twine.returncode:
        problems.append(f"twine check: {twine.stdout.strip()}")
    return problems + check_wheel(wheel) + check_sdist(sdist)


def main() -> int:
    """Check, or print notes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    checking = actions.add_parser("check")
    checking.add_argument("--tag", help="the tag that is to be published")
    checking.add_argument("--out", type=Path, default=ROOT / "dist", help="for what is built (dist)")
    actions.add_parser("notes").add_argument("version", nargs="?", help="or Unreleased")
    arguments = parser.parse_args()
    if arguments.action == "notes":
        changelog = (ROOT / "CHANGELOG.md").read_text()
        sys.stdout.write(notes(changelog, arguments.version or version()))
        return 0
    problems = check(arguments.out, arguments.tag)
    print("\n".join(problems) or f"guerdon {version()}: all checks passed, built in {arguments.out}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
