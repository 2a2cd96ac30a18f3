"""What the reward model is shown of running environments: frames, or stacks of the latest ones of an episode.

A frame is rendered only if it is scored, alone or in a stack. Where nothing has moved since the last verdict
(`reward.cache_verdicts`) neither is done: whoever asked carries the last verdict on. Nor is it for a robot in
motion whose model judges robots at rest alone (`reward.model.only_at_rest`): there it is no success.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from gymnasium.vector import VectorEnv

from guerdon.config import RewardConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.envs.observations import AT_REST_INFO, FrameSource, camera_behind, native_of, per_env
from guerdon.rewards.image.scorer import StreamingScorer
from guerdon.rewards.relabel import scored_frames

Picked: TypeAlias = tuple[IntArray, dict[str, UInt8Array]]
"""Environments int [n], and of each camera what is scored of them."""

log = logging.getLogger("guerdon")


@runtime_checkable
class RendersPast(Protocol):
    """An environment that can also show what earlier actions led to."""

    def keep_past(self, num_steps: int) -> None:
        """From now on remember so many steps before the last one."""

    def render_past(self, camera: str, env_ids: IntArray, steps_back: IntArray) -> UInt8Array:
        """Frames that the actions `steps_back` (int [n], from 1) steps before the last one led to.

        Of the environments `env_ids`, in the episode that the last action belonged to -> uint8 [n, H, W, C].
        """


class EpisodeStacks:
    """The latest k frames of the running episode of each of N environments."""

    def __init__(self, num_envs: int, num_frames: int) -> None:
        self._shape = (num_envs, num_frames)
        self._stacks: dict[str, UInt8Array] = {}

    def add(
        self, frames: Mapping[str, UInt8Array], env_ids: IntArray, begun: BoolArray
    ) -> dict[str, UInt8Array]:
        """Take the frames of a step; environments that are not among them stand still.

        Args:
            frames: camera -> uint8 [n, H, W, C]; all of them.
            env_ids: int [n].
            begun: bool [n]; whether it is the first frame of an episode. It is then repeated.

        Returns:
            camera -> uint8 [N, k, H, W, C], valid until the next call; for k = 1 the frames as they are.
        """
        if self._shape[1] == 1:
            return dict(frames)
        for stacks in self._stacks.values():
            stacks[:, :-1] = stacks[:, 1:].copy()
        first = env_ids[begun]
        for name, images in frames.items():
            if name not in self._stacks:
                self._stacks[name] = np.zeros((*self._shape, *images.shape[1:]), np.uint8)
            stacks = self._stacks[name]
            stacks[env_ids, -1] = images
            stacks[first] = stacks[first, -1:]  # nothing of the episode before
        return self._stacks


class FrameSelector:
    """Follows the episodes of N environments and picks what is to be scored of every step."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        cameras: Sequence[str],
        cfg: RewardConfig,
        num_frames: int = 1,
        only_at_rest: bool = False,
    ) -> None:
        """Set up; call `reset` when episodes start.

        Args:
            env: shows its cameras in observations or on demand.
            cameras: what the model looks at.
            cfg: the `reward` section; says which frames are scored, and whether verdicts are reused.
            num_frames: k; above 1 the model is shown stacks.
            only_at_rest: judge robots that stand still alone.
        """
        if only_at_rest and cfg.cache_verdicts:
            raise ConfigError("the reward model judges robots at rest alone: turn reward.cache_verdicts off")
        self._source, self._cameras, self._cfg = FrameSource(env, cameras), tuple(cameras), cfg
        self._num_frames, self._everyone = num_frames, np.arange(env.num_envs)
        self._native = native_of(env)
        self._age: IntArray = np.zeros(env.num_envs, np.int64)  # steps of the running episode so far
        self._stacks = EpisodeStacks(env.num_envs, num_frames)
        self._reuses = cfg.cache_verdicts and cfg.reward_mode == "per_step"
        self._since: IntArray = np.zeros(env.num_envs, np.int64)  # steps since something moved
        self._still: FloatArray | None = None  # states when something moved last
        self._last: dict[str, UInt8Array] = {}  # frames of the last step, where there are no states
        inner: Any = self._native
        self._looks_back = inner if isinstance(inner, RendersPast) else None
        if num_frames > 1 and cfg.reward_mode == "terminal" and self._looks_back is not None:
            self._looks_back.keep_past(num_frames - 1)
        self._told = False
        self._only_at_rest = only_at_rest
        self.num_rendered = 0
        """Frames that were asked of the environments so far."""

    def reset(self) -> None:
        """All environments begin new episodes."""
        self._age[:] = 0

    def step(
        self, obs: Any, done: BoolArray, *, at_rest: BoolArray | None = None, score_all: bool = False
    ) -> Picked:
        """What is to be scored of the step that was just taken.

        Args:
            obs: what the actions led to, with the final observations of ended episodes.
            done: bool [N]; whether the episode ended with this step.
            at_rest: bool [N]; whether the robot stands still, if that decides what is scored.
            score_all: judge every environment, also where nothing moved.

        Returns:
            int [n], environments to judge; where others are missing in `per_step` mode their last verdict
            holds, or, with `only_at_rest`, they are no success. And camera -> uint8 [n, H, W, C], or
            [n, k, H, W, C] in stacks of k.
        """
        if not self._cfg.looks_at_frames:
            picked = np.zeros(0, np.int64), dict[str, UInt8Array]()
        elif self._only_at_rest:
            env_ids = np.flatnonzero(scored_frames(done, self._cfg) & _known(at_rest))
            picked = env_ids, self._show(obs, done, env_ids)
        elif self._cfg.reward_mode == "terminal":
            picked = self._last_of_episodes(obs, done)
        elif self._reuses:
            picked = self._moved(obs, done, score_all)
        else:
            picked = self._everyone, self._stacked(self._show(obs, done, self._everyone), self._everyone)
        self._age = np.where(done, 0, self._age + 1)
        return picked

    def _show(self, obs: Any, done: BoolArray, env_ids: IntArray) -> dict[str, UInt8Array]:
        if not len(env_ids):
            return {}
        self.num_rendered += len(env_ids)
        return self._source.frames(obs, done, env_ids)

    def _stacked(self, frames: dict[str, UInt8Array], env_ids: IntArray) -> dict[str, UInt8Array]:
        """What is scored of all environments, after a step that gave `env_ids` new frames."""
        return self._stacks.add(frames, env_ids, self._age[env_ids] == 0)

    def _last_of_episodes(self, obs: Any, done: BoolArray) -> Picked:
        """The final frames, with those before them; rendered then, if the environment can look back."""
        env_ids = np.flatnonzero(scored_frames(done, self._cfg))
        if self._num_frames == 1:
            return env_ids, self._show(obs, done, env_ids)
        observed = self._source.are_in(obs)
        if observed or self._looks_back is None:
            if not observed and not self._told:
                log.info("every frame is rendered: the environment cannot show those before the final ones")
                self._told = True
            stacks = self._stacked(self._show(obs, done, self._everyone), self._everyone)
            return env_ids, {name: images[env_ids] for name, images in stacks.items()} if len(env_ids) else {}
        final = self._show(obs, done, env_ids)
        return env_ids, {name: self._with_past(name, images, env_ids) for name, images in final.items()}

    def _with_past(self, camera: str, final: UInt8Array, env_ids: IntArray) -> UInt8Array:
        """Stacks that end with the frames `final` of `env_ids`; the frames before them are rendered now."""
        assert self._looks_back is not None
        count = self._num_frames
        stacks = np.repeat(final[:, None], count, axis=1)
        for back in range(1, count):
            steps_back = np.minimum(back, self._age[env_ids])  # before its first frame, that one again
            far = steps_back == back
            if far.any():
                ids = env_ids[far]
                past = self._looks_back.render_past(camera_behind(camera), ids, steps_back[far])
                stacks[far, -1 - back] = self._source.view(camera, past, ids)
                self.num_rendered += int(far.sum()) if camera == self._cameras[0] else 0
            stacks[~far, -1 - back] = stacks[~far, -back]
        return stacks

    def _moved(self, obs: Any, done: BoolArray, score_all: bool) -> Picked:
        """The environments in which something moved, or whose stacks still hold an earlier picture."""
        begun = self._age == 0
        if self._native is None:
            frames = self._show(obs, done, self._everyone)
            moved = begun | self._looks_different(frames)
            shown = self._everyone
        else:
            moved = begun | self._states_differ(begun)
            shown = np.flatnonzero(moved | score_all)
            frames = self._show(obs, done, shown)
        self._since = np.where(begun, self._num_frames - 1, np.where(moved, 0, self._since + 1))
        stacks = self._stacked(frames, shown)
        scored = np.flatnonzero(moved | score_all | (self._since < self._num_frames))
        if not len(scored):
            return scored, {}
        if self._num_frames > 1 or self._native is None:
            return scored, {name: images[scored] for name, images in stacks.items()}
        return scored, stacks

    def _states_differ(self, begun: BoolArray) -> BoolArray:
        """Whether a state's entry has changed by more than the tolerance since something moved last."""
        assert self._native is not None
        states: FloatArray = np.asarray(self._native.final_state())
        if self._still is None:
            self._still = states.copy()
            return np.ones(len(states), np.bool_)
        moved: BoolArray = (np.abs(states - self._still) > self._cfg.cache_tolerance).any(axis=1)
        self._still = np.where((moved | begun)[:, None], states, self._still)
        return moved

    def _looks_different(self, frames: dict[str, UInt8Array]) -> BoolArray:
        """Whether any camera's picture has changed; for environments that do not tell their state."""
        moved = np.zeros(len(self._everyone), np.bool_)
        for name, images in frames.items():
            last = self._last.get(name)
            moved |= True if last is None else (images != last).reshape(len(images), -1).any(axis=1)
            self._last[name] = images.copy()
        return moved


