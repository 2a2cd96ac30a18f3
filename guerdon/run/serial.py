"""The serial pipelines: a policy that learns from a reward model of the zoo, in one process."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gymnasium.spaces import Box, Discrete

from guerdon.config import build
from guerdon.config.schema_zoo import SerialConfig
from guerdon.errors import ConfigError
from guerdon.learn.ppo import PPO
from guerdon.rewards import BaseRewardModel, create_reward_model
from guerdon.run.evaluate import Evaluation, evaluate
from guerdon.run.policy_files import AnyLearner, make_learner
from guerdon.run.rollouts import play_for
from guerdon.run.serial_loops import OffPolicySerial, OnPolicySerial, SerialLoop, make_env

log = logging.getLogger("guerdon")


@dataclass(kw_only=True)
class SerialResult:
    """What a pipeline returns."""

    policy: AnyLearner
    reward_model: BaseRewardModel
    env_steps: int = 0
    train_iter: int = 0
    seconds: float = 0.0
    solved: bool = False
    """An evaluation reached `stop_value`."""
    evaluations: list[tuple[int, float, Evaluation]] = field(default_factory=list)
    """(environment steps, seconds of training, result)."""

    @property
    def best_return(self) -> float:
        """The highest mean return of an evaluation."""
        return max((result.env_return for _, _, result in self.evaluations), default=float("-inf"))

    @property
    def last_return(self) -> float:
        """The mean return of the last evaluation."""
        return self.evaluations[-1][2].env_return


def serial_pipeline_reward_model_onpolicy(
    cfg: Any,
    seed: int = 0,
    env_setting: Any = None,
    model: BaseRewardModel | None = None,
    max_train_iter: int | None = None,
    max_env_step: int | None = None,
    cooptrain_reward: bool = True,
    pretrain_reward: bool = False,
) -> SerialResult:
    """Train PPO on a learned reward; see `serial_pipeline_reward_model_offpolicy`."""
    return _run(
        cfg, "on", seed, env_setting, model, max_train_iter, max_env_step, cooptrain_reward, pretrain_reward
    )


def serial_pipeline_reward_model_offpolicy(
    cfg: Any,
    seed: int = 0,
    env_setting: Any = None,
    model: BaseRewardModel | None = None,
    max_train_iter: int | None = None,
    max_env_step: int | None = None,
    cooptrain_reward: bool = True,
    pretrain_reward: bool = False,
) -> SerialResult:
    """Train DQN or SAC on a learned reward.

    Args:
        cfg: settings as `SerialConfig`, as a mapping, or `(main_config, create_config)`.
        seed: of everything that is drawn.
        env_setting: vector environments to train in; None makes those of `cfg.env.train`.
        model: a reward model that is there already; None makes the one of `cfg.reward_model`.
        max_train_iter: stop after so many updates of the policy.
        max_env_step: stop after so many environment steps; None: `cfg.learner.total_steps`.
        cooptrain_reward: teach the reward model while the policy trains.
        pretrain_reward: teach it before the policy's first update.
    """
    return _run(
        cfg, "off", seed, env_setting, model, max_train_iter, max_env_step, cooptrain_reward, pretrain_reward
    )


def resolved(cfg: Any) -> SerialConfig:
    """Checked settings."""
    if isinstance(cfg, SerialConfig):
        return cfg
    if isinstance(cfg, Mapping):
        return build(SerialConfig, cfg)
    raise ConfigError(f"a serial pipeline takes settings as a mapping, not {type(cfg).__name__}")


def _run(
    given: Any,
    kind: str,
    seed: int,
    env: Any,
    model: BaseRewardModel | None,
    max_train_iter: int | None,
    max_env_step: int | None,
    cooptrain: bool,
    pretrain: bool,
) -> SerialResult:
    cfg = resolved(given)
    on_policy = cfg.learner.algorithm == "ppo"
    if on_policy != (kind == "on"):
        raise ConfigError(
            f"learner.algorithm is {cfg.learner.algorithm}: use the {'on' if on_policy else 'off'}"
            "-policy pipeline"
        )
    env = make_env(cfg) if env is None else env
    try:
        learner = make_learner(cfg.learner, env.single_observation_space, env.single_action_space, seed)
        if model is None:
            section = {**shapes_of(env), "seed": seed, **cfg.reward_model}
            model = create_reward_model(section, cfg.learner.device)
        loop: SerialLoop
        if isinstance(learner, PPO):
            loop = OnPolicySerial(cfg, learner, model, env)
        else:
            loop = OffPolicySerial(cfg, learner, model, env)
        loop.cooptrain = cooptrain
        loop.env_steps += play_for(model, env, seed)
        loop.reset(seed)
        if pretrain:
            model.pretrain()
        budget = max_env_step if max_env_step is not None else cfg.learner.total_steps
        return _train(cfg, loop, budget, max_train_iter, seed)
    finally:
        env.close()


def _train(
    cfg: SerialConfig, loop: SerialLoop, budget: int, max_train_iter: int | None, seed: int
) -> SerialResult:
    result = SerialResult(policy=loop.learner, reward_model=loop.model)
    due = cfg.learner.eval_interval
    begin = time.perf_counter()
    measuring = 0.0
    while loop.env_steps < budget and (max_train_iter is None or loop.train_iter < max_train_iter):
        loop.advance(loop.env_steps / budget)
        last = loop.env_steps >= budget
        if loop.env_steps >= due or last:
            due += cfg.learner.eval_interval
            start = time.perf_counter()
            found, _ = evaluate(
                lambda obs: loop.learner.act(obs, deterministic=True),
                cfg.env.eval,
                episodes=cfg.learner.eval_episodes,
                seed=seed + 10_000,
            )
            measuring += time.perf_counter() - start
            result.evaluations.append((loop.env_steps, time.perf_counter() - begin - measuring, found))
            if cfg.stop_value is not None and found.env_return >= cfg.stop_value:
                result.solved = True
                break
    result.env_steps, result.train_iter = loop.env_steps, loop.train_iter
    result.seconds = time.perf_counter() - begin
    return result


def shapes_of(env: Any) -> dict[str, Any]:
    """What a reward model has to know of the environments."""
    space, actions = env.single_observation_space, env.single_action_space
    if not isinstance(space, Box):
        raise ConfigError(f"the serial pipelines take observations that are vectors or images, not {space}")
    if isinstance(actions, Discrete):
        return {"obs_shape": list(space.shape), "action_size": int(actions.n), "discrete_actions": True}
    size = int(actions.shape[0])
    return {"obs_shape": list(space.shape), "action_size": size, "discrete_actions": False}


__all__ = [
    "SerialResult",
    "serial_pipeline_reward_model_offpolicy",
    "serial_pipeline_reward_model_onpolicy",
]
