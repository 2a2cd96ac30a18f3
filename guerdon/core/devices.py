"""Where networks are: a device of torch by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guerdon.core.errors import ConfigError

if TYPE_CHECKING:
    import torch


def resolve_device(device: torch.device | str, name: str = "device") -> str:
    """The device that a setting means: `auto` is a GPU where there is one, and the CPU elsewhere.

    Args:
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        name: of the setting or argument, for the error.

    Raises:
        ConfigError: there is no such device, or no GPU here.
    """
    import torch  # whoever collects data does without

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"{name} must be such as 'cpu', 'cuda' or 'cuda:1', not {device!r:.80}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            there = f"GPUs up to cuda:{count - 1}" if count else "no GPU"
            raise ConfigError(f"{name} is {str(device)!r}, and torch finds {there} here")
    return str(found)


def device_here(device: str) -> str:
    """What a device of another machine means here: a GPU, under whatever number, or the CPU without one."""
    import torch

    on_cpu = device != "auto" and torch.device(device).type == "cpu"
    return "cpu" if on_cpu or not torch.cuda.is_available() else "cuda"
