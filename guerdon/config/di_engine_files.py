"""Reads DI-engine's config files, which are Python, without running them.

A config file builds dicts from literals: `dict(...)`, numbers, text, earlier names, arithmetic and
`EasyDict(...)`. That much is evaluated here. Imports, functions and what stands under
`if __name__ == "__main__":` are not run.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from guerdon.config.nested import Tree
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path

MAX_BYTES = 256 * 1024
_MAX_SIZE = 20_000
"""Characters and members of a value, with all below it; a part that is shared counts each time."""
_MAX_WORK = 1_000_000
"""The same, added up over all values that a file computes."""
_MAX_BITS = 256
"""Of a whole number."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "str": str,
    "tuple": tuple,
    "EasyDict": lambda *given, **named: _copied(dict(*given, **named)),
    "deepcopy": lambda given: _copied(given),
}
"""Functions that a config file may call; they make or copy plain values."""


class _NotPlainError(Exception):
    """An expression that is more than a plain value."""


def read_di_engine(path: Path | str, trust: bool = False) -> tuple[Tree, Tree, dict[str, Any]]:
    """`main_config`, `create_config`, and what the file passes to its pipeline (`seed`, `max_env_step`).

    Args:
        path: a Python file of DI-engine's layout.
        trust: run the file; without it nothing in it is run, and a file that computes its config is refused.

    Raises:
        ConfigError: there is no such file, it is no config, or it has to be run.
    """
    path = Path(path)
    shown = display_path(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read DI-engine's config {shown}: {error.strerror}") from error
    if len(source) > MAX_BYTES:
        raise ConfigError(f"{shown} has {len(source)} bytes; a config has at most {MAX_BYTES}")
    try:
        module = ast.parse(source, filename=path.name)
        names, reasons = _evaluate(module)
        arguments = _pipeline_arguments(module, names)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{shown} is no Python file: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{shown} is nested too deeply for a config") from error
    if trust:
        names, reasons = _run(path), {}
    return (
        _config(names, reasons, "main_config", shown),
        _config(names, reasons, "create_config", shown),
        arguments,
    )


def _config(names: Mapping[str, Any], reasons: Mapping[str, str], name: str, shown: str) -> Tree:
    if name in reasons:
        raise ConfigError(
            f"{shown}: {name} is computed by code ({reasons[name]}), which is not run: use --trust if you "
            "trust the file, or write the value down"
        )
    if not isinstance(names.get(name), Mapping):
        raise ConfigError(f"{shown} is no config of DI-engine: it has no dict {name}")
    try:
        _size(names[name])  # assignments may have made it large, or a part of itself
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{shown}: {name} is no config: {error}") from error
    return dict(names[name])


def _run(path: Path) -> dict[str, Any]:
    try:
        return runpy.run_path(str(path), run_name="di_engine_config")
    except Exception as error:  # it is someone else's program: whatever it raises is the answer
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"running {display_path(path)} failed: {reason}") from error


def _evaluate(module: ast.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """Names with their values, and names whose values are more than plain, with the reason."""
    names: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    work = _Work()
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            for name in _changed_by(node):
                reasons[name] = f"line {node.lineno}"
            continue
        for target in targets:
            try:
                _assign(target, _value(value, names, reasons, work), names, reasons, work)
            except _NotPlainError as error:
                reasons[_root(target)] = str(error)
    return names, reasons


def _changed_by(node: ast.stmt) -> set[str]:
    """Names whose values a statement that is not run may change: a loop, `x.y += 1`, `x.update(...)`."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) or _is_program(node):
        return set()
    changed = set()
    for each in ast.walk(node):
        if isinstance(each, ast.alias):
            changed.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(
            each.ctx, ast.Load
        ):
            changed.add(_root(each))
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            changed.add(_root(each.func))
    return changed


def _is_program(node: ast.stmt) -> bool:
    """`if __name__ == "__main__":`, which is the file's own program."""
    tested = node.test.left if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) else None
    return isinstance(tested, ast.Name) and tested.id == "__name__"


def _root(target: ast.expr) -> str:
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _assign(
    target: ast.expr, value: Any, names: dict[str, Any], reasons: dict[str, str], work: _Work
) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
        reasons.pop(target.id, None)
    elif isinstance(target, ast.Attribute | ast.Subscript):
        owner = _value(target.value, names, reasons, work)
        if isinstance(target, ast.Attribute):
            key: Any = target.attr
        else:
            key = _value(target.slice, names, reasons, work)
        if not isinstance(owner, dict) or isinstance(key, dict | list):
            raise _NotPlainError(f"line {target.lineno}")
        owner[key] = value
    else:
        raise _NotPlainError(f"line {target.lineno}: several names at once")


class _Work:
    """What a file has computed so far, so that a few lines cannot take long or fill the memory."""

    def __init__(self) -> None:
        self._done = 0

    def add(self, value: Any) -> Any:
        """`value`, if it is plain and there is room for it."""
        self._done += _size(value)
        if self._done > _MAX_WORK:
            raise ValueError("too much is computed for a config")
        return value


