"""From a robot's recording to data for a reward model: cleaned, labelled, split by episode, audited.

A single frame at the target pose does not prove success: an arm on its way past the target is there for a
moment. Frames at the target count only if the pose was held, or if the operator called it a success. If the
operator calls an episode a failure, no frame of it shows success, wherever the arm was.

Frames are left out, never changed, and each is counted under the first reason that applies to it. What is
left is for reward models; demonstrations for a policy are read from the recording itself, in which no step is
missing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.core import strict_json
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, Episode, Fault, FloatArray, UInt8Array, display_path
from guerdon.data.collect.recorder import STEP_FIELDS
from guerdon.data.datasets.audit import AuditReport, audit
from guerdon.data.datasets.split import episode_cells, groups, near_duplicates, split_episodes
from guerdon.data.formats.realworld_pkl import RecordedEpisode, read_recorded
from guerdon.data.summary import write_all

SUCCESS_KEY, FAILURE_KEY = "c", "a"
"""The keys that robot operators are used to."""
STILL_ACTION = 1e-5
"""An action whose absolute values add up to less moves nothing."""
MAX_AGE = 0.25
"""Seconds; an older picture shows what was before the action."""
MIN_SHARPNESS = 0.25
"""Below this share of its camera's median sharpness a picture is blurred."""
MIN_VAL_EPISODES = 2
"""A fit wants so many at least; of a small recording a larger share is taken for them."""
REASONS = ("doubtful", "stale", "duplicate", "blurred", "before_motion", "still")
"""Why frames are left out, in the order of the checks."""


@dataclass(frozen=True, kw_only=True)
class HoldLabels:
    """The labels of one episode of T frames."""

    labels: FloatArray
    """float32 [T]; 1 where the frame shows success."""
    doubtful: BoolArray
    """bool [T]; at the target, but not for long enough to tell: of no use to a reward model."""

    @property
    def success(self) -> bool:
        """Whether the episode is one."""
        return bool(self.labels.any())


def label_by_hold(at_target: BoolArray, hold_steps: int, key: str = "") -> HoldLabels:
    """Labels of an episode's frames.

    Args:
        at_target: bool [T]; whether the arm was at the target pose.
        hold_steps: frames in a row at the target that make a success.
        key: what the operator ended the episode with: `c`, `a`, or nothing.
    """
    count = len(at_target)
    labels, doubtful = np.zeros(count, np.float32), np.zeros(count, np.bool_)
    if key == FAILURE_KEY:
        return HoldLabels(labels=labels, doubtful=doubtful)
    for start, stop in _stretches(at_target):
        held = stop - start >= hold_steps or (key == SUCCESS_KEY and stop == count)
        (labels if held else doubtful)[start:stop] = 1
    if key == SUCCESS_KEY:
        labels[-1] = 1.0  # what the operator saw when the key was pressed
    return HoldLabels(labels=labels, doubtful=doubtful)


