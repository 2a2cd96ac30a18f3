"""Whether frames are of the kind that a model was trained on: size, layout, values, order of colours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.images import to_numpy

_MIN_CONTRAST = 6.0  # grey levels between red and blue, below which their order cannot be told
_SAMPLE = (16, 16, 16)  # frames, rows and columns, at most, whose colours are looked at


@dataclass(frozen=True, kw_only=True)
class FrameCheck:
    """What is known of the frames that a model was trained on, by camera; empty where it is not."""

    cameras: tuple[str, ...]
    num_frames: int
    """Frames that are scored together."""
    sizes: Mapping[str, tuple[int, int, int]]
    """(H, W, C)."""
    value_range: str
    colour_order: str
    mean: Mapping[str, tuple[float, ...]]
    """Per channel, in grey levels from 0 to 255."""
    std: Mapping[str, tuple[float, ...]]

    def check(self, frames: Mapping[str, Any] | Any, *, colours: bool = True) -> None:
        """Raise a `DataError` if a batch is not of the kind that the model was trained on.

        Args:
            frames: camera -> images `[N, H, W, C]` or stacks of them `[N, k, H, W, C]`, or the images alone
                if the model has one camera.
            colours: also find out, from a sample of the pixels, whether red and blue are swapped.
        """
        keys = list(self.cameras)
        if not isinstance(frames, Mapping):
            frames = {keys[0]: frames} if len(keys) == 1 else {"(one array)": frames}
        if not set(keys) <= set(frames):
            raise DataError(
                f"the frames have the cameras {list(frames)}, the checkpoint was trained on {keys}"
            )
        for key in keys:
            problem = self._problem(key, to_numpy(frames[key]), colours)
            if problem:
                raise DataError(f"camera {key!r}: {problem}")

    def _problem(self, camera: str, images: NDArray[Any], colours: bool) -> str | None:
        """How one camera's images differ from the training frames, with both sides."""
        if images.ndim == 5:
            if images.shape[1] != self.num_frames:
                return f"frames are stacks of {images.shape[1]}, the checkpoint scores {self.num_frames}"
            images = images.reshape(-1, *images.shape[2:])
        images = images[None] if images.ndim == 3 else images
        if images.ndim != 4:
            return f"frames have shape {list(images.shape)}, the checkpoint was trained on [N, H, W, C]"
        size, shape = self.sizes.get(camera), images.shape[1:]
        if size is not None and shape != size:
            if shape == (size[2], size[0], size[1]):
                return f"frames are CHW {list(shape)}, the checkpoint was trained on HWC {list(size)}"
            return f"frames are {list(shape)}, the checkpoint was trained on {list(size)} (H, W, C)"
        if images.dtype != np.uint8 and images.size:
            low, high = images.min(), images.max()
            values = f"from {low:g} to {high:g}" if low == low else "and hold NaN"  # NaN is not itself
            return f"frames are {images.dtype} {values}, the checkpoint was trained on {self.value_range}"
        mean, std = self.mean.get(camera), self.std.get(camera)
        if mean is None or std is None or len(mean) != images.shape[-1] or not images.size:
            return None
        if images.max() == 1 and max(mean) > _MIN_CONTRAST:
            return f"frames have values from 0 to 1, the checkpoint was trained on {self.value_range}"
        if not colours or len(mean) != 3:
            return None
        frames, rows, columns = (
            -(-size // most) for size, most in zip(images.shape[:3], _SAMPLE, strict=True)
        )
        sample = images[::frames, ::rows, ::columns].reshape(-1, 3).astype(np.float32)
        here = sample.mean(0), sample.std(0)
        if _reversed_fits(here, (np.array(mean), np.array(std))):
            return (
                f"frames have mean colours {_levels(here[0])}, the checkpoint was trained on "
                f"{self.colour_order} with {_levels(mean)}: red and blue are swapped"
            )
        return None


def _reversed_fits(
    here: tuple[NDArray[Any], NDArray[Any]], trained: tuple[NDArray[Any], NDArray[Any]]
) -> bool:
    """Whether the channels fit the training frames clearly better in reverse order.

    Only the contrast between red and blue is looked at, which a change of brightness leaves alone. It must
    have turned round and kept its size within a factor of 1.5, and the contrast of the deviations must not
    say the opposite; where training frames have little contrast, nothing is said.
    """
    now, then = (float(side[0][0] - side[0][2]) for side in (here, trained))
    std_now, std_then = (float(side[1][0] - side[1][2]) for side in (here, trained))
    if abs(then) < _MIN_CONTRAST or not 1 / 1.5 <= -now / then <= 1.5:
        return False
    return not (std_now * std_then > 0 and min(abs(std_now), abs(std_then)) > _MIN_CONTRAST / 2)


def _levels(values: Collection[float] | NDArray[Any]) -> str:
    return "(" + ", ".join(f"{value:.0f}" for value in values) + ")"
