"""Settings that other settings leave without effect: a run names them, and why, instead of ignoring them.

A switch that is off (`asynchronous.enabled`, `reward.use_reward_model`) says so itself: what depends on it is
not listed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from guerdon.config.schema import GuerdonConfig
from guerdon.config.schema_zoo import SerialConfig

log = logging.getLogger("guerdon")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Settings that have no effect in some configs."""

    keys: tuple[str, ...]
    """Dotted paths of settings or sections; those that differ from their defaults are named."""
    holds: Callable[[Any], bool]
    """Whether they have no effect in a config."""
    reason: str


_LEARNERS = tuple(
    Rule(
        keys=(f"learner.{name}",),
        holds=lambda config, name=name: config.learner.algorithm != name,  # type: ignore[misc]
        reason=f"learner.algorithm is not {name}",
    )
    for name in ("ppo", "sac", "td3", "dqn")
)
_WEIGHTS = "weights count with combine_mode: weighted alone"

RULES: tuple[Rule, ...] = (
    Rule(
        keys=("reward.group_name",),
        holds=lambda config: True,
        reason="accepted from RLinf's configs; reward workers have no names here",
    ),
    Rule(
        keys=("runner.logger.backends",),
        holds=lambda config: "wandb" in config.runner.logger.backends,
        reason="wandb is not written to: metrics go to metrics.jsonl, and to TensorBoard if that is named",
    ),
    Rule(
        keys=(
            "cluster.address",
            "cluster.num_nodes",
            "cluster.component_placement",
            "reward.timeout_seconds",
        ),
        holds=lambda config: config.engine == "local",
        reason="everything runs in this process (engine: local); set engine=ray to place workers",
    ),
    Rule(
        keys=("runner.num_data_episodes",),
        holds=lambda config: config.env.eval.env_type != "robot",
        reason="it is for robots; collect.target_success and collect.target_failure count episodes elsewhere",
    ),
    *(
        Rule(
            keys=(f"env.{part}.override_cfg", f"env.{part}.operator", f"env.{part}.operator_params"),
            holds=lambda config, part=part: getattr(config.env, part).env_type != "robot",  # type: ignore[misc]
            reason=f"env.{part}.env_type is not robot",
        )
        for part in ("train", "eval")
    ),
    Rule(
        keys=("reward.reward_weight", "reward.env_reward_weight"),
        holds=lambda config: config.reward.combine_mode != "weighted",
        reason=_WEIGHTS,
    ),
    Rule(
        keys=("reward.success_reward", "reward.fail_reward"),
        holds=lambda config: config.reward.reward_type == "continuous",
        reason="the reward is the probability itself (reward_type: continuous)",
    ),
    Rule(
        keys=("reward.text",),
        holds=lambda config: config.runner.task_type != "text",
        reason="success is seen in images (runner.task_type: embodied)",
    ),
    Rule(
        keys=("fit.lr_sched.step_size", "fit.lr_sched.gamma"),
        holds=lambda config: config.fit.lr_sched.name != "step",
        reason="they belong to fit.lr_sched.name: step",
    ),
    Rule(
        keys=("fit.lr_sched.min_lr",),
        holds=lambda config: config.fit.lr_sched.name != "cosine",
        reason="it belongs to fit.lr_sched.name: cosine",
    ),
    Rule(
        keys=("reward.model.num_spatial_blocks",),
        holds=lambda config: config.reward.model.model_type != "binary_classifier",
        reason="reward.model.model_type: binary_classifier alone has a spatial pooling",
    ),
    *_LEARNERS,
)
"""For `GuerdonConfig`."""

SERIAL_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("mix.reward_weight", "mix.reward_weight_end", "mix.env_reward_weight"),
        holds=lambda config: config.mix.combine_mode != "weighted",
        reason=_WEIGHTS,
    ),
    *_LEARNERS,
)
"""For `SerialConfig`."""


def without_effect(config: GuerdonConfig | SerialConfig) -> Iterator[str]:
    """A line for each setting that was changed and has no effect, with the reason."""
    rules = RULES if isinstance(config, GuerdonConfig) else SERIAL_RULES
    default = type(config)()
    for rule in rules:
        if rule.holds(config):
            changed = [key for key in rule.keys if value_at(config, key) != value_at(default, key)]
            if changed:
                yield f"{', '.join(changed)} has no effect: {rule.reason}"


def log_without_effect(config: GuerdonConfig | SerialConfig) -> None:
    """Say at the start of a run which settings it will not follow."""
    for line in without_effect(config):
        log.warning("config: %s", line)


def value_at(config: Any, key: str) -> Any:
    """What stands at a dotted path of sections."""
    for name in key.split("."):
        config = getattr(config, name)
    return config
