"""Pages of the documentation site that are made from the code: a hook of mkdocs (`make docs-site`).

Settings come from the schema (a field's meaning is the string under it), the command from its table of verbs,
reward models from their modules, and the API from the public names. Nothing of it is kept in the repository.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Container, Iterator
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

import guerdon
from guerdon.cli.main import VERBS
from guerdon.config.maniskill import ManiSkillConfig
from guerdon.config.schema import GuerdonConfig
from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.config.schema_zoo import SerialConfig
from guerdon.config.tabletop import TabletopConfig
from guerdon.rewards.registry import REWARD_MODELS
from guerdon.rewards.zoo.base import ZooSettings

ROOT = Path(__file__).parent.parent
MODELS = "reward-models"
TREES: dict[str, tuple[str, type]] = {
    "all": ("All commands", GuerdonConfig),
    "zoo": ("Pipelines of the reward-model zoo (`guerdon zoo`)", SerialConfig),
    "reward_model": ("Every reward model of the zoo (`reward_model`)", ZooSettings),
    "tabletop": ("The embedded environment (`env.train.init_params`)", TabletopConfig),
    "maniskill": ("ManiSkill (`env.train.init_params`)", ManiSkillConfig),
    "robot": ("Robots (`env.train.override_cfg`)", RobotEnvConfig),
}
"""Roots of the settings reference: what they are for, and the dataclass."""
PUBLIC_MODULES = ("rewards", "collect", "datasets", "models", "serve", "run", "wrappers")
"""Modules whose `__all__` is public, beside the names of `guerdon` itself."""
TYPES = {
    "PositiveInt": "int, at least 1",
    "NonNegativeInt": "int, at least 0",
    "PositiveFloat": "float, above 0",
    "NonNegativeFloat": "float, at least 0",
    "Fraction": "float, 0 to 1",
    "LayerWidth": "int, 1 to 8192",
    "EncoderWidth": "int, 1 to 256",
    "NetworkParts": "int, 1 to 256",
    "None": "null",
}


@cache
def meanings(cls: type) -> dict[str, tuple[str, str]]:
    """Field -> (annotation as written, meaning), of a dataclass and of those that it derives from."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for item, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                _, text = found.get(item.target.id, ("", ""))  # another default, the same meaning
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    text = " ".join(str(after.value.value).split())
                found[item.target.id] = ast.unparse(item.annotation), text
    return found


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """The dataclasses below `cls` and their dotted names; `NAME[]` are entries of a list or mapping."""
    for name, hint in get_type_hints(cls).items():
        below = [part for part in parts_of(hint) if isinstance(part, type) and is_dataclass(part)]
        for section in below:
            path = f"{prefix}{name}" if section is hint else f"{prefix}{name}[]"
            yield path, section
            yield from sections(section, f"{path}.")


