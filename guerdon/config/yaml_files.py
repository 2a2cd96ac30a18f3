"""Config files are written for OmegaConf and read within limits: a few bytes can stand for a lot of memory.

YAML lets a node be named and repeated (`&a`, `*a`), also inside itself, and OmegaConf lets values refer to
each other (`${a}`). Both are counted before anything is built: `check_file` looks at the parser's events,
`check_references` at the composed tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

from guerdon.config.nested import KeyPath, dotted
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path

MAX_BYTES = 128 << 10
MAX_DEPTH = 32
MAX_NODES = 10_000
"""With what aliases stand for."""
MAX_PLAIN = 300
"""Characters of a number (`!!int ...`), and of a value without quotes, which might be one."""
MAX_REFERENCES = 200
"""Values with `${...}` in a tree; each is parsed by a slow grammar ..."""
MAX_REFERENCE_LENGTH = 300
"""... in a time that grows with its length."""
MAX_EXPANDED = 200_000
"""Characters and entries of a tree whose references are resolved."""
_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq"))
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_READS_A_KEY = ("oc.select", "oc.dict.keys", "oc.dict.values", "oc.deprecated")
_INNERMOST = re.compile(r"\$\{([^{}]*)\}")
_HOLE = "\0"


def check_file(path: Path) -> None:
    """Raise a `ConfigError` that names the file unless it is YAML in UTF-8 of a config's size."""
    from yaml import YAMLError  # type: ignore[import-untyped]

    shown = display_path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{shown} is larger than {MAX_BYTES >> 10} KiB, which no config is")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown} is not text in UTF-8 (byte {error.start}): save it in that encoding"
        ) from error
    try:
        for place, problem in _problems(text):
            raise ConfigError(f"{shown}, line {place + 1}: {problem}")
    except YAMLError as error:
        raise ConfigError(_syntax_error(error, shown)) from error


def _syntax_error(error: Any, shown: str) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    return f"{shown}{line}: not valid YAML: {' '.join(str(problem or error).split())}"


