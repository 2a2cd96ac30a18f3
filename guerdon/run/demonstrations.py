"""Demonstrations as prior data: transitions of recorded episodes with the learned verdict on each frame."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.config import RewardConfig
from guerdon.datasets.frames import open_store
from guerdon.errors import DataError
from guerdon.learn.networks import STATE, ObsSpec
from guerdon.learn.replay import ReplayBuffer
from guerdon.run.reward_group import RewardGroup
from guerdon.serve.relabel import judged_frames
from guerdon.types import Episode, display_path


def fill_with_demonstrations(
    path: Path,
    spec: ObsSpec,
    rewards: RewardGroup | None,
    cfg: RewardConfig,
    make_replay: Callable[[int, int, int], ReplayBuffer],
    seed: int,
) -> ReplayBuffer:
    """A buffer with all complete, successful episodes of a data set.

    Args:
        path: a data set in any format that keeps states and actions.
        spec: what the policy observes.
        rewards: judge the frames, as they do those of the run.
        cfg: the `reward` section.
        make_replay: (num_envs, capacity, seed) -> a buffer like the run's own.
        seed: of sampling.
    """
    with tempfile.TemporaryDirectory() as copy:
        store, _ = open_store(str(path), None, None, Path(copy))
        wanted = np.flatnonzero(store.success & store.complete).tolist()
        if not wanted:
            raise DataError(f"{display_path(path)} has no complete, successful episode to learn from")
        steps = int(sum(store.starts[n + 1] - store.starts[n] for n in wanted))
        replay = make_replay(1, steps, seed)
        for number in wanted:
            _add(replay, store.read_episode(number), spec, rewards, cfg, path)
    return replay


def _add(
    replay: ReplayBuffer,
    episode: Episode,
    spec: ObsSpec,
    rewards: RewardGroup | None,
    cfg: RewardConfig,
    path: Path,
) -> None:
    """Add one episode; a policy that sees images does without its first step, whose frame is unknown."""
    if episode.actions is None or (
        spec.state_size and (episode.states is None or episode.initial_state is None)
    ):
        raise DataError(f"{display_path(path)} keeps no actions and states; collect it with keep_states=true")
    count = episode.num_frames
    reached: dict[str, Any] = {name: np.asarray(episode.frames[name]) for name, _ in spec.images}
    before: dict[str, Any] = {
        name: np.concatenate([images[:1], images[:-1]]) for name, images in reached.items()
    }
    if spec.state_size:
        assert episode.states is not None and episode.initial_state is not None
        reached[STATE] = np.asarray(episode.states)
        before[STATE] = np.concatenate([episode.initial_state[None], episode.states[:-1]])
        if reached[STATE].shape[1] != spec.state_size:
            raise DataError(
                f"{display_path(path)} has states of size {reached[STATE].shape[1]}, the environment "
                f"{spec.state_size}"
            )
    terminated = np.zeros(count, np.bool_) if episode.terminated is None else episode.terminated
    done = np.zeros(count, np.bool_)
    done[-1] = True
    env_rewards = np.zeros(count, np.float32) if episode.env_rewards is None else episode.env_rewards
    extras: dict[str, Any] = {}
    if rewards is not None:
        judged = judged_frames(done, cfg)
        frames = {name: np.asarray(episode.frames[name]) for name in rewards.facts.image_keys}
        extras["prob_success"] = np.full(count, np.nan, np.float32)
        extras["prob_success"][judged] = rewards.judge(
            {name: images[judged] for name, images in frames.items()}
        ).prob_success
        if cfg.relabel_at == "sampling":
            extras |= {f"frames/{name}": images for name, images in frames.items()}
    for t in range(1 if spec.images else 0, count):
        ends = bool(done[t])
        replay.add(
            {name: part[t : t + 1] for name, part in before.items()},
            episode.actions[t : t + 1],
            env_rewards[t : t + 1],
            terminated[t : t + 1],
            np.array([ends and not terminated[t]]),
            {name: part[t : t + 1] for name, part in reached.items()} if ends else None,
            **{name: value[t : t + 1] for name, value in extras.items()},
        )
