"""Whole workflows: commands, the runner of stage 3, the serial pipelines; imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guerdon.run.embodied import EmbodiedRunner
    from guerdon.run.serial import (
        serial_pipeline_reward_model,
        serial_pipeline_reward_model_offpolicy,
        serial_pipeline_reward_model_onpolicy,
    )

__all__ = [
    "EmbodiedRunner",
    "serial_pipeline_reward_model",
    "serial_pipeline_reward_model_offpolicy",
    "serial_pipeline_reward_model_onpolicy",
]


def __getattr__(name: str) -> Any:
    """Import a workflow when it is asked for: `guerdon check` should not wait for all of them."""
    if name == "EmbodiedRunner":
        from guerdon.run.embodied import EmbodiedRunner

        return EmbodiedRunner
    if name in __all__:
        from guerdon.run import serial

        return getattr(serial, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
