"""The serial pipelines: a policy that learns from a reward model of the zoo, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from guerdon.agents.registry import agent_class, make_agent
from guerdon.config.load import load_serial
from guerdon.config.schema_zoo import SerialConfig
from guerdon.config.unused import log_without_effect
from guerdon.core.errors import ConfigError
from guerdon.rewards import BaseRewardModel, create_reward_model
from guerdon.training.online_reward import Notes, space_shapes
from guerdon.training.serial_loops import OnPolicySerial, SerialLoop, make_env
from guerdon.training.serial_offpolicy import OffPolicySerial
from guerdon.training.serial_run import SerialResult, SerialRun


def serial_pipeline_reward_model_onpolicy(
    cfg: Any,
    seed: int | None = None,
    env_setting: Any = None,
    model: BaseRewardModel | None = None,
    max_train_iter: int | None = None,
    max_env_step: int | None = None,
    cooptrain_reward: bool | None = None,
    pretrain_reward: bool | None = None,
    resume_dir: str | None = None,
) -> SerialResult:
    """Train an on-policy agent (PPO) on a learned reward; see `serial_pipeline_reward_model_offpolicy`."""
    settings = _settings(cfg, seed, max_env_step, cooptrain_reward, pretrain_reward, resume_dir)
    if not agent_class(settings.learner.algorithm).on_policy:
        raise ConfigError(f"learner.algorithm is {settings.learner.algorithm}: use the off-policy pipeline")
    return _run(settings, env_setting, model, max_train_iter)


def serial_pipeline_reward_model_offpolicy(
    cfg: Any,
    seed: int | None = None,
    env_setting: Any = None,
    model: BaseRewardModel | None = None,
    max_train_iter: int | None = None,
    max_env_step: int | None = None,
    cooptrain_reward: bool | None = None,
    pretrain_reward: bool | None = None,
    resume_dir: str | None = None,
) -> SerialResult:
    """Train an off-policy agent (SAC, DQN) on a learned reward.

    Args:
        cfg: the name of a config (`cartpole_gail`), the path of a YAML file, settings as a mapping or as
            `SerialConfig`, or DI-engine's `(main_config, create_config)`.
        seed: of everything that is drawn; None, here and below: as `cfg` says (0).
        env_setting: vector environments to train in; None makes those of `cfg.env.train`.
        model: a reward model that is there already; None makes the one of `cfg.reward_model`.
        max_train_iter: stop after so many updates of the policy; None: no such limit.
        max_env_step: stop after so many environment steps (`cfg.learner.total_steps`).
        cooptrain_reward: teach the reward model while the policy trains (true).
        pretrain_reward: teach it before the policy's first update (false).
        resume_dir: a run's folder or checkpoint to continue from.
    """
    settings = _settings(cfg, seed, max_env_step, cooptrain_reward, pretrain_reward, resume_dir)
    if agent_class(settings.learner.algorithm).on_policy:
        raise ConfigError(f"learner.algorithm is {settings.learner.algorithm}: use the on-policy pipeline")
    return _run(settings, env_setting, model, max_train_iter)


def serial_pipeline_reward_model(cfg: Any, **arguments: Any) -> SerialResult:
    """The pipeline that the learner of `cfg` needs."""
    settings = load_serial(cfg, max_env_step=arguments.get("max_env_step"))
    if agent_class(settings.learner.algorithm).on_policy:
        return serial_pipeline_reward_model_onpolicy(settings, **arguments)
    return serial_pipeline_reward_model_offpolicy(settings, **arguments)


def resolved(cfg: Any) -> SerialConfig:
    """Checked settings, from any of the forms that the pipelines take."""
    return load_serial(cfg)


def _settings(
    cfg: Any,
    seed: int | None,
    max_env_step: int | None,
    cooptrain: bool | None,
    pretrain: bool | None,
    resume_dir: str | None,
) -> SerialConfig:
    """The settings, with the arguments that were given in their places."""
    settings = load_serial(cfg, max_env_step=max_env_step)
    log_without_effect(settings)
    given = {
        "seed": seed,
        "cooptrain_reward": cooptrain,
        "pretrain_reward": pretrain,
        "resume_dir": resume_dir,
    }
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if max_env_step is not None:
        changed["learner"] = replace(settings.learner, total_steps=int(max_env_step))
    return replace(settings, **changed)


def _run(
    cfg: SerialConfig, env: Any, model: BaseRewardModel | None, max_train_iter: int | None
) -> SerialResult:
    env = make_env(cfg) if env is None else env
    with _drawn_from(cfg.seed), closing(env):
        learner = make_agent(cfg.learner, env.single_observation_space, env.single_action_space, cfg.seed)
        notes = Notes()
        if model is None:
            section = {
                **shapes_of(env),
                "seed": cfg.seed,
                **cfg.reward_model,
            }
            model = create_reward_model(section, cfg.learner.device, notes)
        loop: SerialLoop
        if learner.on_policy:
            loop = OnPolicySerial(cfg, learner, model, env)
        else:
            loop = OffPolicySerial(cfg, learner, model, env)
        loop.cooptrain = cfg.cooptrain_reward
        return SerialRun(cfg, loop, notes, max_train_iter).train()


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed the generators that a plugin draws from by default, and leave the caller's as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what plugins use
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def shapes_of(env: Any) -> dict[str, Any]:
    """What a reward model has to know of vector environments."""
    return space_shapes(env.single_observation_space, env.single_action_space)


__all__ = [
    "SerialResult",
    "serial_pipeline_reward_model",
    "serial_pipeline_reward_model_offpolicy",
    "serial_pipeline_reward_model_onpolicy",
]
