"""Scoring whatever is at hand: a data set, pictures, a video, or arrays of frames."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.images import stack_rows, to_numpy
from guerdon.core.progress import progress
from guerdon.core.types import Fault, FloatArray, IntArray, UInt8Array, display_path
from guerdon.data.datasets.frames import RewardDataset, check_store_shows_motion, frames_at_rest, open_store
from guerdon.data.datasets.media import Clip, find_clips
from guerdon.data.files.videos import VIDEO_CONTAINERS
from guerdon.data.formats import detect_format
from guerdon.data.formats.folder import PICTURE_SUFFIXES
from guerdon.data.store import EpisodeStore
from guerdon.envs.observations import images_from
from guerdon.fit.metrics import LabelledScores
from guerdon.rewards.image.scorer import MINI_BATCH, Frames, ImageScorer

log = logging.getLogger("guerdon")

Scorable: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Any"
"""A path, frames uint8 [N, H, W, C] (or float, CHW, torch), or a dict of them by camera."""


@dataclass(frozen=True, kw_only=True)
class ScoredFrames:
    """Success probabilities of N frames out of E episodes or clips."""

    prob_success: FloatArray
    """float32 [N], calibrated."""
    episode: IntArray = field(repr=False)
    """int64 [N] in 0..E-1."""
    step: IntArray = field(repr=False)
    """int64 [N], the step within the episode."""
    sources: tuple[str, ...] = field(repr=False)
    """[E], where each episode came from."""
    store: EpisodeStore | None = field(repr=False)
    """The data set with the labels; None where there are none: pictures and videos."""
    seconds: float
    """That scoring took, without reading."""
    faults: tuple[Fault, ...] = ()
    """What could not be read and was left out."""

    def labelled(self) -> LabelledScores:
        """For the metrics."""
        if self.store is None:
            raise DataError("pictures and videos have no labels to compare with: give a data set")
        return labelled_scores(self.prob_success, self.store)


def labelled_scores(
    prob_success: FloatArray, store: EpisodeStore, rows: IntArray | None = None
) -> LabelledScores:
    """Probabilities of the frames `rows` of a data set, or of all, with what is true of them."""
    rows = np.arange(store.num_frames) if rows is None else rows
    kept, local = np.unique(store.episode[rows], return_inverse=True)
    return LabelledScores(
        prob_success=prob_success.astype(np.float32),
        labels=store.labels[rows],
        episode=local.astype(np.int64),
        step=store.step[rows],
        success=store.success[kept],
    )


def predict(scorer: ImageScorer, source: Scorable) -> FloatArray:
    """Calibrated success probabilities of the frames in `source` -> float32 [N].

    Args:
        scorer: a loaded reward model (`RewardManager` is one).
        source: the path of a picture, a folder of pictures, a video or a data set; or frames
            [N, H, W, C] (one frame [H, W, C] is taken too), by camera if the model looks at several.
    """
    if isinstance(source, str | os.PathLike):
        with tempfile.TemporaryDirectory() as copy:
            return score_path(scorer, Path(source), Path(copy)).prob_success
    single = 3 if scorer.contract.num_frames == 1 else 4
    if isinstance(source, Mapping):
        arrays: Any = {
            name: _batched(value, single) if name in scorer.image_keys else value
            for name, value in source.items()
        }
    else:
        arrays = _batched(source, single)
    return scorer.score(images_from(arrays, scorer.image_keys)).prob_success


def _batched(frames: Any, single: int) -> Any:
    """One frame as a batch of one."""
    frames = frames if hasattr(frames, "ndim") else to_numpy(frames)
    return frames[None] if frames.ndim == single else frames


def score_path(scorer: ImageScorer, path: Path, copy: Path) -> ScoredFrames:
    """Score all frames at `path`: a data set in any format, a picture, a folder of pictures or a video.

    Args:
        scorer: a loaded reward model.
        path: data sets have labels, pictures and videos have none.
        copy: a folder for the copy that is made of data sets in foreign formats.
    """
    clips = _clips(scorer, path)
    if clips:
        return _score_clips(scorer, path, clips)
    store, faults = open_store(str(path), None, None, copy)
    dataset = RewardDataset(store, cameras=scorer.image_keys, num_frames=scorer.contract.num_frames)
    edges = range(0, len(dataset), MINI_BATCH)
    shown = progress(edges, "scoring", unit="batch")
    batches = (dataset.batch(np.arange(at, min(at + MINI_BATCH, len(dataset)))).frames for at in shown)
    prob, seconds = _scores(scorer, batches, path)
    if scorer.contract.only_at_rest:
        prob[~frames_at_rest(store)] = 0.0
    else:
        check_store_shows_motion(store)
    return ScoredFrames(
        prob_success=prob,
        episode=store.episode,
        step=store.step,
        sources=tuple(store.episode_column("source")),
        store=store,
        seconds=seconds,
        faults=tuple(faults),
    )


def _clips(scorer: ImageScorer, path: Path) -> list[Clip]:
    """The pictures and videos at `path`; none if it is a data set."""
    if not path.exists():
        raise DataError(f"{display_path(path)} does not exist")
    try:
        detect_format(path)
        return []
    except DataError as error:
        clips = find_clips(path, scorer.image_keys)
        if not clips:
            media = ", ".join((*PICTURE_SUFFIXES, *VIDEO_CONTAINERS))
            raise DataError(f"{error}; and for pictures and videos: {media}") from error
        return clips


def _score_clips(scorer: ImageScorer, path: Path, clips: list[Clip]) -> ScoredFrames:
    contract = scorer.contract
    if contract.only_at_rest:
        raise DataError(
            f"{display_path(path)} does not tell where the robot stands still, and the model scores only "
            "such frames (reward.model.only_at_rest): score a data set that was collected with it"
        )
    parts, sources, faults, seconds = [], [], [], 0.0
    for clip in progress(clips, "scoring", unit="clip"):
        batches = _with_history(clip.batches(contract.frame_sizes, MINI_BATCH), contract.num_frames)
        try:
            prob, spent = _scores(scorer, batches, path)
        except DataError as error:
            if len(clips) == 1:
                raise
            faults.append(Fault(path=clip.source, reason=str(error)))  # the other clips are scored
            log.warning("not used: %s", error)
            continue
        parts.append(prob)
        sources.append(clip.source)
        seconds += spent
    if not parts:
        raise DataError(f"none of {len(clips)} clips can be read: {faults[0].reason}")
    lengths = [len(part) for part in parts]
    return ScoredFrames(
        prob_success=np.concatenate(parts),
        episode=np.repeat(np.arange(len(parts)), lengths).astype(np.int64),
        step=np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        sources=tuple(sources),
        store=None,
        seconds=seconds,
        faults=tuple(faults),
    )


def _scores(scorer: ImageScorer, batches: Iterator[Frames], path: Path) -> tuple[FloatArray, float]:
    """Probabilities of the frames of all batches, and the seconds that they took."""
    parts, seconds = [], 0.0
    for frames in batches:
        began = time.perf_counter()
        parts.append(scorer.score(frames).prob_success)
        seconds += time.perf_counter() - began
    if not parts:
        raise DataError(f"{display_path(path)} has no frames to score")
    return np.concatenate(parts), max(seconds, 1e-9)


def _with_history(batches: Iterator[dict[str, UInt8Array]], num_frames: int) -> Iterator[Frames]:
    """Frames of one clip as stacks of `num_frames`; the first frame is repeated before the start."""
    if num_frames == 1:
        yield from batches
        return
    before: dict[str, UInt8Array] = {}
    done = 0
    for batch in batches:
        joined = {name: np.concatenate((before.get(name, new[:0]), new)) for name, new in batch.items()}
        count = len(next(iter(batch.values())))
        kept = len(next(iter(joined.values()))) - count
        rows = stack_rows(np.arange(kept, kept + count), np.arange(done, done + count), num_frames)
        yield {name: frames[rows] for name, frames in joined.items()}
        done += count
        before = {name: frames[-(num_frames - 1) :] for name, frames in joined.items()}