def _problems(text: str) -> Iterator[tuple[int, str]]:
    """(line from 0, what is wrong) for the first thing that is beyond the limits."""
    import yaml

    sizes: dict[str | None, int] = {}  # anchor -> nodes, with those that aliases repeat
    anchors: list[str | None] = []  # of the collections whose end has not come yet
    counts = [0]  # nodes of the document so far, and of each of these collections
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line, anchor = event.start_mark.line, getattr(event, "anchor", None)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", *_TAGS):
            yield line, f"the tag {str(tag)[:60]!r} is not known in a config"
        if isinstance(event, yaml.AliasEvent):
            if anchor in anchors:
                yield line, f"*{anchor} stands inside of what it repeats"
            counts[-1] += sizes.get(anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            is_number = tag in _NUMBER_TAGS
            if (event.implicit[0] or is_number) and len(event.value) > MAX_PLAIN:
                yield line, f"a value of {len(event.value)} characters: put text of that length in quotes"
            if is_number and not event.value.replace("_", "").lstrip("+-"):
                yield line, f"{event.value!r} with the tag !!{str(tag).rpartition(':')[2]} is no number"
            refers = "${" in event.value
            if refers and len(event.value) > MAX_REFERENCE_LENGTH:
                yield line, f"a value with ${{...}} has at most {MAX_REFERENCE_LENGTH} characters"
            sizes[anchor] = MAX_NODES // MAX_REFERENCES if refers else 1 + len(event.value) // 64
            counts[-1] += sizes[anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            anchors.append(anchor)
            counts.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            sizes[anchors.pop()] = ended = counts.pop()
            counts[-1] += ended
        if len(anchors) > MAX_DEPTH:
            yield line, f"sections are nested more than {MAX_DEPTH} deep"
        if sum(counts) > MAX_NODES:
            yield line, f"more than {MAX_NODES} entries, with those that aliases repeat"


def to_yaml(tree: Any) -> str:
    """Plain containers as OmegaConf's `to_yaml` writes them, in a tenth of its time."""
    import yaml

    text: str = yaml.dump(tree, Dumper=_dumper(), sort_keys=False, allow_unicode=True)
    return text


@cache
def _dumper() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class SettingsDumper(base):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent_text(dumper: Any, text: str) -> Any:
        style = "'" if _is_number(text) else None  # OmegaConf takes 1e-3 for a number, YAML does not
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    SettingsDumper.add_representer(str, represent_text)
    return SettingsDumper


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_references(tree: Mapping[Any, Any]) -> int:
    """The number of values with `${...}` in a composed tree.

    Raises:
        ConfigError: They lead in circles, or make the tree too large.
    """
    expansion = _Expansion(tree)
    if expansion.size(()) > MAX_EXPANDED:
        raise ConfigError(
            f"the config is too large when its references (${{...}}) are resolved: over {MAX_EXPANDED} "
            "characters"
        )
    return expansion.num_references


class _Expansion:
    """How large a tree becomes when references are resolved, without resolving them.

    Where a name is put together from other references, the whole section above it is counted.
    """

    def __init__(self, tree: Mapping[Any, Any]) -> None:
        self._tree = tree
        self._sizes: dict[KeyPath, int] = {}
        self._open: set[KeyPath] = set()
        self.num_references = 0

    def size(self, path: KeyPath) -> int:
        """Characters and entries at `path`."""
        if path in self._sizes:
            return self._sizes[path]
        if path in self._open:
            raise ConfigError(f"{dotted(path) or 'the config'} refers to itself by ${{...}}")
        self._open.add(path)
        node = reduce(getitem, path, cast(Any, self._tree))
        size = min(self._counted(node, path), MAX_EXPANDED + 1)
        self._open.discard(path)
        self._sizes[path] = size
        return size

    def _counted(self, node: Any, path: KeyPath) -> int:
        if len(path) > 2 * MAX_DEPTH:
            raise ConfigError(f"{dotted(path[:3])}: sections are nested too deep")
        if isinstance(node, Mapping):
            return 1 + sum(self.size((*path, key)) for key in node)
        if isinstance(node, list):
            return 1 + sum(self.size((*path, place)) for place in range(len(node)))
        if not isinstance(node, str) or "${" not in node:
            return len(node) if isinstance(node, str) else 1
        self.num_references += 1
        if self.num_references > MAX_REFERENCES or len(node) > MAX_REFERENCE_LENGTH:
            raise ConfigError(
                f"{dotted(path)}: a config has at most {MAX_REFERENCES} values with ${{...}}, of at most "
                f"{MAX_REFERENCE_LENGTH} characters each"
            )
        return len(node) + sum(self.size(target) for target in self._targets(node, path))

    def _targets(self, text: str, path: KeyPath) -> Iterator[KeyPath]:
        """What exists of what `text` at `path` refers to."""
        while (match := _INNERMOST.search(text)) is not None:
            text = text[: match.start()] + _HOLE + text[match.end() :]
            name, is_call, arguments = match.group(1).partition(":")
            if is_call:
                name = arguments.partition(",")[0] if name.strip() in _READS_A_KEY else ""
            known, hole, _ = name.strip().partition(_HOLE)
            up = len(known) - len(known.lstrip("."))
            parts = [part for part in re.split(r"[.\[\]]+", known.lstrip(".")) if part]
            if hole and not known.endswith((".", "[")):
                parts = parts[:-1]
            target = (*(path[:-up] if up else ()), *parts)
            if name.strip() and (found := _resolved(self._tree, target)) is not None:
                yield found


def _resolved(tree: Any, path: KeyPath) -> KeyPath | None:
    """`path` with its parts as the tree's own keys and indices; None if nothing is there."""
    found: list[Any] = []
    for part in path:
        if isinstance(tree, Mapping):
            key = next((key for key in (part, str(part)) if key in tree), None)
            key = next((own for own in tree if str(own) == str(part)), None) if key is None else key
        else:
            is_index = isinstance(tree, list) and re.fullmatch(r"[0-9]{1,6}", str(part)) is not None
            key = int(part) if is_index and int(part) < len(tree) else None
        if key is None:
            return None
        found.append(key)
        tree = tree[key]
    return tuple(found)