def _stretches(flags: BoolArray) -> list[tuple[int, int]]:
    """(start, stop) of each run of true values."""
    edges = np.diff(np.concatenate(([0], flags.astype(np.int8), [0])))
    return list(zip(np.flatnonzero(edges > 0).tolist(), np.flatnonzero(edges < 0).tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """What became of a recording."""

    path: str
    """Where the processed data is."""
    num_episodes: int
    num_frames: int
    num_positive_frames: int
    left_out: Mapping[str, int]
    """Reason -> frames."""
    splits: Mapping[str, int]
    """Split -> episodes."""
    faults: tuple[Fault, ...]
    audit: AuditReport

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return {**dataclasses.asdict(self), "audit": self.audit.to_dict()}


def process(
    path: Path,
    target: Path,
    to: str = "native",
    *,
    keep_stationary: bool = False,
    hold_steps: int | None = None,
    val_fraction: float = 0.2,
    seed: int = 0,
) -> ProcessReport:
    """Clean the `data.pkl` at `path` into `target`, which must not hold anything yet.

    Args:
        path: the file, or the directory that it is in.
        target: where the data goes.
        to: the format to write.
        keep_stationary: keep frames in which the robot was not moved.
        hold_steps: frames in a row at the target that make a success; None: as the recording says, and every
            rewarded frame where it says nothing.
        val_fraction: share of the episodes to validate with.
        seed: decides which.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(
            f"{display_path(target)} is there already: move it away, or name another place (--out)"
        )
    recorded, faults = _read(path)
    labelled = [_labels(item, hold_steps) for item in recorded]
    if not any(labels.success for labels in labelled):
        raise DataError(
            f"{display_path(path)} has {len(recorded)} episodes and no success among them: a reward model "
            "cannot learn from failures alone. Was the target pose reached and held, or the key `c` pressed?"
        )
    usual = _usual_sharpness([item.episode for item in recorded])
    left_out: Counter[str] = Counter()
    episodes = []
    for item, labels in zip(recorded, labelled, strict=True):
        reasons = _reasons(item, labels, usual, keep_stationary)
        keep = np.array([reason == "" for reason in reasons])
        left_out.update(reason for reason in reasons if reason)
        if not keep.any():
            source = item.episode.source
            faults.append(Fault(path=source, reason="no frame of the episode is of use"))
            continue
        whole = dataclasses.replace(item.episode, labels=labels.labels, success=labels.success)
        episodes.append(select(whole, keep))
    episodes = _split(episodes, val_fraction, seed)
    written, more = write_all(episodes, target, to, total=len(episodes))
    report = ProcessReport(
        path=str(target),
        num_episodes=written,
        num_frames=sum(episode.num_frames for episode in episodes),
        num_positive_frames=sum(episode.num_positive_frames for episode in episodes),
        left_out={reason: left_out[reason] for reason in REASONS},
        splits=dict(Counter(episode.split or "none" for episode in episodes)),
        faults=(*faults, *more),
        audit=audit(target, to),
    )
    text = strict_json.dumps(report.to_dict(), indent=1).encode()
    write_atomic(target.with_name(f"{target.name}_report.json"), lambda file: file.write(text))
    return report


def _read(path: Path) -> tuple[list[RecordedEpisode], list[Fault]]:
    found = list(read_recorded(path))
    recorded = [item for item in found if isinstance(item, RecordedEpisode)]
    faults = [item for item in found if isinstance(item, Fault)]
    if not recorded:
        first = f": {faults[0].reason}" if faults else ""
        raise DataError(f"{display_path(path)} has no usable episode{first}")
    return recorded, faults


def _labels(item: RecordedEpisode, hold_steps: int | None) -> HoldLabels:
    """By hold and key; in a recording that tells neither, rewards are the labels."""
    wanted = hold_steps if hold_steps is not None else item.hold_steps
    if wanted is None and not item.key:
        return HoldLabels(labels=item.episode.labels, doubtful=np.zeros(item.episode.num_frames, np.bool_))
    return label_by_hold(item.at_target, wanted or 1, item.key)


def _reasons(
    item: RecordedEpisode, labels: HoldLabels, usual: Mapping[str, float], keep_stationary: bool
) -> list[str]:
    """Why each frame is left out; empty where it is kept."""
    episode, count = item.episode, item.episode.num_frames
    success = labels.labels >= 0.5
    stale = np.zeros(count, np.bool_)
    for ages in item.frame_age.values():
        stale |= ages > MAX_AGE
    repeated, blurred = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for camera, frames in episode.frames.items():
        repeated[1:] |= (frames[1:] == frames[:-1]).reshape(count - 1, -1).all(axis=1)
        blurred |= sharpness(frames) < MIN_SHARPNESS * usual[camera]
    if not item.frame_age:  # a renderer without noise repeats itself while success is held; a camera does not
        repeated &= ~success
    still = np.zeros(count, np.bool_)
    if episode.actions is not None and not keep_stationary:
        still = (np.abs(episode.actions).sum(axis=1) < STILL_ACTION) & ~success
        still[-1] = False
    before = still & (np.cumsum(~still) == 0)
    flags = dict(zip(REASONS, (labels.doubtful, stale, repeated, blurred, before, still), strict=True))
    return [next((name for name in REASONS if flags[name][step]), "") for step in range(count)]


def sharpness(frames: UInt8Array) -> FloatArray:
    """Variance of the Laplacian of uint8 [N, H, W, C] -> float32 [N]; small where edges are washed out."""
    grey = frames.astype(np.float32).mean(axis=-1)
    if min(grey.shape[1:]) < 3:
        return np.full(len(grey), np.inf, np.float32)
    inner = grey[:, 1:-1, 1:-1]
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    values: FloatArray = (around - 4.0 * inner).reshape(len(grey), -1).var(axis=1)
    return values


def _usual_sharpness(episodes: Sequence[Episode]) -> dict[str, float]:
    """Camera -> the median over all frames."""
    cameras: dict[str, list[FloatArray]] = {}
    for episode in episodes:
        for camera, frames in episode.frames.items():
            cameras.setdefault(camera, []).append(sharpness(frames))
    medians = {camera: float(np.median(np.concatenate(values))) for camera, values in cameras.items()}
    return {camera: value if np.isfinite(value) else 0.0 for camera, value in medians.items()}


def select(episode: Episode, keep: BoolArray) -> Episode:
    """The steps of an episode where `keep` is true."""
    if keep.all():
        return episode
    values = {name: getattr(episode, name) for name in STEP_FIELDS}
    kept: dict[str, Any] = {name: None if value is None else value[keep] for name, value in values.items()}
    first = int(np.argmax(keep))
    before = episode.initial_state if first == 0 else None
    if first > 0 and episode.states is not None:
        before = episode.states[first - 1]
    frames = {camera: images[keep] for camera, images in episode.frames.items()}
    return dataclasses.replace(episode, frames=frames, initial_state=before, **kept)


def _split(episodes: Sequence[Episode], val_fraction: float, seed: int) -> list[Episode]:
    """Whole episodes to train and to validate with; those that resemble each other stay together.

    None is declared where there are too few for both sides: fitting then says what it lacks.
    """
    if sum(episode.success and episode.complete for episode in episodes) < 2:
        return list(episodes)
    whole = [number for number, episode in enumerate(episodes) if episode.complete]
    cells = [episode_cells(next(iter(episodes[number].frames.values()))) for number in whole]
    group = groups(len(whole), near_duplicates(cells))
    success = np.array([episodes[number].success for number in whole])
    for share in (val_fraction, *(more for more in (0.3, 0.4, 0.5) if more > val_fraction)):
        fractions = {"train": 1.0 - share, "val": share}
        parts = split_episodes(success, group, fractions=fractions, seed=seed)
        both = all(success[numbers].any() for numbers in parts.values())
        if both and len(parts["val"]) >= MIN_VAL_EPISODES:
            break
    else:  # so few episodes, or such as all look alike
        return list(episodes)
    chosen = {whole[place] for place in parts["val"].tolist()}
    return [
        dataclasses.replace(episode, split="val" if number in chosen else "train")
        for number, episode in enumerate(episodes)
    ]
