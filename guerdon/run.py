"""Public names: whole trainings, imported on first use; see `guerdon.training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guerdon.training.serial import (
        serial_pipeline_reward_model,
        serial_pipeline_reward_model_offpolicy,
        serial_pipeline_reward_model_onpolicy,
    )
    from guerdon.training.trainer import EmbodiedRunner

__all__ = [
    "EmbodiedRunner",
    "serial_pipeline_reward_model",
    "serial_pipeline_reward_model_offpolicy",
    "serial_pipeline_reward_model_onpolicy",
]


def __getattr__(name: str) -> Any:
    """A training, and with it torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "EmbodiedRunner":
        from guerdon.training.trainer import EmbodiedRunner

        return EmbodiedRunner
    from guerdon.training import serial

    return getattr(serial, name)
