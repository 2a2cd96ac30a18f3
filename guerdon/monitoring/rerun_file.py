"""Episodes as a Rerun recording (`.rrd`): cameras, labels, rewards and actions on one timeline.

A recording has the timelines `frame` (over all episodes), `episode` and `step`, and the entities
`camera/NAME`, `label`, `prob_success`, `learned_reward`, `env_reward`, `env_success`, `threshold`, `actions`
and `episode`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from guerdon.core.atomic import make_directory, storage_errors, write_atomic
from guerdon.core.errors import ConfigError, DataError, StorageError
from guerdon.core.types import UInt8Array, display_path
from guerdon.data.files.bounds import one_line
from guerdon.monitoring.views import VALUES, ViewedEpisode

log = logging.getLogger("guerdon")

CHUNK_FRAMES = 64
"""Pictures that are held at a time."""
MAX_LOSSLESS_PIXELS = 256 * 256
"""Larger pictures are stored as JPEG, smaller ones as PNG, exactly."""
JPEG_QUALITY = 95


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a recording holds."""

    path: Path
    num_episodes: int
    num_frames: int


def require_rerun() -> Any:
    """The package `rerun`; an error that says how to install it where it is missing."""
    try:
        import rerun
    except ImportError as error:
        raise ConfigError("a Rerun recording needs rerun-sdk: pip install 'guerdon[rerun]'") from error
    return rerun


def write_recording(path: Path, episodes: Iterable[ViewedEpisode], title: str) -> Recorded:
    """Write episodes one after another to an `.rrd` file, replacing an older one.

    Args:
        path: of the file; missing folders are made.
        episodes: read one at a time, and only a few of their pictures at once.
        title: the name of the recording in Rerun's viewer.
    """
    rerun = require_rerun()
    make_directory(path.parent)
    with storage_errors(path), tempfile.TemporaryDirectory(prefix=".view-", dir=path.parent) as folder:
        # Rerun writes from a thread of its own and takes a path, so that the file gets its name afterwards.
        file = Path(folder) / "recording.rrd"
        recording = rerun.RecordingStream("guerdon", send_properties=True)
        recording.save(file)
        try:
            recording.send_recording_name(title)
            num_episodes, num_frames = _log_all(rerun, recording, episodes)
            recording.flush()
        except RuntimeError as error:  # what its writer ran into
            raise StorageError(f"cannot write {display_path(path)}: {one_line(error)}") from error
        finally:
            recording.disconnect()
        with file.open("rb") as source:
            write_atomic(path, lambda target: shutil.copyfileobj(source, target))
    return Recorded(path=path, num_episodes=num_episodes, num_frames=num_frames)


def _log_all(rerun: Any, recording: Any, episodes: Iterable[ViewedEpisode]) -> tuple[int, int]:
    """Log all episodes; returns how many episodes and frames there were."""
    start = number = 0
    for number, episode in enumerate(episodes, start=1):
        if number == 1:
            recording.send_blueprint(_layout(rerun, episode))
        steps = _log_pictures(rerun, recording, episode, number - 1, start)
        index = _index(rerun, number - 1, start, 0, steps)
        for name, values in _curves(episode, steps).items():
            columns = rerun.Scalars.columns(scalars=values.astype(np.float64))
            recording.send_columns(name, indexes=index, columns=columns)
        recording.send_columns(
            "episode",
            indexes=_index(rerun, number - 1, start, 0, 1),
            columns=rerun.TextLog.columns(text=[f"{episode.name}: {episode.about}"]),
        )
        start += steps
    return number, start


def _curves(episode: ViewedEpisode, steps: int) -> dict[str, Any]:
    """Entity -> numbers [T] or [T, A]."""
    curves: dict[str, Any] = dict(episode.values)
    if episode.threshold is not None:
        curves["threshold"] = np.full(steps, episode.threshold)
    if episode.actions is not None and episode.actions.shape[1]:
        curves["actions"] = episode.actions
    for name, values in curves.items():
        if len(values) != steps:
            raise DataError(f"{episode.name} has {steps} frames and {len(values)} values of {name}")
    return curves


def _log_pictures(rerun: Any, recording: Any, episode: ViewedEpisode, number: int, start: int) -> int:
    """Log the frames of all cameras; returns the number of steps."""
    counts = {}
    for camera, frames in episode.frames.items():
        count = 0
        for pictures in _chunks(frames):
            blobs, kinds = zip(*map(_encoded, pictures), strict=True)
            recording.send_columns(
                _entity(rerun, camera),
                indexes=_index(rerun, number, start, count, len(pictures)),
                columns=rerun.EncodedImage.columns(blob=blobs, media_type=kinds),
            )
            count += len(pictures)
        counts[camera] = count
    if len(set(counts.values())) != 1:
        raise DataError(f"{episode.name}: the cameras have different numbers of frames: {counts}")
    return next(iter(counts.values()))


def _chunks(frames: Iterable[UInt8Array]) -> Iterator[list[UInt8Array]]:
    source = iter(frames)
    while some := list(islice(source, CHUNK_FRAMES)):
        yield some


def _encoded(frame: UInt8Array) -> tuple[UInt8Array, str]:
    """A frame, uint8 [H, W, C], as the content of a picture file (uint8 [B]), and its kind."""
    image = Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else np.ascontiguousarray(frame))
    file = BytesIO()
    if frame.shape[0] * frame.shape[1] > MAX_LOSSLESS_PIXELS:
        image.save(file, format="JPEG", quality=JPEG_QUALITY, subsampling=0)
        return np.frombuffer(file.getvalue(), np.uint8), "image/jpeg"
    image.save(file, format="PNG", compress_level=1)
    return np.frombuffer(file.getvalue(), np.uint8), "image/png"


def _index(rerun: Any, number: int, start: int, first: int, count: int) -> list[Any]:
    """Times of `count` steps of an episode from `first` on; the episode begins at frame `start`."""
    steps = np.arange(first, first + count)
    return [
        rerun.TimeColumn("frame", sequence=start + steps),
        rerun.TimeColumn("episode", sequence=np.full(count, number)),
        rerun.TimeColumn("step", sequence=steps),
    ]


def _entity(rerun: Any, camera: str) -> str:
    """The path of a camera, whose name may hold any characters."""
    return f"camera/{rerun.escape_entity_path_part(camera)}"


def _layout(rerun: Any, episode: ViewedEpisode) -> Any:
    """Cameras above, curves below: scores, rewards and actions in a plot each."""
    import rerun.blueprint as blueprint

    cameras = [
        blueprint.Spatial2DView(origin=_entity(rerun, camera), name=camera) for camera in episode.frames
    ]
    plots: Mapping[str, tuple[str, ...]] = {
        "success": ("label", "prob_success", "threshold", "env_success"),
        "reward": ("env_reward", "learned_reward"),
        "actions": ("actions",),
    }
    there = {*episode.values, *(() if episode.actions is None else ("actions",))} & {*VALUES, "actions"}
    curves = [
        blueprint.TimeSeriesView(name=name, contents=[f"/{each}" for each in entities])
        for name, entities in plots.items()
        if there & set(entities)
    ]
    return blueprint.Blueprint(
        blueprint.Vertical(blueprint.Horizontal(*cameras), *curves, row_shares=[2, *(1 for _ in curves)]),
        blueprint.TimePanel(timeline="frame"),
    )
