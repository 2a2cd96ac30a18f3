"""Functions that users give: whether they can be called with what they will get."""

from __future__ import annotations

import inspect
from typing import Any

from guerdon.core.errors import ConfigError


def check_takes(function: Any, name: str, *arguments: str) -> None:
    """Raise unless `function` is a function that can be called with these positional arguments.

    Args:
        function: what was given.
        name: of the argument that it was given as, for the message.
        arguments: what it will be called with, such as `obs` and `info`.
    """
    form = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{name} must be a function, called as {form}, not {function!r:.80}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(f"{name} is called as {form}, and what was given takes {signature}") from None
