"""`JudgedFrames`: what an env worker keeps of its steps for the reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from guerdon.config import RewardConfig
from guerdon.core.types import BoolArray, IntArray, UInt8Array
from guerdon.data.collect.observations import AT_REST_INFO, per_env
from guerdon.training.ahead import StreamingScorer
from guerdon.training.feed import FrameFeed


class JudgedFrames:
    """The frames of some steps that the reward model will look at, and no others: render on demand."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        cameras: Sequence[str],
        num_steps: int,
        cfg: RewardConfig,
        num_frames: int = 1,
        only_at_rest: bool = False,
    ) -> None:
        """Make room for `num_steps` steps of `env`; `cfg` and what follows say what is judged."""
        self._feed = FrameFeed(env, cameras, cfg, num_frames, only_at_rest)
        self._cameras = tuple(cameras)
        self._shape = (num_steps, env.num_envs)
        self._every = cfg.reward_mode == "per_step"
        self._all: dict[str, UInt8Array] = {}  # room for all frames of `num_steps` steps ...
        self._count = 0  # ... of which so many are there
        self._rows: list[IntArray] = []
        self._some: list[dict[str, UInt8Array]] = []
        self.starts_anew = True
        """Whether step 0 gets a verdict on every environment; otherwise the caller keeps earlier ones."""
        self.ahead: StreamingScorer | None = None
        """Who is told of frames as soon as they are there, where every frame is judged."""

    @property
    def num_rendered(self) -> int:
        """Frames that were asked of the environments so far."""
        return self._feed.num_rendered

    def begin(self) -> None:
        """New episodes begin everywhere."""
        self._feed.begin()

    def add(self, t: int, reached_obs: Any, done: BoolArray, info: Mapping[str, Any]) -> None:
        """Take the frames that step `t` led to; of ended episodes the final ones."""
        num_steps, num_envs = self._shape
        if t == 0:
            self._rows, self._some, self._count = [], [], 0
            if self.ahead is not None:
                self.ahead.begin()
        told = per_env(info, AT_REST_INFO, len(done), done)
        at_rest = None if told is None else told >= 0.5
        anew = t == 0 and self.starts_anew
        env_ids, frames = self._feed.step(reached_obs, done, at_rest=at_rest, anew=anew)
        if len(env_ids):
            self._rows.append(t * num_envs + env_ids)
            if self._every:
                self._keep(frames, len(env_ids))
            else:
                self._some.append(frames)
        if self.ahead is not None:
            self.ahead.ready(self._all, self._count, last=t == num_steps - 1)

    def _keep(self, frames: dict[str, UInt8Array], count: int) -> None:
        for name, images in frames.items():
            if name not in self._all:
                size = self._shape[0] * self._shape[1]
                self._all[name] = np.empty((size, *images.shape[1:]), np.uint8)
            self._all[name][self._count : self._count + count] = images
        self._count += count

    def gathered(self) -> tuple[IntArray, dict[str, UInt8Array]]:
        """Which steps were judged, as places in a flat [T * N], and their frames, camera -> [K, H, W, C]."""
        if not self._rows:
            return np.zeros(0, np.int64), {}
        rows = np.concatenate(self._rows)
        if self._every:
            return rows, {name: images[: self._count] for name, images in self._all.items()}
        return rows, {name: np.concatenate([part[name] for part in self._some]) for name in self._cameras}

    def handed_over(self) -> tuple[IntArray, dict[str, UInt8Array]]:
        """The same; the arrays are the caller's and not used again."""
        gathered = self.gathered()
        self._all, self._rows, self._some, self._count = {}, [], [], 0
        return gathered
