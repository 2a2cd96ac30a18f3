"""The base of our batched environments: seeds, episode counters and auto-reset, with checked arguments.

`TabletopVectorEnv` and `ManiSkillVectorEnv` follow the same conventions because they are written here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from guerdon.core.errors import ConfigError, DataError, unknown_name
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array

Observation: TypeAlias = Any
"""float32 state vectors [N, S], or a dict of camera images (uint8) and perhaps the state under `state`."""
Info: TypeAlias = dict[str, Any]
Seeds: TypeAlias = int | Sequence[int | None] | None
"""s seeds environment i with s + i; a list gives each its own."""
EnvIds: TypeAlias = IntArray | Sequence[int]


class EpisodeVectorEnv(VectorEnv[Observation, Any, NDArray[Any]], ABC):
    """N environments stepped as one batch. A subclass simulates; this class decides on episodes.

    With `autoreset_mode` `SameStep` (others: `NextStep`, `Disabled`, or the enum) the infos of a step that
    ended an episode hold `final_obs` and `final_info`, batched, with the masks `_final_obs` and
    `_final_info`; rows where the mask is False mean nothing. `config` has `render_size`; `render_mode` is
    None or `rgb_array`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  (Gymnasium's convention)
        "render_modes": ["rgb_array"],
        "render_fps": 20,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
    max_episode_steps: int | None

    def __init__(
        self, num_envs: int, config: Any, autoreset_mode: str | AutoresetMode, render_mode: str | None
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(unknown_name("render_mode", render_mode, ["rgb_array"]))
        if isinstance(num_envs, bool) or not hasattr(num_envs, "__index__") or int(num_envs) < 1:
            raise ConfigError(f"num_envs must be a whole number of at least 1, not {num_envs!r}")
        self.num_envs, self.config, self.render_mode = int(num_envs), config, render_mode
        self.autoreset_mode = _check_autoreset_mode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        self._env_seeds = np.zeros(self.num_envs, np.uint64)
        self._episodes = np.full(self.num_envs, -1, np.int64)  # -1: never seeded
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._done: BoolArray = np.zeros(self.num_envs, np.bool_)
        self._restarted: BoolArray = np.zeros(self.num_envs, np.bool_)
        """Where the last step ended an episode and started another one (`SameStep`)."""

    def _set_spaces(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start new episodes.

        Args:
            seed: s seeds environment i with s + i; a list gives each its own. None goes on with the stream
                of each environment, and takes a random seed where there is none yet.
            options: `reset_mask`, bool [N]: reset only these; the infos then carry masks.
        """
        mask = _check_reset_mask(options, self.num_envs)
        if isinstance(seed, (int, np.integer)):
            super().reset(seed=int(seed))
        self._assign_seeds(seed, mask)
        self._restarted = self._restarted & ~mask
        self._start_episodes(np.flatnonzero(mask), keep_final=False)
        return self._observe(), self._infos(mask)

    def step(self, actions: Any) -> tuple[Observation, Any, Any, Any, Info]:
        """Take one action in each environment.

        Args:
            actions: float [N, A]; values beyond the action space are clipped.

        Returns:
            Observations, env rewards float32 [N], terminated bool [N], truncated bool [N], infos.
        """
        self._check_reset()
        if self.autoreset_mode is AutoresetMode.DISABLED and self._done.any():
            first = int(np.flatnonzero(self._done)[0])
            raise DataError(f"the episode of environment {first} is over: reset it before the next step")
        action = self._check_actions(actions)
        self._restarted = np.zeros(self.num_envs, np.bool_)
        self._advance(action)
        self._elapsed += 1
        started = np.flatnonzero(self._done)  # only NEXT_STEP comes here with finished episodes
        if len(started):
            self._start_episodes(started, keep_final=False)
        env_reward, terminated = self._evaluate()
        if len(started):
            env_reward[started], terminated[started] = 0.0, False
        truncated = self._truncated()
        self._done = terminated | truncated
        final: Info = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._done.any():
            final = self._restart()
        infos = {**final, **self._infos(np.ones(self.num_envs, np.bool_))}
        return self._observe(), self._out(env_reward), self._out(terminated), self._out(truncated), infos

    def render(self) -> tuple[Any, ...] | None:
        """One uint8 image [H, W, 3] of `base_camera` for each environment; None without a render mode."""
        if self.render_mode is None:
            return None
        return tuple(self.render_frames(size=self.config.render_size))

    @abstractmethod
    def render_frames(
        self,
        camera: str = "base_camera",
        env_ids: EnvIds | None = None,
        *,
        size: tuple[int, int] | None = None,
        final: bool = False,
    ) -> UInt8Array:
        """Images of some environments, rendered now and only for them.

        Args:
            camera: its name.
            env_ids: int [n], which environments; all by default.
            size: (H, W); `image_size` by default.
            final: show what the last action led to: where `SameStep` has started a new episode since, the
                end of the old one; elsewhere, as always, the present.

        Returns:
            uint8 [n, H, W, 3].
        """

    # What a subclass simulates

    @abstractmethod
    def _check_actions(self, actions: Any) -> Any:
        """Actions [N, A] in the form that `_advance` takes; DataError if they are none."""

    @abstractmethod
    def _advance(self, actions: Any) -> None:
        """Let one step pass in all environments."""

    @abstractmethod
    def _evaluate(self) -> tuple[FloatArray, BoolArray]:
        """Env rewards, float32 [N], and where episodes are terminated, bool [N]; new arrays."""

    @abstractmethod
    def _start_worlds(self, ids: IntArray, *, keep_final: bool) -> None:
        """The first moment of the present episodes of `ids`; `keep_final`: the last one stays available."""

    @abstractmethod
    def _observe(self, ids: IntArray | None = None) -> Observation:
        """New observations of all environments; images only of `ids`, where these are given, else zeros."""

    @abstractmethod
    def _task_infos(self) -> dict[str, NDArray[Any]]:
        """New arrays [N] that tell of the task, such as `success`."""

    def _truncated(self) -> BoolArray:
        """Where the time limit ends episodes, bool [N]; a new array."""
        limit = np.iinfo(np.int64).max if self.max_episode_steps is None else self.max_episode_steps
        over: BoolArray = self._elapsed >= limit
        return over

    def _out(self, array: NDArray[Any]) -> Any:
        """An array in the form in which it is handed out."""
        return array

    # Episodes

    def _start_episodes(self, ids: IntArray, *, keep_final: bool) -> None:
        self._episodes[ids] += 1
        self._elapsed[ids] = 0
        self._done[ids] = False
        self._start_worlds(ids, keep_final=keep_final)

    def _restart(self) -> Info:
        """Start new episodes where they have ended, and return the infos about the old ones."""
        finished = self._done.copy()
        ids = np.flatnonzero(finished)
        final = {
            "final_obs": self._observe(ids),
            "_final_obs": self._out(finished.copy()),
            "final_info": self._infos(finished),
            "_final_info": self._out(finished.copy()),
        }
        self._restarted = finished
        self._start_episodes(ids, keep_final=True)
        return final

    def _infos(self, mask: BoolArray) -> Info:
        """New arrays [N], each with a mask that says for which environments it holds."""
        values = self._task_infos()
        values["elapsed_steps"] = self._elapsed.copy()
        values["env_seed"] = self._env_seeds.astype(np.int64)
        values["episode_index"] = self._episodes.copy()
        return values | {f"_{name}": mask.copy() for name in values}

    def _assign_seeds(self, seed: Seeds, mask: BoolArray) -> None:
        """Give seeds to the environments of `mask`, bool [N]; their streams of episodes start again."""
        given, values = _check_seeds(seed, self.num_envs)
        first_time = mask & ~given & (self._episodes < 0)
        if first_time.any():
            entropy = np.random.SeedSequence().generate_state(self.num_envs, np.uint64) >> np.uint64(16)
            self._env_seeds = np.where(first_time, entropy, self._env_seeds)
        self._episodes[mask & given] = -1
        self._env_seeds = np.where(mask & given, values, self._env_seeds)

    # Checks

    def _check_reset(self) -> None:
        if self._episodes.min() < 0:
            raise DataError("the environment has not been reset yet: call reset() first")

    def _check_env_ids(self, env_ids: EnvIds | None) -> IntArray:
        """Numbers of environments as int64 [n]; None means all."""
        if env_ids is None:
            return np.arange(self.num_envs)
        ids = np.asarray(env_ids)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise DataError(f"env_ids must be whole numbers [n], not {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_envs):
            raise DataError(f"env_ids must lie between 0 and {self.num_envs - 1}, not {ids.tolist()}")
        return ids.astype(np.int64)


def check_image_size(size: Any) -> tuple[int, int]:
    """(height, width), each a whole number from 16 to 2048."""
    sides = tuple(size) if hasattr(size, "__len__") and len(size) == 2 else (0, 0)
    if not all(hasattr(side, "__index__") and 16 <= int(side) <= 2048 for side in sides):
        raise ConfigError(f"size must be (height, width), from 16 to 2048 each, not {size!r}")
    return int(sides[0]), int(sides[1])


def check_steps_back(steps_back: EnvIds, remembered: int) -> IntArray:
    """int64 [n] from 1 to the number of steps that are remembered."""
    back = np.asarray(steps_back, np.int64)
    if len(back) and not 1 <= int(back.min()) <= int(back.max()) <= remembered:
        raise DataError(f"steps_back must lie in 1..{remembered}, the steps that are remembered")
    return back


def _check_autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """The mode, or the one of that name."""
    if isinstance(mode, AutoresetMode):
        return mode
    names = {name: each for each in AutoresetMode for name in (each.value, each.name, each.name.lower())}
    if mode not in names:
        raise ConfigError(unknown_name("autoreset_mode", mode, names))
    return names[mode]


def _check_reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> BoolArray:
    """`reset_mask` of the options of `reset`, bool [N]; all True where there is none."""
    options = options or {}
    for name in options.keys() - {"reset_mask"}:
        raise ConfigError(unknown_name("reset option", name, ["reset_mask"]))
    mask = np.asarray(options.get("reset_mask", np.ones(num_envs, np.bool_)))
    if mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise DataError(f"reset_mask must be bool [{num_envs}] with at least one True")
    return mask


def _check_seeds(seed: Seeds, num_envs: int) -> tuple[BoolArray, NDArray[np.uint64]]:
    """Which environments get a seed, bool [N], and which one, uint64 [N]."""
    if seed is None:
        return np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.uint64)
    one = isinstance(seed, (int, np.integer))
    seeds: list[Any] = [seed] * num_envs if one else list(seed)  # type: ignore[arg-type]
    for value in seeds:
        whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if value is not None and not (whole and 0 <= value < 2**62):
            raise DataError(f"a seed must be a whole number from 0 to 2^62 - 1, not {value!r}")
    if len(seeds) != num_envs:
        raise DataError(f"{len(seeds)} seeds were given for {num_envs} environments")
    values: NDArray[np.uint64] = np.array([0 if value is None else int(value) for value in seeds], np.uint64)
    if one:
        values += np.arange(num_envs, dtype=np.uint64)
    return np.array([value is not None for value in seeds]), values
