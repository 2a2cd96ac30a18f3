"""The records that pass between stages.

All are frozen and keyword-only; the shape of each field stands beside it and is checked on construction.
`T` is the number of steps of an episode, `N` a batch size, `H, W, C` an image, `A` and `S` the sizes of
an action and of a state vector. Frames are always uint8, channels last.

Step `t` of an episode holds action `t` and everything it led to: the frame, state, reward and flags that
the environment returned for that action. Under auto-reset the last frame is therefore the final frame of
the old episode and never the first one of the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError

Split: TypeAlias = Literal["", "train", "val", "test"]
UInt8Array: TypeAlias = NDArray[np.uint8]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]

SPLITS: tuple[Split, ...] = ("", "train", "val", "test")


def _check(owner: str, name: str, value: Any, dtype: type[np.generic], shape: tuple[int | None, ...]) -> None:
    """Raise unless `value` is an array of `dtype` with `shape`; None in `shape` matches any size."""
    if not isinstance(value, np.ndarray):
        raise DataError(f"{owner}.{name} must be a numpy array, not {type(value).__name__}")
    if value.dtype != dtype:
        raise DataError(f"{owner}.{name} must be {np.dtype(dtype)}, not {value.dtype}")
    have = value.shape
    fits = [size in (None, found) for size, found in zip(shape, have, strict=False)]
    if len(have) != len(shape) or not all(fits):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise DataError(f"{owner}.{name} must have shape [{wanted}], not {list(have)}")


def _check_frames(owner: str, frames: Mapping[str, Any], count: int, *, stacks: bool = False) -> None:
    if not frames:
        raise DataError(f"{owner}.frames is empty: at least one camera is needed")
    for camera, images in frames.items():
        stacked = stacks and getattr(images, "ndim", 4) == 5
        shape = (count, None, None, None, None) if stacked else (count, None, None, None)
        _check(owner, f"frames[{camera!r}]", images, np.uint8, shape)
        if 0 in images.shape[1:]:
            raise DataError(f"{owner}.frames[{camera!r}] has an empty image: {list(images.shape)}")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A file or record that could not be used, and why. The others are used all the same."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode of experience with a success label for every frame."""

    frames: Mapping[str, UInt8Array]
    """camera name -> uint8 [T, H, W, C], C is 1 or 3; the frame that action t led to."""
    labels: FloatArray
    """float32 [T] in [0, 1]; 1 where the frame shows success."""
    success: bool
    """Whether the episode counts as a success (`success_once`)."""
    actions: FloatArray | None = None
    """float32 [T, A]."""
    intended: FloatArray | None = None
    """float32 [T, A]; what the demonstrator would have done without the noise that was added to it."""
    states: FloatArray | None = None
    """float32 [T, S]; the state that action t led to."""
    initial_state: FloatArray | None = None
    """float32 [S]; the state that action 0 was chosen in."""
    env_rewards: FloatArray | None = None
    """float32 [T]; what the environment gave, never a learned reward."""
    terminated: BoolArray | None = None
    """bool [T]."""
    truncated: BoolArray | None = None
    """bool [T]."""
    is_grasped: BoolArray | None = None
    """bool [T]."""
    at_rest: BoolArray | None = None
    """bool [T]; whether the robot stands still, as it knows without looking."""
    seed: int | None = None
    """What the environment was seeded with, where it is known."""
    source: str = ""
    """Where the episode came from: an environment id or a file name."""
    split: Split = ""
    """The split that the source declares; empty where it declares none."""
    complete: bool = True
    """False if recording was cut off before the episode ended; such an episode proves no failure."""

    def __post_init__(self) -> None:
        _check("Episode", "labels", self.labels, np.float32, (None,))
        steps = self.num_frames
        if steps == 0:
            raise DataError("Episode has no frames")
        _check_frames("Episode", self.frames, steps)
        if not (self.labels.min() >= 0.0 and self.labels.max() <= 1.0):  # also catches NaN
            raise DataError("Episode.labels must lie in [0, 1]")
        for names, dtype, shape in (
            (("actions", "intended", "states"), np.float32, (steps, None)),
            (("initial_state",), np.float32, (None,)),
            (("env_rewards",), np.float32, (steps,)),
            (("terminated", "truncated", "is_grasped", "at_rest"), np.bool_, (steps,)),
        ):
            for name in names:
                if (value := getattr(self, name)) is not None:
                    _check("Episode", name, value, dtype, shape)
        if self.split not in SPLITS:
            raise DataError(f"Episode.split must be one of {SPLITS}, not {self.split!r}")

    @property
    def num_frames(self) -> int:
        """T."""
        return int(self.labels.shape[0])

    @property
    def num_positive_frames(self) -> int:
        """How many frames are labelled as success."""
        return int(np.count_nonzero(self.labels >= 0.5))

    @property
    def camera_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Camera name -> (H, W, C)."""
        shapes = {name: images.shape for name, images in self.frames.items()}
        return {name: (height, width, channels) for name, (_, height, width, channels) in shapes.items()}


def is_positive(labels: NDArray[Any], success_once: bool = False) -> bool:
    """RLinf's rule: an episode is positive if `success_once` or any frame label is >= 0.5."""
    return bool(success_once) or bool((np.asarray(labels) >= 0.5).any())


