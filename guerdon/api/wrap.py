"""`wrap`: an environment whose reward is a learned one."""

from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from guerdon.api.envs import made_env
from guerdon.api.reward import REWARD_WITHOUT
from guerdon.api.settings import Keywords, check_count
from guerdon.api.zoo import check_fits
from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError
from guerdon.envs.make import registered
from guerdon.integrations.gymnasium import LearnedRewardVectorWrapper, LearnedRewardWrapper
from guerdon.rewards import BaseRewardModel
from guerdon.rewards.image.function import is_function

_FRAMES = Keywords("wrap", RewardConfig, [()], without=REWARD_WITHOUT)
_ZOO = Keywords("wrap", MixConfig, [()])


def wrap(env: Any, reward: Any, *, train_every: int = 0, **settings: Any) -> Any:
    """An environment of the same kind whose reward is a learned one; spaces stay as they are.

    The info keeps all parts: `env_reward`, `learned_reward` and, of a model that sees success,
    `prob_success`.

    Args:
        env: a `gymnasium.Env`, its id or a function that makes one, a `gymnasium.vector.VectorEnv`, or a
            `VecEnv` of Stable-Baselines3.
            Images come from the observation or from `render()` (`render_mode="rgb_array"`).
        reward: a `Reward`, the path of a checkpoint, a model of the zoo (`gd.reward_model`), or a function
            from frames, uint8 [N, H, W, C], to rewards [N].
        train_every: of the zoo: steps after which the model learns from them; 0 leaves it as it is.
        **settings: how the rewards are combined: `combine_mode`, `reward_weight`, `reward_mode`,
            `reward_type`, `normalize` and further fields of the `reward` section.

    Examples:
        >>> env = gd.wrap(gym.make("MyEnv-v0", render_mode="rgb_array"), gd.load_reward("model"))
        >>> obs, learned_reward, terminated, truncated, info = env.step(action)
    """
    own = ("env", "reward", "train_every")
    if check_count("train_every", train_every, 0) and not isinstance(reward, BaseRewardModel):
        raise ConfigError("train_every is for models of the zoo (gd.reward_model), which learn")
    cfg: Any = None
    if isinstance(reward, BaseRewardModel) or is_function(reward):
        cfg = _ZOO.apply(MixConfig(), settings, own)
    elif not (isinstance(reward, str | os.PathLike) or hasattr(reward, "score")):
        raise ConfigError(
            "reward must be a Reward, the path of a checkpoint, a model of the zoo (gd.reward_model) or a "
            f"function of frames, not {reward!r:.80}"
        )
    elif settings:
        known = getattr(reward, "cfg", None)
        cfg = _FRAMES.apply(known if isinstance(known, RewardConfig) else RewardConfig(), settings, own)
    if isinstance(env, str):
        registered(env)
        env = gym.make(env, render_mode="rgb_array")
    elif callable(env) and not isinstance(env, gym.Env | VectorEnv) and not _is_sb3(env):
        env = made_env(env, "env")
    if isinstance(reward, BaseRewardModel) and hasattr(env, "observation_space"):
        prefix = "single_" if isinstance(env, VectorEnv) else ""
        check_fits(reward, *(getattr(env, f"{prefix}{kind}_space") for kind in ("observation", "action")))
    if isinstance(env, VectorEnv):
        return LearnedRewardVectorWrapper(env, reward, cfg, train_every)
    if isinstance(env, gym.Env):
        return LearnedRewardWrapper(env, reward, cfg, train_every)
    if _is_sb3(env):
        from guerdon.integrations.sb3 import LearnedRewardVecEnv

        return LearnedRewardVecEnv(env, reward, cfg, train_every)
    raise ConfigError(
        "env must be a gymnasium.Env, a gymnasium.vector.VectorEnv or a VecEnv of Stable-Baselines3, not "
        f"{type(env).__name__}"
    )


def _is_sb3(env: Any) -> bool:
    """Whether it is a `VecEnv`; asking does not import Stable-Baselines3."""
    module = sys.modules.get("stable_baselines3.common.vec_env")
    return module is not None and isinstance(env, module.VecEnv)
