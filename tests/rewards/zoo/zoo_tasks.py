"""What tests of the zoo share: demonstrations, short runs, and the controls that must fail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import yaml
from gymnasium.vector import AutoresetMode
from torch import Tensor

import guerdon.envs  # registers the tasks
from guerdon.envs.experts import scripted_policy
from guerdon.envs.wrappers import FlatGoals, NanReward, has_goals
from guerdon.rewards import BaseRewardModel, StepBatch, create_reward_model
from guerdon.rewards.zoo.baselines import BASELINES
from guerdon.training.rollouts import play_episodes
from guerdon.training.serial import (
    SerialResult,
    serial_pipeline_reward_model_offpolicy,
    serial_pipeline_reward_model_onpolicy,
    shapes_of,
)

assert guerdon.envs
FIXED_CARTPOLE, POINT_REACH = "guerdon/FixedCartPole-v0", "guerdon/PointReach-v0"


CONFIGS = Path(guerdon.__file__).parent / "conf" / "zoo"


def zoo_config(name: str) -> dict[str, Any]:
    """Settings that are shipped."""
    settings: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return settings


def task(env_id: str, num_envs: int = 1, **kwargs: Any) -> Any:
    if not env_id.startswith("guerdon/"):  # others are not batched, or reset in the next step
        vector = {"autoreset_mode": AutoresetMode.SAME_STEP}
        return gym.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs=vector, **kwargs)
    env = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    return FlatGoals(env) if has_goals(env.single_observation_space) else env


def play(env_id: str, act: Any, episodes: int, seed: int = 123) -> list[StepBatch]:
    """Whole episodes of a policy, as many as asked for."""
    return play_episodes(task(env_id, episodes), act, episodes, seed=seed)


def experts(env_id: str, episodes: int = 10) -> list[StepBatch]:
    return play(env_id, scripted_policy(env_id), episodes)


def mean_return(episodes: list[StepBatch]) -> float:
    return float(torch.stack([each.env_rewards.sum() for each in episodes]).mean())


def steps(
    count: int,
    *,
    actions: Tensor | None = None,
    size: int = 2,
    seed: int = 0,
    reward: float = 0.0,
    obs: Tensor | None = None,
) -> StepBatch:
    """A made-up episode [T]: `size` numbers in an observation, discrete actions unless given."""
    generator = torch.Generator().manual_seed(seed)
    last = torch.arange(count) == count - 1
    seen = torch.randn(count + 1, size, generator=generator) if obs is None else obs
    return StepBatch(
        obs=seen[:count],
        actions=torch.randint(2, (count,), generator=generator) if actions is None else actions,
        next_obs=seen[1 : count + 1],
        env_rewards=torch.full((count,), float(reward)),
        terminated=torch.zeros(count, dtype=torch.bool),
        truncated=last,
    )


def evaluated_every(settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The same settings with evaluations in shorter intervals: a run ends sooner after it got there."""
    return {**settings, "learner": {**settings["learner"], "eval_interval": steps}}


def run(
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    demonstrations: list[StepBatch] | None = None,
    control: str | None = None,
    hidden: bool = True,
    **arguments: Any,
) -> SerialResult:
    """A pipeline; `control` puts an empty model in the learned one's place, `hidden` hides env rewards."""
    env_id = settings["env"]["train"]["id"]
    kwargs = settings["env"]["train"].get("init_params", {})
    env = task(env_id, settings["env"]["train"]["num_envs"], **kwargs)
    env = NanReward(env) if hidden else env
    model: BaseRewardModel
    if control is None:
        model = create_reward_model({**shapes_of(env), "seed": seed, **settings["reward_model"]})
        if demonstrations is not None:
            model.load_expert_data(demonstrations)
    else:
        model = BASELINES[control]({**shapes_of(env), "seed": seed})
    on_policy = settings["learner"]["algorithm"] == "ppo"
    pipeline = serial_pipeline_reward_model_onpolicy if on_policy else serial_pipeline_reward_model_offpolicy
    quiet = {**settings, "output_dir": None}
    if control is not None:  # a random policy balances a pole now and then: what counts is what stays
        quiet["stop_value"] = None
    return pipeline(quiet, seed=seed, env_setting=env, model=model, **arguments)


_CONTROLS: dict[str, SerialResult] = {}


def controls(
    settings: Mapping[str, Any],
    learned: SerialResult,
    kinds: Sequence[str] = tuple(BASELINES),
    **arguments: Any,
) -> dict[str, SerialResult]:
    """The same learner with the same seed on rewards that say nothing, updated as often as `learned` was.

    Models with one learner share their controls in a process: the longest of them serves all.
    """
    of_models = ("reward_model", "stop_value", "exp_name")
    learner = {name: part for name, part in settings.items() if name not in of_models}
    found = {}
    for kind in kinds:
        key = json.dumps([kind, learner, arguments], sort_keys=True)
        if key not in _CONTROLS or _CONTROLS[key].train_iter < learned.train_iter:
            _CONTROLS[key] = run(settings, control=kind, max_train_iter=learned.train_iter, **arguments)
        found[kind] = _CONTROLS[key]
        assert found[kind].train_iter >= learned.train_iter > 0
    return found


def typical_return(result: SerialResult) -> float:
    """The mean over all evaluations: a random policy balances a pole now and then."""
    return float(np.mean([evaluation.env_return for _, _, evaluation in result.evaluations]))


def assert_taught(
    settings: Mapping[str, Any], learned: SerialResult, target: float, far: float, **arguments: Any
) -> None:
    """The run got to the target, and the same learner without the model is far off all along."""
    without = {kind: typical_return(each) for kind, each in controls(settings, learned, **arguments).items()}
    seen = [round(evaluation.env_return, 2) for _, _, evaluation in learned.evaluations]
    print(f"{learned.env_steps} steps: {seen}, without the model {without}")
    assert learned.last_return >= target, (seen, without)
    assert max(without.values()) < far, (seen, without)
