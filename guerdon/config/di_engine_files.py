"""Reads DI-engine's config files, which are Python, without running them.

A config file builds dicts from literals: `dict(...)`, numbers, text, earlier names, arithmetic and
`EasyDict(...)`. That much is evaluated here. Imports, functions and what stands under
`if __name__ == "__main__":` are not run.
"""

from __future__ import annotations

import ast
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
_MAX_LENGTH = 10_000
"""Characters of a text or members of a list that arithmetic may make."""
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
    "EasyDict": lambda *given, **named: dict(*given, **named),
    "deepcopy": lambda given: given,
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
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(
            node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.If | ast.Expr
        ):
            continue  # an `if` is the file's own program, an expression its docstring
        else:
            targets, value = _targets_of(node), None
        for target in targets:
            try:
                if value is None:
                    raise _NotPlainError(f"line {node.lineno}")
                _assign(target, _value(value, names, reasons), names, reasons)
            except _NotPlainError as error:
                reasons[_root(target)] = str(error)
    return names, reasons


def _targets_of(node: ast.stmt) -> list[ast.expr]:
    """What a statement such as a loop or `x += 1` may change."""
    return [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _root(target: ast.expr) -> str:
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _assign(target: ast.expr, value: Any, names: dict[str, Any], reasons: dict[str, str]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
        reasons.pop(target.id, None)
    elif isinstance(target, ast.Attribute | ast.Subscript):
        owner, key = _value(target.value, names, reasons), _key(target, names, reasons)
        if not isinstance(owner, dict):
            raise _NotPlainError(f"line {target.lineno}")
        owner[key] = value
    else:
        raise _NotPlainError(f"line {target.lineno}: several names at once")


def _key(node: ast.Attribute | ast.Subscript, names: Mapping[str, Any], reasons: Mapping[str, str]) -> Any:
    return node.attr if isinstance(node, ast.Attribute) else _value(node.slice, names, reasons)


def _value(node: ast.expr, names: Mapping[str, Any], reasons: Mapping[str, str]) -> Any:
    def of(each: ast.expr) -> Any:
        return _value(each, names, reasons)

    try:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in names and node.id not in reasons:
            return names[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            items = [of(each) for each in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            return {of(key): of(value) for key, value in zip(node.keys, node.values, strict=True) if key}
        if isinstance(node, ast.IfExp):
            return of(node.body) if of(node.test) else of(node.orelse)
        if isinstance(node, ast.Attribute | ast.Subscript):
            return of(node.value)[_key(node, names, reasons)]
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(of(each.value if isinstance(each, ast.FormattedValue) else each)) for each in node.values
            )
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](of(node.operand))
        if isinstance(node, ast.BinOp):
            return _computed(node, of(node.left), of(node.right))
        if isinstance(node, ast.Call):
            return _called(node, of)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise _NotPlainError(f"line {node.lineno}: {type(error).__name__}: {error}") from error
    if isinstance(node, ast.Name) and node.id in reasons:
        raise _NotPlainError(reasons[node.id])
    raise _NotPlainError(f"line {node.lineno}: {ast.unparse(node)[:60]}")


def _computed(node: ast.BinOp, left: Any, right: Any) -> Any:
    """Arithmetic whose result is small: `2 * n_bits`, `int(1e5)`, `[64] * 3`, 'text' + name."""
    if isinstance(node.op, ast.Pow):
        result = float(left) ** float(right)
        return int(result) if isinstance(left, int) and isinstance(right, int) and right >= 0 else result
    sized = [each for each in (left, right) if isinstance(each, str | list | tuple)]
    if isinstance(node.op, ast.Mult) and sized:
        number = right if sized[0] is left else left
        if len(sized[0]) * int(number) > _MAX_LENGTH:
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
            return getattr(owner, node.func.attr)(*given, **named)
    raise TypeError(f"a call of {ast.unparse(node.func)[:40]}")


def _pipeline_arguments(module: ast.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """`seed` and `max_env_step` of the pipeline that the file would start, where they are numbers."""
    found: dict[str, Any] = {}
    for node in module.body:
        for each in ast.walk(node) if isinstance(node, ast.If) else ():
            if isinstance(each, ast.keyword) and each.arg in ("seed", "max_env_step"):
                try:
                    value = _value(each.value, names, {})
                except _NotPlainError:
                    continue  # from the command line of that program
                if isinstance(value, int | float) and not isinstance(value, bool):
                    found[each.arg] = int(value)
    return found
