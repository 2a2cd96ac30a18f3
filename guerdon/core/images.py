"""One conversion for every image that enters Guerdon: any layout, type and range -> uint8, channels last."""

from __future__ import annotations

import sys
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import FloatArray, IntArray, UInt8Array

ValueRange: TypeAlias = Literal["auto", "unit", "byte"]
CHANNELS = (1, 3, 4)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch; asking does not import torch, which takes seconds."""
    torch = sys.modules.get("torch")  # where nobody has imported it there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: Any) -> NDArray[Any]:
    """A numpy view (or copy, where it must be) of a torch tensor, array, list or number."""
    if is_tensor(value):
        import torch

        tensor = value.detach().cpu()
        array: NDArray[Any] = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        return array
    try:
        return np.asarray(value)
    except ValueError:
        raise DataError("the entries of a list have different shapes; an array needs equal ones") from None


def to_uint8_hwc(image: Any, *, name: str = "image", value_range: ValueRange = "auto") -> UInt8Array:
    """Convert one image or a batch to uint8 with channels last.

    Args:
        image: `[..., H, W, C]`, `[..., C, H, W]` or `[H, W]`; numpy or torch; uint8, or float in [0, 1]
            or [0, 255]. Alpha is dropped. Where both ends could be channels, channels last is assumed.
        name: what the image is called in error messages.
        value_range: `unit` ([0, 1]) or `byte` ([0, 255]) for float images; `auto` takes `unit` if no
            value exceeds 1.

    Returns:
        uint8 `[..., H, W, C]` with C 1 or 3. May share memory with the input; do not write to it.
    """
    array = to_numpy(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim < 3 or array.size == 0:
        raise DataError(f"{name} has shape {list(array.shape)}; expected [H, W, C] or [C, H, W]")
    if array.shape[-1] not in CHANNELS:
        if array.shape[-3] not in CHANNELS:
            raise DataError(
                f"{name} has shape {list(array.shape)}; neither the last nor the third axis from the end "
                "has 1, 3 or 4 channels"
            )
        array = np.moveaxis(array, -3, -1)
    if array.shape[-1] == 4:
        array = array[..., :3]
    return _to_uint8(array, name, value_range)


def _to_uint8(array: NDArray[Any], name: str, value_range: ValueRange) -> UInt8Array:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return np.where(array, np.uint8(255), np.uint8(0))
    if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
        raise DataError(f"{name} has element type {array.dtype}; expected uint8 or float")
    low, high = float(array.min()), float(array.max())
    if not np.isfinite(low) or not np.isfinite(high):
        raise DataError(f"{name} holds NaN or infinite values")
    is_float = np.issubdtype(array.dtype, np.floating)
    unit = value_range == "unit" or (value_range == "auto" and is_float and high <= 1.0)
    limit = 1.0 if unit else 255.0
    if low < 0.0 or high > limit:
        raise DataError(f"{name} has values from {low:g} to {high:g}; expected 0 to {limit:g}")
    if not is_float:
        return array.astype(np.uint8)
    scaled = array * np.float32(255.0) if unit else array
    rounded: UInt8Array = np.rint(scaled).astype(np.uint8)
    return rounded


def to_unit_chw(frames: UInt8Array) -> FloatArray:
    """RLinf's layout: uint8 `[..., H, W, C]` -> float32 `[..., C, H, W]` in [0, 1]."""
    channels_first = np.ascontiguousarray(np.moveaxis(frames, -1, -3))
    return channels_first * np.float32(1.0 / 255.0)


def latest_frames(frames: NDArray[np.uint8]) -> UInt8Array:
    """The last frame of each stack: uint8 [N, k, H, W, C] -> [N, H, W, C]; single frames as they are."""
    return frames[:, -1] if frames.ndim == 5 else frames


def stack_rows(rows: NDArray[np.int64], step: NDArray[np.int64], num_frames: int) -> IntArray:
    """The rows of the last `num_frames` frames up to and with each of `rows`, oldest first -> int [N, k].

    Args:
        rows: int [N], of frames that lie in the order of their episodes.
        step: int [N], their steps within their episodes; before the first step, its frame is repeated.
        num_frames: k.
    """
    back = np.arange(num_frames - 1, -1, -1)
    return rows[:, None] - np.minimum(back, step[:, None])


def stack_episode(frames: UInt8Array, num_frames: int) -> UInt8Array:
    """All stacks of an episode: uint8 [T, H, W, C] -> [T, k, H, W, C]; [T, H, W, C] itself for one frame."""
    if num_frames == 1:
        return frames
    steps = np.arange(len(frames))
    return frames[stack_rows(steps, steps, num_frames)]
