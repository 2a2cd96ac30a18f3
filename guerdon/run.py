"""Public names: whole trainings; see `guerdon.training`."""

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