def parts_of(hint: Any) -> Iterator[Any]:
    """A type and the types that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)


def default(item: Field[Any]) -> str:
    """The default value, as YAML has it."""
    if item.default is not MISSING:
        value = item.default
    elif item.default_factory is not MISSING:
        value = item.default_factory()
    else:
        return "required"
    return f"`{value if isinstance(value, str) else json.dumps(value, default=asdict)}`"


def kind(annotation: str, hint: Any) -> str:
    """The type of a setting in words, from how it is written and what it is."""
    if get_origin(hint) is Literal:
        return " · ".join(f"`{choice}`" for choice in get_args(hint))
    if match := re.match(r"Annotated\[str, NameOrPlugin\((\(.*?\)),", annotation):
        return " · ".join(f"`{name}`" for name in ast.literal_eval(match[1])) + " · a plugin"
    for choices in re.findall(r"Literal\[(.*?)\]", annotation):
        shown = " · ".join(f"`{choice.strip(chr(39))}`" for choice in choices.split(", "))
        annotation = annotation.replace(f"Literal[{choices}]", shown)
    for name, words in TYPES.items():
        annotation = re.sub(rf"\b{name}\b", words, annotation)
    return annotation.replace(" | ", " or ")


def table(cls: type, prefix: str = "", skip: Container[str] = ()) -> str:
    """Settings of one section: name, default, type, meaning."""
    rows = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    plain, hints = {name for name, _ in sections(cls) if "." not in name}, get_type_hints(cls)
    for item in fields(cls):
        if item.name in plain or item.name in skip:
            continue
        annotation, text = meanings(cls)[item.name]
        cells = (f"`{prefix}{item.name}`", default(item), kind(annotation, hints[item.name]), text)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def settings_page() -> str:
    """Every setting with its default and its meaning."""
    parts = [
        "# Settings",
        "This page is generated from `guerdon/config/schema*.py`, the only place where defaults are kept. "
        "Give a setting on the command line as `name=value`, or in a YAML file. "
        "Files in `guerdon/conf/` change some defaults for a command (`train.yaml`, `collect.yaml`, ...).",
    ]
    for title, cls in TREES.values():
        parts += [f"## {title}", inspect.getdoc(cls) or "", table(cls)]
        for name, section in sections(cls):
            parts += [f"### `{name}`", inspect.getdoc(section) or "", table(section, f"{name}.")]
    return "\n\n".join(part for part in parts if part)


def command_page() -> str:
    """Every verb of the command with its arguments."""
    parts = [
        "# The command",
        "This page is generated from the table of verbs. Every verb also takes `--json` (print the result as "
        "one JSON object), `--debug` (tracebacks and debug logs) and `--help`. Results go to stdout, logs to "
        "stderr. Exit code 0 is success, 1 a failure, 2 wrong usage.",
    ]
    for verb in VERBS:
        rows = ["| argument | default | meaning |", "|---|---|---|"]
        for names, options in verb.arguments:
            shown = ", ".join(f"`{name}`" for name in names)
            if "choices" in options:
                shown += " " + " · ".join(f"`{choice}`" for choice in options["choices"])
            value = "required" if options.get("required") else options.get("default")
            given = "" if value is None else f"`{value}`"
            rows.append(f"| {shown} | {given} | {options.get('help', '')} |")
        parts += [f"## guerdon {verb.name}", f"{verb.help[:1].upper()}{verb.help[1:]}."]
        parts += [f"```bash\n{verb.example}\n```"] if verb.example else []
        parts += ["\n".join(rows)] if len(rows) > 2 else []
    return "\n\n".join(parts)


def model_page(name: str) -> str:
    """What a reward model computes, its settings, the configs that use it, and what was measured."""
    cls = REWARD_MODELS[name]
    text = inspect.getdoc(importlib.import_module(cls.__module__)) or ""
    title, _, rest = text.partition("\n\n")
    parts = [f"# `{name}`", f"**{title}**" if rest else title, rest, "## Settings"]
    own: type[ZooSettings] = getattr(cls, "Settings", ZooSettings)
    shared = {item.name: item.default for item in fields(ZooSettings)}
    if own_table := table(own, skip=shared):
        parts += ["Of this model:", own_table]
    if changed := [item for item in fields(own) if item.default != shared.get(item.name, item.default)]:
        parts += ["Other defaults: " + ", ".join(f"`{item.name}` {default(item)}" for item in changed) + "."]
    parts += ["Settings that all models have are [in the settings reference](../reference/settings.md)."]
    if names := configs_of(name):
        run = f"guerdon zoo --config-name {names[0]}"
        listed = ", ".join(f"`{item}`" for item in names)
        parts += ["## Run it", f"Configs: {listed}. For example:", f"```bash\n{run}\n```"]
    if rows := measured(names):
        parts += ["## Measured", "[Benchmarks of the zoo](../benchmarks/zoo.md) has the conditions.", rows]
    return "\n\n".join(part for part in parts if part)


@cache
def configs_of(model: str) -> list[str]:
    """Names of the shipped configs with that reward model."""
    found = []
    for file in sorted((Path(guerdon.__file__).parent / "conf" / "zoo").glob("*.yaml")):
        section = (yaml.safe_load(file.read_text()) or {}).get("reward_model", {})
        if section.get("type") == model:
            found.append(file.stem)
    return found


def measured(names: list[str]) -> str:
    """Rows of these configs in the tables of the benchmark."""
    lines = (ROOT / "docs" / "benchmarks" / "zoo.md").read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| config | run by |"))
    rows = [line for line in lines if line.startswith(tuple(f"| {name} |" for name in names))]
    return "\n".join([*lines[head : head + 2], *rows]) if rows else ""


def api_page() -> str:
    """Public names with their docstrings."""
    parts = [
        "# Python API",
        "Public are the names on this page and the modules that hold them. Everything else may change.",
    ]
    for module in ("", *PUBLIC_MODULES):
        path = f"guerdon.{module}" if module else "guerdon"
        place = importlib.import_module(path)
        names = [name for name in getattr(place, "__all__", ()) if not name.startswith("__")]
        if not names:
            continue
        parts += [f"## `{path}`", (inspect.getdoc(place) or "").splitlines()[0]]
        for name in names:
            value = inspect.unwrap(getattr(place, name))  # `guerdon.collect` is a module, too
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                parts += [f"### `{path}.{name}`", f"A constant: `{type(value).__name__}`."]
            elif value.__module__.startswith("guerdon"):
                parts += [f"::: {value.__module__}.{value.__qualname__}"]
    return "\n\n".join(parts)


def root_page(name: str) -> str:
    """A page of the repository's root, with links as seen from the site."""
    text = (ROOT / name).read_text().replace("](docs/", "](")
    return re.sub(r"\]\((CONTRIBUTING|CHANGELOG)\.md", lambda match: f"]({match[1].lower()}.md", text)


PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/command.md": command_page,
    "reference/api.md": api_page,
    "contributing.md": partial(root_page, "CONTRIBUTING.md"),
    "changelog.md": partial(root_page, "CHANGELOG.md"),
    **{f"{MODELS}/{name}.md": partial(model_page, name) for name in sorted(REWARD_MODELS)},
}
"""Generated pages: where they are in the site, and what makes them."""


def on_config(config: Any) -> Any:
    """Put the package's version and the generated pages in place."""
    config.site_dir = str(Path(config.site_dir) / guerdon.__version__)
    config.extra["version"] = {"provider": "mike"}
    for section in config.nav:
        if "Reward models" in section:
            section["Reward models"] += [f"{MODELS}/{name}.md" for name in sorted(REWARD_MODELS)]
        if "How-to" in section:  # pages that mkdocs.yml does not name come last
            pages = sorted(f"howto/{page.name}" for page in (ROOT / "docs" / "howto").glob("*.md"))
            section["How-to"] += [page for page in pages if page not in str(config.nav)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_post_build(config: Any) -> None:
    """List the versions that lie side by side, for the menu in the header; the root leads to this one."""
    site = Path(config.site_dir).parent
    versions = sorted(item.parent.name for item in site.glob("*/index.html"))
    entries = [{"version": name, "title": name, "aliases": []} for name in reversed(versions)]
    (site / "versions.json").write_text(json.dumps(entries))
    (site / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={guerdon.__version__}/">\n')
