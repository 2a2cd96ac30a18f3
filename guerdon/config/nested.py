"""Reading and writing nested dicts by path: a tuple of keys, or `a.b`; inside a list a key is an index."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from guerdon.core.errors import ConfigError

KeyPath: TypeAlias = tuple[Any, ...]
Tree: TypeAlias = dict[Any, Any]

ABSENT: Any = object()
"""What `get` returns where there is nothing; None is a value."""


def parts(path: KeyPath | str) -> KeyPath:
    """`a.b` as a path; a path as it is."""
    return tuple(path.split(".")) if isinstance(path, str) else path


def dotted(path: KeyPath) -> str:
    """A path as `a.b`."""
    return ".".join(str(part) for part in path)


def leaves(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """All values that are no dicts, and empty dicts, with their paths; lists count as values."""
    if isinstance(node, Mapping) and (node or not path):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, node


def get(node: Any, path: KeyPath | str, default: Any = ABSENT) -> Any:
    """What stands at `path`, or `default`; with a default, null counts as nothing."""
    for part in parts(path):
        if isinstance(node, list) and _is_index(node, part):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return default
    return default if node is None and default is not ABSENT else node


def number(node: Any, path: KeyPath | str, default: float, low: float = -math.inf) -> float:
    """The number at `path`, or `default`; text such as `1e-3` counts, which YAML takes for no number.

    Raises:
        ConfigError: something else stands there, or a number below `low`.
    """
    value = get(node, path, default)
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (math.isfinite(found) and found >= low):
        least = "" if low == -math.inf else f" of at least {low:g}"
        raise ConfigError(f"{dotted(parts(path))} must be a number{least}, not {repr(value)[:60]}")
    return found


def whole(node: Any, path: KeyPath | str, default: int, low: float = -math.inf) -> int:
    """As `number`, without what follows the point."""
    return int(number(node, path, default, low))


def subtree(node: Any, path: KeyPath | str) -> Tree:
    """The settings below `path`; none if nothing stands there."""
    found = get(node, path, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{dotted(parts(path))} must be a section with keys, not {repr(found)[:60]}")
    return found


def put(tree: Tree, path: KeyPath | str, value: Any) -> None:
    """Set `path` to `value`, making the sections on the way; refuses to turn a value into a section."""
    node: Any = tree
    path = parts(path)
    for part in path[:-1]:
        key = _key(node, part, path)
        if isinstance(node, dict) and node.get(key) is None:  # absent, or a section with nothing below it
            node[key] = {}
        node = node[key]
    node[_key(node, path[-1], path)] = value


def rename(path: KeyPath, table: Mapping[str, str]) -> tuple[KeyPath, str | None]:
    """The path after a table of renames, and the entry that did it: the longest one that it begins with."""
    for length in range(len(path), 0, -1):
        old = dotted(path[:length])
        if old in table:
            return (*parts(table[old]), *path[length:]), old
    return path, None


def delete(tree: Tree, path: KeyPath) -> None:
    """Remove what stands at `path`, which must be there."""
    parent = get(tree, path[:-1])
    del parent[_key(parent, path[-1], path)]


def merged(base: Any, over: Any) -> Any:
    """`over` laid on `base`: dicts key by key, anything else replaced; null over a section leaves it."""
    if isinstance(base, dict) and over is None:
        return base
    if not isinstance(base, dict) or not isinstance(over, Mapping):
        return over
    return base | {key: merged(base.get(key, value), value) for key, value in over.items()}


def _is_index(node: list[Any], part: Any) -> bool:
    return str(part).isdecimal() and int(part) < len(node)


def _key(node: Any, part: Any, path: KeyPath) -> Any:
    """`part` as a key of the dict or an index of the list `node`."""
    if isinstance(node, dict):
        return part
    if isinstance(node, list) and _is_index(node, part):
        return int(part)
    found = f"a list of {len(node)} entries" if isinstance(node, list) else repr(node)
    raise ConfigError(f"{dotted(path)} cannot be set: {found} stands where {part!r} is looked up")