@dataclass(frozen=True, kw_only=True)
class RewardLabels:
    """Which frames show success, and where they come from."""

    labels: FloatArray
    """float32 [N] in [0, 1]."""
    episode: IntArray
    """int64 [N]; the number of the episode in its data set."""
    step: IntArray
    """int64 [N]; the step within the episode."""

    def __post_init__(self) -> None:
        _check("RewardLabels", "labels", self.labels, np.float32, (None,))
        for name in ("episode", "step"):
            _check("RewardLabels", name, getattr(self, name), np.int64, (len(self.labels),))


@dataclass(frozen=True, kw_only=True)
class FrameBatch:
    """A batch of frames drawn from a data set, with their labels."""

    frames: Mapping[str, UInt8Array]
    """camera name -> uint8 [N, H, W, C]; [N, k, H, W, C] if each is scored with the k - 1 before it."""
    labels: RewardLabels
    """labels, episode and step of the N frames."""

    def __post_init__(self) -> None:
        _check_frames("FrameBatch", self.frames, len(self.labels.labels), stacks=True)

    def __len__(self) -> int:
        return len(self.labels.labels)


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """What a data set holds; `data inspect --json` prints exactly these fields."""

    path: str
    format: str
    num_episodes: int
    num_frames: int
    num_success_episodes: int
    num_failure_episodes: int
    num_incomplete_episodes: int
    num_positive_frames: int
    cameras: Mapping[str, tuple[int, int, int]]
    """camera name -> (H, W, C)."""
    faults: tuple[Fault, ...]
    bytes: int
    content_hash: str | None = None
    """Of the native store; None for formats that carry no hash."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        cameras = {name: list(shape) for name, shape in self.cameras.items()}
        return {**vars(self), "cameras": cameras, "faults": [asdict(fault) for fault in self.faults]}


def display_path(path: Path | str) -> str:
    r"""A path as shown in messages: relative to the working directory where that is shorter.

    Bytes of a name that are no UTF-8 are written out as `\xe9`, so that it can be printed and stored.
    """
    path = Path(path)
    try:
        shown = str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError, RuntimeError):  # elsewhere; or no path at all: null bytes, a circle of links
        shown = str(path)
    return printable(shown)


def printable(text: str) -> str:
    r"""A text that can be written as UTF-8: what cannot is written out, bytes of a file name as `\xe9`."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # surrogates that do not stand for a byte
        return text.encode("utf-8", "backslashreplace").decode()


def with_control_mode(source: str, control_mode: str | None) -> str:
    """`Episode.source` of a robot whose actions can mean several things; `control_mode_of` reads it again."""
    return source if control_mode is None else f"{source} (control_mode {control_mode})"


def control_mode_of(source: str) -> str | None:
    """The control mode that an episode was recorded with, where its source tells."""
    found = re.search(r"\(control_mode (\w+)\)$", source)
    return None if found is None else found[1]


def fields_of(record: Any) -> dict[str, Any]:
    """A record as a dict, not copied deeply."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def known_fields(cls: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `plain` that `cls` has; raises if another is there or a needed one is missing."""
    names = {item.name for item in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if set(plain) - names or needed - set(plain):
        raise DataError(
            f"{cls.__name__} has the fields {sorted(names)}; unknown: {sorted(set(plain) - names)}, "
            f"missing: {sorted(needed - set(plain))}"
        )
    return dict(plain)
