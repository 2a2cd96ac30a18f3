"""Settings that other settings leave without effect: a run names them, and why, instead of ignoring them.

A switch that is off (`asynchronous.enabled`, `reward.use_reward_model`) says so itself: what depends on it is
not listed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from guerdon.config.schema import GuerdonConfig
from guerdon.config.schema_zoo import SerialConfig

log = logging.getLogger("guerdon")


class Rule(NamedTuple):
    """Settings that have no effect in some configs."""

    keys: tuple[str, ...]
    """Dotted paths of settings or sections; those that differ from their defaults are named."""
    holds: Callable[[Any], bool]
    """Whether they have no effect in a config."""
    reason: str


def unless(key: str, value: Any) -> Callable[[Any], bool]:
    """Whether the setting at `key` has another value."""
    return lambda config: value_at(config, key) != value


_LEARNERS = tuple(
    Rule((f"learner.{name}",), unless("learner.algorithm", name), f"learner.algorithm is not {name}")
    for name in ("ppo", "sac", "td3", "dqn")
)
_PROJECT = "it is for the trackers wandb, mlflow and trackio, and backends names none of them"
_WEIGHTS = "weights count with combine_mode: weighted alone"

RULES: tuple[Rule, ...] = (
    Rule(
        ("reward.group_name",),
        lambda config: True,
        "accepted from RLinf's configs; reward workers have no names here",
    ),
    Rule(
        ("runner.logger.project_name",),
        lambda config: not set(config.runner.logger.backends) - {"tensorboard"},
        _PROJECT,
    ),
    Rule(
        ("cluster.address", "cluster.num_nodes", "cluster.component_placement", "reward.timeout_seconds"),
        unless("engine", "ray"),
        "everything runs in this process (engine: local); set engine=ray to place workers",
    ),
    Rule(
        ("runner.num_data_episodes",),
        unless("env.eval.env_type", "robot"),
        "it is for robots; collect.target_success and collect.target_failure count episodes elsewhere",
    ),
    *(
        Rule(
            (f"env.{part}.override_cfg", f"env.{part}.operator", f"env.{part}.operator_params"),
            unless(f"env.{part}.env_type", "robot"),
            f"env.{part}.env_type is not robot",
        )
        for part in ("train", "eval")
    ),
    Rule(
        ("reward.reward_weight", "reward.env_reward_weight"),
        unless("reward.combine_mode", "weighted"),
        _WEIGHTS,
    ),
    Rule(
        ("reward.success_reward", "reward.fail_reward"),
        unless("reward.reward_type", "binary"),
        "the reward is the probability itself (reward_type: continuous)",
    ),
    Rule(
        ("reward.text",),
        unless("runner.task_type", "text"),
        "success is seen in images (runner.task_type: embodied)",
    ),
    Rule(
        ("fit.lr_sched.step_size", "fit.lr_sched.gamma"),
        unless("fit.lr_sched.name", "step"),
        "they belong to fit.lr_sched.name: step",
    ),
    Rule(
        ("fit.lr_sched.min_lr",),
        unless("fit.lr_sched.name", "cosine"),
        "it belongs to fit.lr_sched.name: cosine",
    ),
    Rule(
        ("reward.model.num_spatial_blocks",),
        lambda config: config.reward.model.model_type == "resnet_reward",
        "reward.model.model_type: resnet_reward has no spatial pooling",
    ),
    Rule(
        ("reward.model.latent_dim",),
        unless("reward.model.model_type", "lerobot_classifier"),
        "it belongs to reward.model.model_type: lerobot_classifier",
    ),
    *_LEARNERS,
)
"""For `GuerdonConfig`."""

SERIAL_RULES: tuple[Rule, ...] = (
    Rule(("project_name",), lambda config: not set(config.backends) - {"tensorboard"}, _PROJECT),
    Rule(
        ("mix.reward_weight", "mix.reward_weight_end", "mix.env_reward_weight"),
        unless("mix.combine_mode", "weighted"),
        _WEIGHTS,
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
    return attrgetter(key)(config)
