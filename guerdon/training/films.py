"""The films of a run, of its last evaluation, and beside each the values that `guerdon data view` plots."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import numpy as np

from guerdon.core import strict_json
from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.images import stack_episode
from guerdon.envs.observations import camera_behind
from guerdon.monitoring.films import film_files
from guerdon.monitoring.video import picture_size, write_video
from guerdon.rewards.image.scorer import ImageScorer
from guerdon.training.evaluation import FilmedEpisode
from guerdon.training.reward_workers import RewardWorkers

log = logging.getLogger("guerdon")

FPS = 10


def write_films(
    folder: Path,
    films: list[FilmedEpisode],
    rewards: ImageScorer | RewardWorkers,
    format: Literal["gif", "mp4"] = "gif",
) -> None:
    """Write `videos/eval_N.gif` (or mp4) with the learned probability or reward under the picture.

    `videos/eval_N.json` holds the same values with the env rewards and actions; `guerdon data view` reads it.

    Args:
        folder: of the run.
        films: the episodes.
        rewards: what scores them: a classifier gives probabilities, a reward function rewards.
        format: of the films.
    """
    facts = rewards.facts
    name = "learned_reward" if facts.gives_rewards else "prob_success"
    threshold = None if facts.gives_rewards else facts.threshold
    written: set[Path] = set()
    for number, film in enumerate(films):
        stacks = {key: stack_episode(film.frames[key], facts.num_frames) for key in facts.image_keys}
        camera = camera_behind(facts.image_keys[0])
        shown = film.frames[camera]
        try:
            values = rewards.score(stacks).prob_success
        except DataError as error:  # the run is over: its results are worth more than the curve in a film
            log.warning("films have no curve: the frames of env.eval do not fit the reward model: %s", error)
            values = np.full(len(shown), np.nan, np.float32)
        videos = make_directory(folder / "videos")
        path = videos / f"eval_{number}.{format}"
        write_video(path, shown, values, threshold, film.env_success, fps=FPS)
        written.add(path)
        about = {
            "camera": camera,
            "picture": picture_size(shown),
            "threshold": threshold,
            name: values,
            "env_success": film.env_success,
            "env_reward": film.env_rewards,
            "actions": film.actions,
        }
        write_atomic(videos / f"eval_{number}.json", strict_json.dumps(about))
    if written:
        _remove_older(folder, written)


def _remove_older(folder: Path, written: set[Path]) -> None:
    """Films that the run left when it had fewer steps, in another format or of more episodes."""
    stems = {film.stem for film in written}
    for film in film_files(folder):
        if film not in written and film.stem.startswith("eval_"):
            film.unlink()
            if film.stem not in stems:
                film.with_suffix(".json").unlink(missing_ok=True)