def _known(at_rest: BoolArray | None) -> BoolArray:
    if at_rest is None:
        raise ConfigError(
            "the reward model judges robots at rest alone (reward.model.only_at_rest), but the environment "
            f"does not tell in its info whether its robot is: it has no {AT_REST_INFO!r}"
        )
    return at_rest


class RewardFrames:
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
        """Make room for `num_steps` steps of `env`; `cfg` and what follows say what is scored."""
        self._selector = FrameSelector(env, cameras, cfg, num_frames, only_at_rest)
        self._cameras = tuple(cameras)
        self._shape = (num_steps, env.num_envs)
        self._every = cfg.reward_mode == "per_step"
        self._all: dict[str, UInt8Array] = {}  # room for all frames of `num_steps` steps ...
        self._count = 0  # ... of which so many are there
        self._rows: list[IntArray] = []
        self._some: list[dict[str, UInt8Array]] = []
        self.scores_all_first = True
        """Whether step 0 gets a verdict on every environment; otherwise the caller keeps earlier ones."""
        self.streaming: StreamingScorer | None = None
        """Called with frames as soon as they exist, where every frame is scored."""

    @property
    def num_rendered(self) -> int:
        """Frames that were asked of the environments so far."""
        return self._selector.num_rendered

    def reset(self) -> None:
        """New episodes begin everywhere."""
        self._selector.reset()

    def add(self, t: int, next_obs: Any, done: BoolArray, info: Mapping[str, Any]) -> None:
        """Take the frames that step `t` led to; of ended episodes the final ones."""
        num_steps, num_envs = self._shape
        if t == 0:
            self._rows, self._some, self._count = [], [], 0
            if self.streaming is not None:
                self.streaming.reset()
        reported = per_env(info, AT_REST_INFO, len(done), done)
        at_rest = None if reported is None else reported >= 0.5
        score_all = t == 0 and self.scores_all_first
        env_ids, frames = self._selector.step(next_obs, done, at_rest=at_rest, score_all=score_all)
        if len(env_ids):
            self._rows.append(t * num_envs + env_ids)
            if self._every:
                self._keep(frames, len(env_ids))
            else:
                self._some.append(frames)
        if self.streaming is not None:
            self.streaming.ready(self._all, self._count, last=t == num_steps - 1)

    def _keep(self, frames: dict[str, UInt8Array], count: int) -> None:
        for name, images in frames.items():
            if name not in self._all:
                size = self._shape[0] * self._shape[1]
                self._all[name] = np.empty((size, *images.shape[1:]), np.uint8)
            self._all[name][self._count : self._count + count] = images
        self._count += count

    def gathered(self) -> tuple[IntArray, dict[str, UInt8Array]]:
        """Which steps were scored, as places in a flat [T * N], and their frames, camera -> [K, H, W, C]."""
        if not self._rows:
            return np.zeros(0, np.int64), {}
        rows = np.concatenate(self._rows)
        if self._every:
            return rows, {name: images[: self._count] for name, images in self._all.items()}
        return rows, {name: np.concatenate([part[name] for part in self._some]) for name in self._cameras}

    def take(self) -> tuple[IntArray, dict[str, UInt8Array]]:
        """The same; the arrays are the caller's and not used again."""
        gathered = self.gathered()
        self._all, self._rows, self._some, self._count = {}, [], [], 0
        return gathered
