"""Episodes as people look at them: of a data set, or the films of a run; one in memory at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.images import stack_rows
from guerdon.core.types import Episode, Fault, FloatArray, UInt8Array, display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.formats import Format, find_format
from guerdon.monitoring.films import film_files, film_frames, film_values

if TYPE_CHECKING:  # with it comes torch, which most views do without
    from guerdon.rewards.image.scorer import ImageScorer

log = logging.getLogger("guerdon")

SCORE_BATCH = 256
"""Frames that are scored at once."""
VALUES = ("label", "prob_success", "learned_reward", "env_reward", "env_success")
"""What an episode can have a number of at every step, in the order in which it is shown."""


@dataclass(frozen=True, kw_only=True)
class ViewedEpisode:
    """One episode with all that is known of its T steps."""

    name: str
    """Such as `episode 3`."""
    about: str
    """Its outcome and where it came from."""
    frames: Mapping[str, Iterable[UInt8Array]]
    """camera -> T pictures, uint8 [H, W, C]; may be read once only."""
    values: Mapping[str, FloatArray]
    """Some of `VALUES` -> float32 [T]; NaN where a step has none."""
    actions: FloatArray | None = None
    """float32 [T, A]."""
    threshold: float | None = None
    """Above which `prob_success` counts as success."""


def episodes_at(
    path: Path,
    *,
    format: str | Format | None = None,
    scorer: ImageScorer | None = None,
    limit: int = 20,
    skip: int = 0,
) -> Iterator[ViewedEpisode]:
    """The episodes of a data set, or the films of a run's folder.

    Args:
        path: of the data set or the run.
        format: of the data set; None detects it.
        scorer: scores every frame of a data set; the films of a run are scored already.
        limit: how many episodes to give; a line in the log says if there are more.
        skip: how many to leave out before.
    """
    if not path.exists():
        raise DataError(f"{display_path(path)} does not exist")
    films = film_files(path) if format is None and path.is_dir() else []
    if films and scorer is not None:
        raise DataError(
            f"{display_path(path)} is a run, and its films have the scores of the run's own reward model: "
            "leave --checkpoint out"
        )
    found = _films(films[skip:]) if films else _data(path, format, scorer, skip)
    given = 0
    for episode in found:
        if given == limit:
            log.warning("only %d episodes are shown; --episodes and --skip choose others", limit)
            break
        given += 1
        yield episode
    if not given:
        raise DataError(f"{display_path(path)} has no usable episode to show after the first {skip}")


def _data(
    path: Path, format: str | Format | None, scorer: ImageScorer | None, skip: int
) -> Iterator[ViewedEpisode]:
    number = -1
    for item in find_format(path, format).read(path):
        if isinstance(item, Fault):
            log.warning("not used: %s: %s", display_path(item.path), item.reason)
            continue
        number += 1
        if number >= skip:
            yield _of_data(item, number, scorer, path)


def _of_data(episode: Episode, number: int, scorer: ImageScorer | None, path: Path) -> ViewedEpisode:
    values = {"label": episode.labels}
    if scorer is not None:
        values["prob_success"] = _score(scorer, episode, path)
    if episode.env_rewards is not None:
        values["env_reward"] = episode.env_rewards
    outcome = ("success" if episode.success else "failure") if episode.complete else "unfinished"
    return ViewedEpisode(
        name=f"episode {number}",
        about=": ".join(filter(None, (outcome, episode.source))),
        frames=episode.frames,
        values=values,
        actions=episode.actions,
        threshold=None if scorer is None else scorer.threshold,
    )


def _score(scorer: ImageScorer, episode: Episode, path: Path) -> FloatArray:
    """Calibrated probabilities of an episode's frames, float32 [T]."""
    from guerdon.data.datasets.frames import check_motion_is_seen  # imports torch, as the scorer has

    contract = scorer.contract
    missing = [name for name in scorer.image_keys if name not in episode.frames]
    if missing:
        raise DataError(
            f"{display_path(path)} has no camera {missing[0]!r}, which the reward model looks at; it has "
            f"{list(episode.frames)}"
        )
    steps = np.arange(episode.num_frames)
    parts = []
    for at in range(0, len(steps), SCORE_BATCH):
        some = steps[at : at + SCORE_BATCH]
        rows = some if contract.num_frames == 1 else stack_rows(some, some, contract.num_frames)
        parts.append(scorer.score({name: episode.frames[name][rows] for name in scorer.image_keys}))
    prob = np.concatenate([part.prob_success for part in parts])
    if contract.only_at_rest:
        if episode.at_rest is None:
            raise DataError(
                f"{display_path(path)} does not tell where the robot stands still, and the model scores only "
                "such frames (reward.model.only_at_rest)"
            )
        prob[~episode.at_rest] = 0.0
    else:
        check_motion_is_seen(episode, path)
    return prob


# The films of a run


def _films(files: list[Path]) -> Iterator[ViewedEpisode]:
    for file in files:
        about = film_values(file)
        if about is None:
            log.warning(
                "%s has no values beside it (%s.json), only pictures: an older version wrote it",
                *(display_path(file), file.stem),
            )
        yield _of_film(file, about or {})


def _of_film(file: Path, about: Mapping[str, Any]) -> ViewedEpisode:
    shown = display_path(file.with_suffix(".json"))
    values = {name: _numbers(about[name], 1, shown, name) for name in VALUES if name in about}
    actions = _numbers(about["actions"], 2, shown, "actions") if "actions" in about else None
    counts = {len(each) for each in (*values.values(), *(() if actions is None else (actions,)))}
    if len(counts) > 1:
        raise DataError(f"{shown}: the values have different numbers of steps: {sorted(counts)}")
    given = about.get("threshold")
    threshold = None if given is None else float(_numbers([given], 1, shown, "threshold")[0])
    size = _picture_size(about.get("picture"), shown)
    frames = film_frames(file, size, counts.pop() if counts else None)
    reached = "" if "env_success" not in values else _outcome(values["env_success"])
    return ViewedEpisode(
        name=file.stem.replace("_", " "),
        about=": ".join(filter(None, (reached, display_path(file)))),
        frames={one_line(about.get("camera", "film")): frames},
        values=values,
        actions=actions,
        threshold=threshold,
    )


def _picture_size(given: Any, source: str) -> tuple[int, int] | None:
    """Height and width of the picture in a film; None: all of it."""
    if given is None:
        return None
    match given:
        case [int(height), int(width)] if height > 0 < width and bool not in (type(height), type(width)):
            return height, width
    raise DataError(f"{source}: picture must be [height, width], not {one_line(given)}")


def _outcome(env_success: FloatArray) -> str:
    return "success" if bool((env_success >= 0.5).any()) else "failure"


def _numbers(given: Any, dimensions: int, source: str, name: str) -> FloatArray:
    """A list of numbers as float32; null is NaN."""
    try:
        array = np.array(given, np.float32)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros(0, np.float32)
    if array.ndim != dimensions or not len(array):
        raise DataError(f"{source}: {name} must hold numbers, a list for each step, not {one_line(given)}")
    return np.where(np.isfinite(array), array, np.float32(np.nan))
