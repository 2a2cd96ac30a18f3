"""What `meta/` of a LeRobot data set tells: features, episodes, and in which files they lie.

Two layouts are read. v3.0 has many episodes in a parquet file and in a video; `meta/episodes/*/*.parquet`
tells which. v2.x has files for each episode, whose names follow from its number.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa

from guerdon.core.errors import DataError
from guerdon.core.types import SPLITS, Fault, Split, display_path, printable
from guerdon.data.files.bounds import one_line, parse_json, read_json, read_small
from guerdon.data.formats.base import to_fault
from guerdon.data.formats.lerobot.tables import is_numbers, is_text, read_rows

INFO = "meta/info.json"
VERSION = "v3.0"
OWN = "guerdon"
"""Key in `info.json`, and prefix of columns, of what Guerdon adds to a data set that it writes."""
CAMERA_PREFIXES = ("observation.images.", "observation.")
MAX_EPISODES = 200_000
_MAX_FEATURES = 1000
_MAX_SIDE = 1 << 14
_MAX_WIDTH = 1 << 16
_MAX_LINES = 256 << 20
_PLACE = re.compile(r"\{([a-z_]+)(?::0?(\d)d)?\}")
_PLACED = ("episode_index", "length", "data/chunk_index", "data/file_index")
_IN_VIDEO = ("chunk_index", "file_index", "from_timestamp")
OWN_TYPES = {
    "success": pa.bool_(),
    "complete": pa.bool_(),
    "seed": pa.int64(),
    "source": pa.string(),
    "split": pa.string(),
    "initial_state": pa.list_(pa.float32()),
    "initial_action": pa.list_(pa.float32()),
}
"""Columns `guerdon/NAME` of `meta/episodes`."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column of the data, or a camera."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    channels_first: bool = False
    """Of a camera: whether `shape` is [C, H, W], as `names` tells."""

    @property
    def is_camera(self) -> bool:
        """Whether it is a picture in each row."""
        return self.dtype in ("image", "video")

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return math.prod(self.shape)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of a camera."""
        first, second, third = self.shape
        return (second, third, first) if self.channels_first else (first, second, third)


@dataclass(frozen=True, kw_only=True)
class VideoPlace:
    """Where an episode lies in a video."""

    path: Path
    from_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EpisodePlace:
    """Where an episode lies."""

    index: int
    length: int
    data: Path
    videos: Mapping[str, VideoPlace]
    """By feature."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What Guerdon noted of an episode that it wrote."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """A data set without its rows."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Feature]
    episodes: tuple[EpisodePlace, ...]
    faults: tuple[Fault, ...]
    splits: Mapping[Split, range]
    own: Mapping[str, Any]
    """`guerdon` in `info.json`; empty if others wrote the data set."""

    @property
    def cameras(self) -> dict[str, Feature]:
        """Name of the camera -> feature; depth maps are left out."""
        named: dict[str, Feature] = {}
        for name, each in self.features.items():
            if each.is_camera:
                named[name if camera_of(name) in named else camera_of(name)] = each
        return named

    def source(self, place: EpisodePlace) -> str:
        """Where an episode lies; the same from every working directory."""
        return f"{printable(str(self.root.resolve()))}:episode_{place.index:06d}"

    def split_of(self, index: int) -> Split:
        """The split that is declared for an episode, where there are several."""
        named = [name for name, numbers in self.splits.items() if index in numbers]
        return named[0] if len(self.splits) > 1 and named else ""


def camera_of(feature: str) -> str:
    """`observation.images.front` -> `front`."""
    for prefix in CAMERA_PREFIXES:
        if feature.startswith(prefix) and len(feature) > len(prefix):
            return feature.removeprefix(prefix).replace("%2F", "/").replace("%25", "%")
    return feature


def is_lerobot(root: Path) -> bool:
    """Whether there is an `info.json` of LeRobot, of whatever version."""
    try:
        info = read_json(root / INFO)
    except (OSError, DataError):
        return False
    return isinstance(info, dict) and {"codebase_version", "features"} <= set(info)


def read_info(root: Path) -> dict[str, Any]:
    """`meta/info.json`."""
    path = root / INFO
    try:
        info = read_json(path)
    except FileNotFoundError:
        raise DataError(f"{display_path(path)} does not exist: this is no LeRobot data set") from None
    if not isinstance(info, dict):
        raise DataError(f"{display_path(path)}: holds no dict")
    return info


def read_meta(root: Path) -> Meta:
    """The data set at `root`; raises if `info.json` cannot be used, other faults are noted."""
    info = read_info(root)
    shown = display_path(root / INFO)
    try:
        version = info.get("codebase_version")
        if not isinstance(version, str) or not re.fullmatch(r"v(2\.[01]|3\.\d)", version):
            raise DataError(f"is of LeRobot's version {one_line(version, 40)}; v2.0, v2.1 and v3.x are read")
        features = _features(info.get("features"))
        fps = _number(info.get("fps"), "fps")
        places, faults = _episodes(root, info, features, is_v3=version.startswith("v3"))
    except DataError as error:
        raise DataError(f"{shown}: {str(error).removeprefix(f'{shown}: ')}") from error
    own = info.get(OWN)
    return Meta(
        root=root,
        version=version,
        fps=fps,
        features=features,
        episodes=tuple(sorted(places, key=lambda place: place.index)),
        faults=tuple(faults),
        splits=_splits(info.get("splits")),
        own=own if isinstance(own, dict) else {},
    )


def _features(given: Any) -> dict[str, Feature]:
    if not isinstance(given, dict) or not 0 < len(given) <= _MAX_FEATURES:
        raise DataError("has no features")
    features = {}
    for name, about in given.items():
        if not isinstance(about, dict) or not isinstance(about.get("dtype"), str) or len(name) > 200:
            raise DataError(f"the feature {one_line(name, 40)!r} has no dtype")
        details = about.get("info") or about.get("video_info") or {}
        is_depth = isinstance(details, dict) and any(
            details.get(key) for key in ("is_depth_map", "video.is_depth_map")
        )
        if is_depth:
            continue
        features[name] = _feature(name, about)
    return features


def _feature(name: str, about: Mapping[str, Any]) -> Feature:
    dtype, shape, names = about["dtype"], about.get("shape", [1]), about.get("names")
    is_camera = dtype in ("image", "video")
    most = _MAX_SIDE if is_camera else _MAX_WIDTH
    sound = isinstance(shape, list) and all(type(size) is int and 0 < size <= most for size in shape)
    if dtype not in ("string", "language") and (not sound or math.prod(shape) > 1 << 28):
        raise DataError(f"the feature {one_line(name, 40)!r} has the shape {one_line(shape, 60)}")
    if not is_camera:
        return Feature(name=name, dtype=dtype, shape=tuple(shape) if sound else (1,))
    if "/" in name or name in (".", "..") or len(shape) != 3:
        raise DataError(f"the camera {one_line(name, 40)!r} has the shape {one_line(shape, 60)}")
    first = names[0] if isinstance(names, list) and len(names) == 3 else None
    if isinstance(first, str):
        channels_first = first.startswith("channel") or first.lower() == "c"
    else:
        channels_first = shape[0] in (1, 3) and shape[2] not in (1, 3)
    feature = Feature(name=name, dtype=dtype, shape=tuple(shape), channels_first=channels_first)
    if feature.image_shape[2] not in (1, 3):
        raise DataError(f"the camera {one_line(name, 40)!r} has the shape {shape} and the names {names}")
    return feature


def _episodes(
    root: Path, info: Mapping[str, Any], features: Mapping[str, Feature], *, is_v3: bool
) -> tuple[list[EpisodePlace], list[Fault]]:
    """The episodes that can be found, and the files and lines that cannot be used."""
    rows: dict[int, tuple[Path, dict[str, Any]]] = {}
    faults: list[Fault] = []
    found = _v3_rows(root, features, faults) if is_v3 else _v2_rows(root, faults)
    for path, row in found:
        index = row.get("episode_index")
        if not _is_count(index) or index in rows:
            faults.append(to_fault(path, DataError(f"names the episode {one_line(index, 40)}"), "a row"))
        elif len(rows) >= MAX_EPISODES:
            raise DataError(f"has more than {MAX_EPISODES} episodes")
        else:
            rows[index] = path, row
    places = []
    for index, (path, row) in rows.items():
        try:
            places.append(_place(root, info, features, row, is_v3=is_v3))
        except DataError as error:
            faults.append(to_fault(path, error, f"episode {index}"))
    total = info.get("total_episodes")
    if _is_count(total) and total > len(rows):
        missing = total - len(rows)
        reason = f"tells of {total} episodes; {missing} are in no readable file of meta/"
        faults.append(to_fault(root / INFO, DataError(reason)))
    return places, faults


def _v3_rows(
    root: Path, features: Mapping[str, Feature], faults: list[Fault]
) -> list[tuple[Path, dict[str, Any]]]:
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    numbers = {*_PLACED, *(f"videos/{name}/{key}" for name in videos for key in _IN_VIDEO)}

    def is_needed(field: pa.Field) -> bool:
        if field.name in numbers:
            return is_numbers(field.type)
        prefix, _, name = field.name.partition("/")
        kind = OWN_TYPES.get(name) if prefix == OWN else None
        return kind is not None and (is_text if is_text(kind) else is_numbers)(field.type)

    rows: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        try:
            rows += [(path, row) for row in read_rows(path, is_needed, MAX_EPISODES - len(rows))]
        except Exception as error:  # hostile bytes can fail in any way
            faults.append(to_fault(path, error))
    return rows


def _v2_rows(root: Path, faults: list[Fault]) -> list[tuple[Path, dict[str, Any]]]:
    path = root / "meta" / "episodes.jsonl"
    rows: list[tuple[Path, dict[str, Any]]] = []
    try:
        lines = io.BytesIO(read_small(path, _MAX_LINES))
    except FileNotFoundError:
        raise DataError(f"{display_path(path)} does not exist") from None
    for number, line in enumerate(lines, start=1):
        if number > MAX_EPISODES:
            raise DataError(f"{display_path(path)}: has more than {MAX_EPISODES} lines")
        if not line.strip():
            continue
        try:
            row = parse_json(line, "it")
            if not isinstance(row, dict):
                raise DataError("it is no dict")
            rows.append((path, {name: row.get(name) for name in ("episode_index", "length")}))
        except DataError as error:
            faults.append(to_fault(path, error, f"line {number}"))
    return rows


def _place(
    root: Path,
    info: Mapping[str, Any],
    features: Mapping[str, Feature],
    row: Mapping[str, Any],
    *,
    is_v3: bool,
) -> EpisodePlace:
    if not is_v3:
        size = info.get("chunks_size", 1000)
        if not _is_count(size) or not size:
            raise DataError(f"has the chunks_size {one_line(size, 40)}")
        row = {**row, "data/chunk_index": row["episode_index"] // size, "data/file_index": 0}
    missing = [name for name in _PLACED if not _is_count(row.get(name))]
    if missing or not row["length"]:
        raise DataError(f"has no {missing[0] if missing else 'length'}")
    index, chunk, file = row["episode_index"], row["data/chunk_index"], row["data/file_index"]
    numbers = {"chunk_index": chunk, "file_index": file, "episode_chunk": chunk, "episode_index": index}
    videos: dict[str, VideoPlace] = {}
    for name, feature in features.items():
        if feature.dtype != "video":
            continue
        start = 0.0
        if is_v3:
            at = {key: row.get(f"videos/{name}/{key}") for key in ("chunk_index", "file_index")}
            start = row.get(f"videos/{name}/from_timestamp")  # type: ignore[assignment]
            if not all(map(_is_count, at.values())) or not _is_seconds(start):
                raise DataError(f"tells no place in the videos of {name!r}")
            numbers |= at
        path = _filled(root, info.get("video_path"), "video_path", {**numbers, "video_key": name})
        videos[name] = VideoPlace(path=path, from_seconds=float(start))
    numbers |= {"chunk_index": chunk, "file_index": file}
    own = {key.removeprefix(f"{OWN}/"): value for key, value in row.items() if key.startswith(f"{OWN}/")}
    data = _filled(root, info.get("data_path"), "data_path", numbers)
    return EpisodePlace(index=index, length=row["length"], data=data, videos=videos, own=own)


def _filled(root: Path, template: Any, name: str, numbers: Mapping[str, Any]) -> Path:
    """The path that a template of `info.json` stands for; it cannot lead out of the data set."""
    if not isinstance(template, str) or len(template) > 200:
        raise DataError(f"has no {name}")

    def value(match: re.Match[str]) -> str:
        if match[1] not in numbers:
            raise DataError(f"has the {name} {one_line(template, 100)!r}, which names {match[1]!r}")
        given = numbers[match[1]]
        return f"{given:0{match[2]}d}" if match[2] and isinstance(given, int) else str(given)

    filled = _PLACE.sub(value, template)
    relative = Path(filled)
    if "{" in filled or "\0" in filled or relative.is_absolute() or ".." in relative.parts or "\\" in filled:
        raise DataError(f"has the {name} {one_line(template, 100)!r}, which is no path inside the data set")
    return root / relative


def _splits(given: Any) -> dict[Split, range]:
    """`{"train": "0:8", "val": "8:10"}`; what is none of it declares nothing."""
    if not isinstance(given, dict) or len(given) > 100:
        return {}
    named: dict[Split, range] = {}
    for split in SPLITS:
        match = (
            re.fullmatch(r"(\d{1,9}):(\d{1,9})", text) if isinstance(text := given.get(split), str) else None
        )
        if split and match:
            named[split] = range(int(match[1]), int(match[2]))
    return named


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise DataError(f"has the {name} {one_line(value, 40)}")
    return float(value)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 40


def _is_seconds(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value < 1e9
