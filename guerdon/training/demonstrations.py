"""What people did as prior data: recorded episodes with the score of each frame, and interventions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.networks import ObsSpec
from guerdon.agents.recorded import Demonstration, open_demonstrations
from guerdon.agents.replay import ReplayBuffer
from guerdon.config import RewardConfig
from guerdon.core.batches import StepChunk
from guerdon.core.errors import DataError
from guerdon.core.images import stack_episode
from guerdon.core.types import BoolArray, Episode
from guerdon.data.datasets.frames import check_motion_is_seen
from guerdon.rewards.image.scorer import ImageScorer
from guerdon.rewards.relabel import fires, scored_frames, verdicts
from guerdon.training.reward_workers import RewardWorkers

log = logging.getLogger("guerdon")


def fill_with_demonstrations(
    path: Path,
    spec: ObsSpec,
    rewards: ImageScorer | RewardWorkers | None,
    cfg: RewardConfig,
    make_replay: Callable[[int, int, int], ReplayBuffer],
    seed: int,
    control_mode: str | None = None,
) -> ReplayBuffer:
    """A buffer with all complete, successful episodes of a data set.

    Args:
        path: a data set in any format that keeps states and actions.
        spec: what the policy observes.
        rewards: judge the frames, as they do those of the run.
        cfg: the `reward` section.
        make_replay: (num_envs, capacity, seed) -> a buffer like the run's own.
        seed: of sampling.
        control_mode: of the run; demonstrations of another are refused.
    """
    with open_demonstrations(path, spec, control_mode) as shown:
        replay = make_replay(1, sum(map(len, shown)), seed)
        for item in shown:
            if rewards is not None and not rewards.facts.only_at_rest:
                check_motion_is_seen(item.episode, path)
            _add(replay, item, rewards, cfg)
    return replay


def _at_rest(episode: Episode) -> BoolArray:
    if episode.at_rest is None:
        raise DataError(
            f"a demonstration ({episode.source or 'of unknown source'}) does not tell where the robot stands "
            "still, which the reward model asks for: collect demonstrations again"
        )
    return episode.at_rest


def _until_success(fires: BoolArray) -> tuple[int, BoolArray]:
    """Steps of a demonstration that count, and which terminate, where the model's success ends an episode.

    A recording holds the target for a while; in the run the first such frame is the last. If it were not so
    in demonstrations too, holding on would be worth many times as much as getting there. Where the model sees
    no success nothing ends either: a recording's own end would teach that success is worth nothing.
    """
    if not fires.any():
        log.warning("the reward model sees no success in a demonstration that is labelled as one")
        return len(fires), np.zeros_like(fires)
    first = int(np.argmax(fires))
    return first + 1, np.arange(len(fires)) == first


def _add(
    replay: ReplayBuffer,
    shown: Demonstration,
    rewards: ImageScorer | RewardWorkers | None,
    cfg: RewardConfig,
) -> None:
    """Add one episode, which ends with its last step."""
    count, episode, kept = len(shown), shown.episode, slice(shown.first, None)
    done = np.arange(count) == count - 1
    terminated = np.zeros(count, np.bool_) if episode.terminated is None else episode.terminated[kept]
    env_rewards = np.zeros(count, np.float32) if episode.env_rewards is None else episode.env_rewards[kept]
    extras: dict[str, Any] = {}
    if rewards is not None:
        contract = rewards.facts.contract
        wanted = scored_frames(done, cfg)
        scored = wanted & _at_rest(episode)[kept] if rewards.facts.only_at_rest else wanted
        contract.check_frames(episode.frames)
        frames = {
            name: stack_episode(episode.frames[name], contract.num_frames)[kept]
            for name in rewards.facts.image_keys
        }
        extras["prob_success"] = np.full(count, np.nan, np.float32)
        extras["prob_success"][scored] = rewards.score(
            {name: images[scored] for name, images in frames.items()}
        ).prob_success
        extras["prob_success"][wanted & ~scored] = 0.0
        extras["prob_success"] = verdicts(extras["prob_success"], episode.labels[kept] >= 0.5, done, cfg)
        if cfg.relabel_at == "sampling":
            extras |= {f"frames/{name}": images for name, images in frames.items()}
        if cfg.standalone:
            count, terminated = _until_success(fires(extras["prob_success"], rewards.facts.threshold))
            done = np.arange(len(done)) == count - 1
    for t in range(count):
        row = slice(t, t + 1)
        replay.add(
            {name: part[row] for name, part in shown.obs.items()},
            shown.actions[row],
            env_rewards[row],
            terminated[row],
            done[row] & ~terminated[row],
            {name: part[row] for name, part in shown.next_obs.items()},
            **{name: value[row] for name, value in extras.items()},
        )


def add_interventions(shown: ReplayBuffer, chunk: StepChunk, extras: Mapping[str, NDArray[Any]]) -> None:
    """Add the steps of a chunk in which a person acted: they are learned from as demonstrations are.

    Every one stands alone, with what it led to, because the policy may act before and after it.

    Args:
        shown: a buffer for one environment.
        chunk: K steps of n environments.
        extras: name -> [K, n, ...].
    """
    assert chunk.intervened is not None
    done = chunk.done
    for t, env in np.argwhere(chunk.intervened).tolist():
        row = slice(env, env + 1)
        next_obs = chunk.final_obs[t] if done[t, env] else chunk.obs_after(t)
        terminated = chunk.terminated[t, row]
        shown.add(
            _rows(chunk.obs_at(t), row),
            chunk.actions[t, row],
            chunk.env_rewards[t, row],
            terminated,
            ~terminated,
            _rows(next_obs, row),
            **{name: values[t, row] for name, values in extras.items()},
        )


def _rows(obs: Any, rows: slice) -> Any:
    return {name: part[rows] for name, part in obs.items()} if isinstance(obs, dict) else obs[rows]
