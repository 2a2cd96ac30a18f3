"""Stable-Baselines3: a vector environment with a learned reward, and an adapter for batched environments.

    envs = gymnasium.make_vec("guerdon/Tabletop-v0", 64, autoreset_mode="SameStep")
    venv = LearnedRewardVecEnv(GymVectorToSB3(envs), manager)
    PPO("MlpPolicy", venv).learn(100_000)

The infos keep all parts: `env_reward`, `learned_reward` and, of a model that sees success, `prob_success`
(NaN where nothing was scored). A reward model of the zoo may stand in the place of the manager:

    venv = LearnedRewardVecEnv(make_vec_env("CartPole-v1", 8), model, MixConfig(normalize=True))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy, to_uint8_hwc
from guerdon.core.types import BoolArray, IntArray, UInt8Array
from guerdon.envs.observations import (
    FINAL_FRAME,
    FrameSource,
    find_image,
    images_from,
    native_of,
    take_row,
    with_final,
)
from guerdon.integrations.gymnasium import check_single_resets
from guerdon.integrations.scoring import RewardSource, rows_from, step_scorer
from guerdon.integrations.steps import EnvStep

try:
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper
except ImportError as error:
    raise ConfigError("Stable-Baselines3 is not installed: pip install 'guerdon[sb3]'") from error


class GymVectorToSB3(VecEnv):
    """A batched Gymnasium environment as one of Stable-Baselines3.

    Args:
        envs: with auto-reset in the same step, which is what Stable-Baselines3 expects.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"Stable-Baselines3 resets in the same step, this vector environment does not ({mode}): make "
                "it with autoreset_mode SAME_STEP"
            )
        self.envs = envs
        self._actions: Any = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Begin new episodes everywhere, with the seeds of `seed()` once."""
        if any(options != self._options[0] for options in self._options):
            raise ConfigError("the environments of a batch take the same reset options, not one each")
        given = any(seed is not None for seed in self._seeds)
        seeds: Any = list(self._seeds) if given else None
        obs, info = self.envs.reset(seed=seeds, options=self._options[0] or None)
        self.reset_infos = _split_infos(info, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return obs

    def reset_some(self, mask: BoolArray) -> Any:
        """Begin new episodes in the environments of `mask` (bool [N]); returns all observations."""
        obs, info = self.envs.reset(options={"reset_mask": mask.copy()})
        for env, new in zip(np.flatnonzero(mask).tolist(), _split_infos(info, mask=mask), strict=True):
            self.reset_infos[env] = new
        return obs

    def step_async(self, actions: NDArray[Any]) -> None:
        """Remember the actions; `step_wait` takes them."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, NDArray[Any], NDArray[Any], list[dict[str, Any]]]:
        """Step all environments; infos of ended episodes are theirs, not those of the next ones."""
        obs, env_rewards, terminated, truncated, info = self.envs.step(self._actions)
        term, done = to_numpy(terminated), to_numpy(terminated) | to_numpy(truncated)
        final_obs, final_info = info.get("final_obs"), info.get("final_info", {})
        infos = _split_infos(info, self.num_envs)
        for env, truncated_here in enumerate((done & ~term).tolist()):
            infos[env]["TimeLimit.truncated"] = truncated_here
        ended = np.flatnonzero(done).tolist()
        for env, final in zip(ended, _split_infos(final_info, mask=done), strict=True):
            self.reset_infos[env] = infos[env]
            row = take_row(final_obs, env)  # object arrays have one whole observation per row
            limit = {"TimeLimit.truncated": infos[env].pop("TimeLimit.truncated")}
            # What `final_info` lacks is about this step, such as what a wrapper says of its rewards.
            infos[env] = {**infos[env], **final, **limit, "terminal_observation": row}
        return obs, to_numpy(env_rewards).astype(np.float32), done, infos

    def close(self) -> None:
        """Close the batch."""
        self.envs.close()

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """One rendered image of each environment."""
        images: Any = self.envs.render()
        return [None] * self.num_envs if images is None else list(images)

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of the batch, once for each environment."""
        return [getattr(self.envs, attr_name)] * len(self._ids(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Not possible for single environments of a batch."""
        raise ConfigError(f"{attr_name} belongs to the whole batch: set it on the vector environment")

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """`render` alone: the environments of a batch have no methods of their own."""
        if method_name != "render":
            raise ConfigError(f"{method_name} cannot be called on single environments of a batch")
        images = self.get_images()
        return [images[env] for env in self._ids(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Never: there are no single environments."""
        return [False] * len(self._ids(indices))

    def _ids(self, indices: int | Iterable[int] | None) -> list[int]:
        return list(self._get_indices(indices))


class LearnedRewardVecEnv(VecEnvWrapper):
    """Replaces or mixes the rewards of a Stable-Baselines3 `VecEnv`; one scoring call per step.

    Frames come from the observation (of ended episodes: `terminal_observation`), from a `GymVectorToSB3`
    around environments that render on demand, or from `render()`; the last needs `KeepFinalFrame` around
    each environment. `standalone` needs environments that can be reset one by one, so nothing that keeps
    count of episodes (`VecMonitor`, `VecNormalize`) may stand between them and this wrapper.

    Args:
        venv: the environments.
        manager: a `RewardManager`, an `ImageRewardWorker`, the path of a checkpoint, a reward model of the
            zoo, or a function of frames (`RewardFunction`).
        cfg: the `reward` section; None means the manager's own. For the zoo a `MixConfig`, for a
            function either.
        train_every: of the zoo: steps after which the model learns from them; 0 leaves it as it is.
    """

    def __init__(
        self,
        venv: VecEnv,
        manager: RewardSource,
        cfg: RewardConfig | MixConfig | None = None,
        train_every: int = 0,
    ) -> None:
        if not isinstance(venv, VecEnv):
            raise ConfigError(
                "this is no VecEnv of Stable-Baselines3: "
                "put vector environments of Gymnasium into GymVectorToSB3"
            )
        super().__init__(venv)
        self._actions: Any = None
        self._scorer = step_scorer(manager, cfg, venv.num_envs, venv.action_space, train_every)
        inner, cameras = venv.unwrapped, self._scorer.cameras
        self._source: FrameSource | None = None
        if cameras and isinstance(inner, GymVectorToSB3) and native_of(inner.envs) is not None:
            self._source = FrameSource(inner.envs, cameras)
        if not self._scorer.standalone:
            return
        if isinstance(venv, GymVectorToSB3):
            check_single_resets(venv.envs)
        elif not isinstance(venv, DummyVecEnv | SubprocVecEnv):
            raise ConfigError(
                f"standalone must reset single environments, which {type(venv).__name__} does not offer: put "
                "this wrapper directly around GymVectorToSB3, DummyVecEnv or SubprocVecEnv"
            )

    def reset(self) -> Any:
        """Start new episodes everywhere."""
        obs = self.venv.reset()
        self._scorer.reset(obs)
        return obs

    def step_async(self, actions: NDArray[Any]) -> None:
        """Pass the actions on, and remember them for the transitions."""
        self._actions = actions
        self.venv.step_async(actions)

    def step_wait(self) -> tuple[Any, NDArray[Any], NDArray[Any], list[dict[str, Any]]]:
        """Score what the actions led to and return training rewards, float32 [N]."""
        obs, env_rewards, dones, infos = self.venv.step_wait()
        done = to_numpy(dones).astype(np.bool_)
        truncated = done & np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        rewards = self._scorer.step(
            EnvStep(
                actions=self._actions,
                obs=obs,
                next_obs=lambda: with_final(obs, _finals(done, infos), done) if done.any() else obs,
                frames=lambda ids: self._find_frames(obs, done, infos, ids),
                env_rewards=env_rewards,
                terminated=done & ~truncated,
                truncated=truncated,
                stepped=np.ones(self.num_envs, np.bool_),
            )
        )
        columns = {name: values.tolist() for name, values in rewards.infos().items()}
        for env, info in enumerate(infos):
            info.update({name: values[env] for name, values in columns.items()})
        for env in np.flatnonzero(rewards.ended).tolist():
            infos[env]["TimeLimit.truncated"] = False
        new = rewards.ended & ~done
        if new.any():
            obs = self._reset_ended(obs, infos, new)
        return obs, rewards.training_reward, done | rewards.ended, infos

    def _find_frames(
        self, obs: Any, done: BoolArray, infos: Sequence[Mapping[str, Any]], ids: IntArray
    ) -> dict[str, UInt8Array]:
        """Frames of `ids`, camera -> uint8 [n, H, W, C]; of ended episodes the final ones."""
        cameras = self._scorer.cameras
        observed = self._source is None or self._source.observed
        if observed and all(find_image(obs, camera, cameras) is not None for camera in cameras):
            found = images_from(with_final(obs, _finals(done, infos), done), cameras)
            return {name: images[ids] for name, images in found.items()}
        if self._source is not None:
            return self._source.frames(obs, done, ids)
        return {cameras[0]: self._rendered(done, infos, ids)}

    def _rendered(self, done: BoolArray, infos: Sequence[Mapping[str, Any]], ids: IntArray) -> UInt8Array:
        """Frames of one camera, each rendered by its own environment."""
        if len(self._scorer.cameras) != 1 or self.venv.render_mode != "rgb_array":
            raise DataError(
                f"the environments show no images of {list(self._scorer.cameras)}: they are not in their "
                "observations, and they can render one camera at the most, made with render_mode='rgb_array'"
            )
        lost = [env for env in ids[done[ids]].tolist() if FINAL_FRAME not in infos[env]]
        if lost:
            raise DataError(
                f"the final frame of environment {lost[0]} was reset away before it could be rendered: put "
                "each environment into KeepFinalFrame, or images into the observation"
            )
        running = ids[~done[ids]].tolist()
        shown = dict(zip(running, self.venv.env_method("render", indices=running), strict=True))
        images = [infos[env][FINAL_FRAME] if done[env] else shown[env] for env in ids.tolist()]
        return to_uint8_hwc(np.stack([to_numpy(image) for image in images]), name="what render() returned")

    def _reset_ended(self, obs: Any, infos: list[dict[str, Any]], ended: BoolArray) -> Any:
        """Reset the environments of `ended`; returns observations with their first ones."""
        ids = np.flatnonzero(ended).tolist()
        for env in ids:
            infos[env]["terminal_observation"] = take_row(obs, env)
        if isinstance(self.venv, GymVectorToSB3):
            return rows_from(obs, self.venv.reset_some(ended), ended)
        merged, reset_infos = rows_from(obs, obs, ended), list(self.venv.reset_infos)  # copies
        for env, (first, info) in zip(ids, self.venv.env_method("reset", indices=ids), strict=True):
            reset_infos[env] = info
            _put_row(merged, env, first)
        self.venv.reset_infos = reset_infos
        return merged


def _finals(done: BoolArray, infos: Sequence[Mapping[str, Any]]) -> NDArray[Any]:
    """Final observations, an object array [N]; None where the episode goes on."""
    finals = np.full(len(done), None, object)
    for env in np.flatnonzero(done).tolist():
        if "terminal_observation" not in infos[env]:
            raise DataError(f"environment {env} ended its episode without a terminal_observation")
        finals[env] = infos[env]["terminal_observation"]
    return finals


def _put_row(obs: Any, env: int, row: Any) -> None:
    if isinstance(obs, Mapping):
        for key, part in obs.items():
            _put_row(part, env, row[key])
    else:
        obs[env] = row


def _split_infos(
    info: Mapping[str, Any], num_envs: int = 0, *, mask: BoolArray | None = None
) -> list[dict[str, Any]]:
    """A batched info as one dict per environment, or per environment of `mask`; masked entries are left out.

    Nested mappings are left out too; nothing in Stable-Baselines3 reads those.
    """
    ids = np.arange(num_envs) if mask is None else np.flatnonzero(mask)
    rows: list[dict[str, Any]] = [{} for _ in ids]
    for key, value in info.items():
        if key.startswith("_") or key in ("final_obs", "final_info") or isinstance(value, Mapping):
            continue
        column = to_numpy(value)[ids]
        there = to_numpy(info.get(f"_{key}", np.ones(len(to_numpy(value)), np.bool_)))[ids].tolist()
        values = column.tolist() if column.ndim == 1 else list(column)
        for row, item, known in zip(rows, values, there, strict=True):
            if known:
                row[key] = item
    return rows