def _size(value: Any) -> int:
    """Characters and members of a plain value, with all below it.

    Raises:
        TypeError: it is not plain.
        ValueError: it is larger than a config.
    """
    left, size = [value], 0
    while left:
        item = left.pop()
        size += 1 + (len(item) if isinstance(item, str | list | tuple | dict) else 0)
        if size > _MAX_SIZE:
            raise ValueError("too long")
        if isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            left += item
        elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
            raise ValueError("too large a number")
        elif item is not None and not isinstance(item, str | int | float):
            raise TypeError(f"{type(item).__name__} is no plain value")
    return size


def _copied(value: Any) -> Any:
    """A copy of a plain value that shares nothing with it."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def _value(node: ast.expr, names: Mapping[str, Any], reasons: Mapping[str, str], work: _Work) -> Any:
    """The value of an expression; raises `_NotPlainError` if it is more than a plain one."""
    try:
        return work.add(_plain(node, names, reasons, lambda each: _value(each, names, reasons, work)))
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise _NotPlainError(f"line {node.lineno}: {type(error).__name__}: {_short(error)}") from error


def _plain(
    node: ast.expr, names: Mapping[str, Any], reasons: Mapping[str, str], of: Callable[[ast.expr], Any]
) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in reasons:
        raise _NotPlainError(reasons[node.id])
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        items = [of(each) for each in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {of(key): of(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.IfExp):
        return of(node.body) if of(node.test) else of(node.orelse)
    if isinstance(node, ast.Attribute):
        return of(node.value)[node.attr]
    if isinstance(node, ast.Subscript):
        return of(node.value)[of(node.slice)]
    if isinstance(node, ast.JoinedStr):
        return "".join(str(of(_formatted(each))) for each in node.values)
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](of(node.operand))
    if isinstance(node, ast.BinOp):
        return _computed(node, of(node.left), of(node.right))
    if isinstance(node, ast.Call):
        return _called(node, of)
    raise _NotPlainError(f"line {node.lineno}: {_short(ast.unparse(node))}")


def _short(text: Any) -> str:
    return " ".join(str(text).split())[:60]


def _formatted(node: ast.expr) -> ast.expr:
    """A part of an f-string."""
    if not isinstance(node, ast.FormattedValue):
        return node
    if node.format_spec is not None or node.conversion != -1:
        raise TypeError("a format in an f-string")
    return node.value


def _computed(node: ast.BinOp, left: Any, right: Any) -> Any:
    """Arithmetic whose result is small: `2 * n_bits`, `int(1e5)`, `[64] * 3`, 'text' + name."""
    if isinstance(node.op, ast.Pow):
        result = float(left) ** float(right)
        return int(result) if isinstance(left, int) and isinstance(right, int) and right >= 0 else result
    sized = [each for each in (left, right) if isinstance(each, str | list | tuple)]
    if isinstance(node.op, ast.Mult) and sized:
        number = right if sized[0] is left else left
        if len(sized[0]) * int(number) > _MAX_SIZE:
            raise ValueError("too long")
    if isinstance(node.op, ast.Mod) and isinstance(left, str):
        raise TypeError("text is put together with format or an f-string")
    return _OPERATORS[type(node.op)](left, right)


def _called(node: ast.Call, of: Callable[[ast.expr], Any]) -> Any:
    called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if called not in {*_FUNCTIONS, "format", "join", "copy"}:
        raise TypeError(f"a call of {ast.unparse(node.func)[:40]}")
    if any(isinstance(each, ast.Starred) for each in node.args):
        raise TypeError("`*` in a call")
    given = [of(each) for each in node.args]
    named: dict[str, Any] = {}
    for keyword in node.keywords:
        value = of(keyword.value)
        named |= value if keyword.arg is None else {keyword.arg: value}
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*given, **named)
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "join", "copy"):
        owner = of(node.func.value)
        if node.func.attr == "copy" and isinstance(owner, dict):
            return dict(owner)
        fields = re.findall(r"{(.*?)}", owner) if isinstance(owner, str) else ["?"]
        if node.func.attr != "copy" and all(not field or field.isidentifier() for field in fields):
            parts = sum(len(str(each)) for each in [*given, *named.values()])
            repeats = len(fields) + (_size(given) if node.func.attr == "join" else 0)
            if max(parts, len(owner)) * max(1, repeats) > _MAX_SIZE:
                raise ValueError("too long")
            return getattr(owner, node.func.attr)(*given, **named)
    raise TypeError(f"a call of {ast.unparse(node.func)[:40]}")


def _pipeline_arguments(module: ast.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """`seed` and `max_env_step` of the pipeline that the file would start, where they are numbers."""
    found: dict[str, Any] = {}
    work = _Work()
    for node in module.body:
        for each in ast.walk(node) if _is_program(node) else ():
            if isinstance(each, ast.keyword) and each.arg in ("seed", "max_env_step"):
                try:
                    value = _value(each.value, names, {}, work)
                except _NotPlainError:
                    continue  # from the command line of that program
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    found[each.arg] = int(value)  # infinite: as long as the settings say
    return found
