"""Measure a policy by the environment's own success, on environments that it was not trained in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from guerdon.config import EnvConfig
from guerdon.core.episodes import EpisodeRecord, EpisodeTracker
from guerdon.core.progress import progress_bar
from guerdon.core.types import BoolArray, FloatArray, UInt8Array
from guerdon.envs.make import make_vector_env
from guerdon.envs.observations import FrameSource, with_final
from guerdon.envs.success import success_of

Act = Callable[[Any], NDArray[Any]]
"""A batch of observations -> actions."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the episodes of an evaluation; success is None where the environment does not tell it."""

    episodes: int
    success_once: float | None
    success_at_end: float | None
    env_return: float
    length: float

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """For the log."""
        named = {f"eval/{name}": value for name, value in asdict(self).items()}
        return {name: float(value) for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class FilmedEpisode:
    """One episode as the reward model sees it."""

    frames: dict[str, UInt8Array]
    """camera -> uint8 [T, H, W, C]."""
    env_success: BoolArray
    """bool [T]."""
    env_rewards: FloatArray
    """float32 [T]."""
    actions: FloatArray
    """float32 [T, A]; a discrete action is one number."""


class _Shot(NamedTuple):
    """One step of the K environments that are filmed."""

    frames: dict[str, UInt8Array]
    """camera -> uint8 [K, H, W, C]."""
    env_success: BoolArray
    """bool [K]."""
    env_rewards: FloatArray
    """float32 [K]."""
    actions: FloatArray
    """float32 [K, A]."""
    running: BoolArray
    """bool [K]; whether the step belongs to the first episode."""


def evaluate(
    act: Act,
    cfg: EnvConfig,
    *,
    episodes: int,
    seed: int,
    cameras: Sequence[str] = (),
    num_films: int = 0,
    env: Any = None,
) -> tuple[Evaluation, list[FilmedEpisode]]:
    """Run `episodes` fresh episodes; each environment gives equally many, so short ones are not favoured.

    Args:
        act: chooses actions; nothing random if the policy should be measured as it is.
        cfg: the `env.eval` section.
        episodes: how many, at least.
        seed: of the environments.
        cameras: what films show.
        num_films: how many first episodes to film.
        env: vector environments to play in, which stay open; None makes those of `cfg`.
    """
    if env is not None:
        return _evaluate(act, env, episodes, seed, cameras, num_films)
    env = make_vector_env(cfg, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=num_films > 0)
    try:
        return _evaluate(act, env, episodes, seed, cameras, num_films)
    finally:
        env.close()


def _evaluate(
    act: Act, env: Any, episodes: int, seed: int, cameras: Sequence[str], num_films: int
) -> tuple[Evaluation, list[FilmedEpisode]]:
    count, num_envs = -(-episodes // env.num_envs), env.num_envs
    finished = np.zeros(num_envs, np.int64)
    tracker, records = EpisodeTracker(num_envs), list[EpisodeRecord]()
    knows_success = True
    filmed = np.arange(min(num_films, num_envs))
    source = FrameSource(env, cameras) if len(filmed) else None
    reels: list[_Shot] = []
    obs, _ = env.reset(seed=seed)
    with progress_bar("evaluating", total=count * num_envs, unit="episode") as bar:
        while (finished < count).any():
            actions = act(obs)
            obs, env_rewards, terminated, truncated, info = env.step(actions)
            done = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
            reported = success_of(info, num_envs, done)
            knows_success = knows_success and reported is not None
            success: BoolArray = np.zeros(num_envs, np.bool_)
            if reported is not None:
                success = reported >= 0.5
            if source is not None and (finished[filmed] == 0).any():
                next_obs = with_final(obs, info.get("final_obs"), done)
                reels.append(
                    _Shot(
                        source.frames(next_obs, done, filmed),
                        success[filmed],
                        np.asarray(env_rewards, np.float32)[filmed],
                        np.asarray(actions, np.float32).reshape(num_envs, -1)[filmed],
                        finished[filmed] == 0,
                    )
                )
            tracker.add(np.asarray(env_rewards), done, success)
            records += [record for record in tracker.pop() if finished[record.env] < count]
            finished[done] += 1
            bar.update(len(records) - bar.n)

    def mean(name: str) -> float:
        return float(np.mean([getattr(record, name) for record in records]))

    evaluation = Evaluation(
        episodes=len(records),
        success_once=mean("success_once") if knows_success else None,
        success_at_end=mean("success_at_end") if knows_success else None,
        env_return=mean("env_return"),
        length=mean("length"),
    )
    return evaluation, [_film(reels, number) for number in range(len(filmed))]


def _film(reels: list[_Shot], number: int) -> FilmedEpisode:
    mine = [shot for shot in reels if shot.running[number]]
    return FilmedEpisode(
        frames={name: np.stack([shot.frames[name][number] for shot in mine]) for name in mine[0].frames},
        env_success=np.array([shot.env_success[number] for shot in mine]),
        env_rewards=np.array([shot.env_rewards[number] for shot in mine], np.float32),
        actions=np.stack([shot.actions[number] for shot in mine]),
    )
