"""Audit a data set before a model learns from it: labels, balance, duplicates, cameras, NaN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from guerdon.core.progress import progress
from guerdon.core.types import BoolArray, Episode, Fault, FloatArray, UInt8Array
from guerdon.data.datasets.probe import CHANCE, blind_camera_message, probe, probe_steps, small_pictures
from guerdon.data.datasets.split import episode_cells, grey_cells, groups, near_duplicates
from guerdon.data.formats import Format, find_format
from guerdon.data.store.shard import content_hash, episode_digest
from guerdon.data.summary import inspect, usable

MIN_POSITIVE_SHARE = 0.02
"""Below this share of positive frames a warning says that the classes are far out of balance."""
FROZEN_FRAMES = 10
"""From this many identical frames in a row on, while the robot moves, a camera counts as frozen."""
JUMP, STILL = 2.0, 0.5
"""The last frame counts as a jump if it differs this many times more than the largest step before it; changes
below `STILL` grey levels are no movement."""
EXAMPLES = 5

Level = Literal["error", "warning", "info"]
LEVELS: dict[str, Level] = {"error": "error", "warning": "warning", "info": "info"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that the audit noticed."""

    level: Level
    check: str
    message: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """All findings, worst first."""

    path: str
    findings: tuple[Finding, ...]
    num_episodes: int
    num_duplicate_pairs: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings allow it."""
        return all(finding.level != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return {**asdict(self), "ok": self.ok}


@dataclass
class _Notes:
    """What one pass over all episodes gathers."""

    names: list[str] = field(default_factory=list)
    success: list[bool] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    cells: list[FloatArray] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    pictures: dict[str, list[FloatArray]] = field(default_factory=dict)
    labels: list[BoolArray] = field(default_factory=list)
    objections: dict[tuple[Level, str, str], list[str]] = field(default_factory=dict)
    """(level, check, message) -> names of the episodes that it holds for."""
    frames: int = 0
    positive: int = 0

    def object(self, level: Level, check: str, message: str, name: str) -> None:
        self.objections.setdefault((level, check, message), []).append(name)


def _found(level: Level, check: str, message: str, examples: Iterable[str] = ()) -> Finding:
    return Finding(level=level, check=check, message=message, examples=tuple(islice(examples, EXAMPLES)))


def audit(path: Path | str, format: str | Format | None = None) -> AuditReport:
    """Read the data set at `path` once and report what a trainer should know about it."""
    path = Path(path)
    kind = find_format(path, format)
    summary = inspect(path, kind)
    faults: list[Fault] = []
    notes = _Notes()
    episodes = usable(kind.read(path), summary.cameras, faults)
    for number, episode in enumerate(
        progress(episodes, "auditing", total=summary.num_episodes, unit="episode")
    ):
        _look(notes, episode, f"episode {number} ({episode.source or 'no source'})")
    findings = [_found("error", "unreadable", f"{fault.path}: {fault.reason}") for fault in faults]
    for known_level, check, message in kind.findings(path):
        findings.append(_found(LEVELS[known_level], check, message))
    for (level, check, message), names in notes.objections.items():
        findings.append(_found(level, check, f"{len(names)} episode(s): {message}", names))
    findings += _balance(notes)
    findings += _cameras(notes)
    pairs = near_duplicates(notes.cells)
    findings += _duplicates(notes, pairs)
    known = summary.content_hash
    if known is not None and not faults and content_hash(notes.digests) != known:
        findings.append(_found("error", "hash", "the frames have changed since the store was written"))
    order = {"error": 0, "warning": 1, "info": 2}
    return AuditReport(
        path=str(path),
        findings=tuple(sorted(findings, key=lambda finding: order[finding.level])),
        num_episodes=len(notes.names),
        num_duplicate_pairs=len(pairs),
    )


def _look(notes: _Notes, episode: Episode, name: str) -> None:
    """All checks that need one episode only."""
    camera = next(iter(episode.frames))
    notes.names.append(name)
    notes.success.append(episode.success)
    notes.splits.append(episode.split)
    notes.cells.append(episode_cells(episode.frames[camera]))
    notes.digests.append(episode_digest(episode))
    notes.frames += episode.num_frames
    notes.positive += episode.num_positive_frames
    steps = probe_steps(episode.labels)
    notes.labels.append(episode.labels[steps] >= 0.5)
    for key, frames in episode.frames.items():
        notes.pictures.setdefault(key, []).append(small_pictures(frames[steps]))
    _check_labels(notes, episode, name)
    _check_cameras(notes, episode, name)
    for what in ("actions", "states", "initial_state", "env_rewards"):
        values = getattr(episode, what)
        if values is not None and not bool(np.isfinite(values).all()):
            notes.object("error", "nan", f"{what} hold NaN or infinite values", name)


def _check_labels(notes: _Notes, episode: Episode, name: str) -> None:
    if episode.success and episode.num_positive_frames == 0 and episode.complete:
        notes.object("error", "labels", "counted as success, but no frame is labelled so", name)
    if not episode.success and episode.num_positive_frames:
        notes.object("error", "labels", "counted as failure, but some frames are labelled as success", name)
    if bool(((episode.labels > 0) & (episode.labels < 1)).any()):
        notes.object("info", "labels", "soft labels between 0 and 1", name)
    camera, frames = next(iter(episode.frames.items()))
    if episode.num_frames < 6:
        return
    change = np.abs(np.diff(grey_cells(frames), axis=0)).mean(axis=(1, 2))
    if change[-1] > JUMP * max(float(change[1:-1].max()), STILL):
        notes.object(
            "error",
            "alignment",
            f"the last frame of {camera!r} jumps away from all before it: it seems to show the next episode "
            "(a frame taken after auto-reset), so its label belongs to another picture",
            name,
        )


def _check_cameras(notes: _Notes, episode: Episode, name: str) -> None:
    for camera, frames in episode.frames.items():
        flat, channels = frames.reshape(len(frames), -1), frames.shape[-1]
        dead = (flat[:, channels:] == flat[:, :-channels]).all(axis=1)  # each pixel is as the one before it
        if dead.all():
            black = "black" if not flat.any() else "one colour"
            notes.object("error", "camera", f"camera {camera!r} shows nothing: every frame is {black}", name)
        elif dead.any():
            notes.object("warning", "camera", f"camera {camera!r} has frames of one colour", name)
        elif len(frames) > FROZEN_FRAMES and _is_frozen(episode, flat):
            notes.object("warning", "camera", f"camera {camera!r} is frozen while the robot moves", name)


def _is_frozen(episode: Episode, flat: UInt8Array) -> bool:
    """Whether a run of identical frames goes with actions that are not zero."""
    if episode.actions is None:
        return False
    same = (flat[1:] == flat[:-1]).all(axis=1) & (np.abs(episode.actions[1:, :3]).max(axis=1) > 0.05)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same, [0]])))
    runs = edges[1::2] - edges[::2]
    return bool(runs.max(initial=0) >= FROZEN_FRAMES)


def _balance(notes: _Notes) -> list[Finding]:
    if not notes.names:
        return [_found("error", "balance", "there is no usable episode")]
    good = sum(notes.success)
    bad = len(notes.success) - good
    share = notes.positive / notes.frames
    text = f"{good} success and {bad} failure episodes, {share:.1%} of {notes.frames} frames positive"
    if good == 0 or notes.positive == 0:
        return [_found("error", "balance", f"nothing to learn success from: {text}")]
    if bad == 0 and notes.positive == notes.frames:
        return [_found("error", "balance", f"nothing to learn failure from: {text}")]
    level: Level = "warning" if share < MIN_POSITIVE_SHARE or share > 1 - MIN_POSITIVE_SHARE else "info"
    return [_found(level, "balance", text)]


def _cameras(notes: _Notes) -> list[Finding]:
    """Cameras that do not show success: an error if none does, and a note where it cannot be known."""
    views = {camera: probe(pictures, notes.labels) for camera, pictures in notes.pictures.items()}
    blind = [camera for camera, view in views.items() if view is not None and view.blind]
    level: Level = "error" if len(blind) == len(views) else "warning"
    found = [_found(level, "view", blind_camera_message(camera)) for camera in blind]
    for camera, view in views.items():
        if view is not None and view.auc is not None and view.auc <= CHANCE:
            message = (
                f"a quick classifier cannot tell success by camera {camera!r} (AUC {view.auc:.2f}, held-out "
                "episodes): a hard view, or one that does not show the goal; the AUC of a fit will tell"
            )
            found.append(_found("info", "view", message))
    return found


def _duplicates(notes: _Notes, pairs: list[tuple[int, int]]) -> list[Finding]:
    if not pairs:
        return []
    sets = len(set(groups(len(notes.names), pairs)[[a for a, _ in pairs]].tolist()))
    together = f"{len(pairs)} pairs of near-duplicates in {sets} groups; splits keep them together"
    names = (f"{notes.names[a]} ~ {notes.names[b]}" for a, b in pairs)
    findings = [_found("info", "duplicates", together, names)]
    across = [(a, b) for a, b in pairs if notes.splits[a] != notes.splits[b]]
    if across:
        apart = f"{len(across)} pairs of near-duplicates lie in different declared splits"
        names = (f"{notes.names[a]} ~ {notes.names[b]}" for a, b in across)
        findings.append(_found("error", "duplicates", apart, names))
    return findings
