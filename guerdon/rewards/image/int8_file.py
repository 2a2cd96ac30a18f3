"""The file of an int8 model, beside its checkpoint: read without trust in what it says.

It holds numbers and a few frames, no graph: what a hostile file can bring about is a refusal. It belongs to
the weights and to the threshold that it was verified with.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import display_path
from guerdon.rewards.image import quantize
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.checkpoint import WEIGHTS_FILE, find_checkpoint
from guerdon.rewards.image.int8 import MAX_PROBES, PROBE_BYTES, Int8Model, weights_fingerprint
from guerdon.rewards.image.steps import resnet_steps

FILE_NAME = "int8.npz"
_REMEDY = "make it with guerdon reward quantize, or use precision fp32"
_FLOATS = ("margin", "threshold_logit", "agreement", "judged_twice")
_TEXTS = ("weights", "processor")
_MAX_TEXT = 64
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<type><i8|<f8|\|u1|<U[1-9]\d?)', "
    rb"'fortran_order': False, 'shape': \((?P<shape>[\d, ]{0,60})\), \} *\n",
    re.DOTALL,
)
"""As `np.save` writes it. Numpy's own reader evaluates the header, and allocates whatever shape it names."""
_MOST = 1e6
"""No logit and no activation of a network that works is larger."""
_DAMAGE = (OSError, ValueError, LookupError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile)
"""What `zipfile` raises on damaged files, and what is raised here."""
_OTHER_BYTES = 1 << 20
"""What a file may have beside its probes."""


def int8_path(checkpoint: Path | str) -> Path:
    """Where the int8 model of a checkpoint is kept."""
    file = find_checkpoint(Path(checkpoint))
    return file.with_name(FILE_NAME) if file.name == WEIGHTS_FILE else file.with_suffix("." + FILE_NAME)


def save_int8(path: Path, int8: Int8Model) -> None:
    """Write the file in one piece."""
    arrays: dict[str, Any] = {
        "format": np.int64(quantize.FORMAT),
        "num_check_frames": np.int64(int8.num_check_frames),
        "ranges": np.array(list(int8.ranges.values()), np.float64),
        "probes": int8.probes,
        "probe_logits": int8.probe_logits,
        **{name: np.float64(getattr(int8, name)) for name in _FLOATS},
        **{name: np.array(getattr(int8, name)[:_MAX_TEXT]) for name in _TEXTS},
    }
    write_atomic(path, lambda out: np.savez(out, allow_pickle=False, **arrays))


def load_int8(path: Path, model: RewardModel, threshold_logit: float | None) -> Int8Model:
    """Read what `save_int8` wrote, and check that it belongs to these weights and this threshold.

    Args:
        path: from `int8_path`.
        model: as loaded from the checkpoint.
        threshold_logit: the threshold that will be used; None if no decision is taken.
    """
    shown = display_path(path)
    if not path.is_file():
        raise ConfigError(f"precision is int8, but {shown} does not exist: {_REMEDY}")
    try:
        if path.stat().st_size > _most_bytes(model):
            raise ValueError(
                f"{path.stat().st_size} bytes, where {_most_bytes(model)} are enough; versions before format "
                f"{quantize.FORMAT} wrote larger files"
            )
        with path.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            content = _Members(archive, model)
            if content.format != quantize.FORMAT:
                raise DataError(
                    f"{shown} has the format {content.format}, and this Guerdon makes {quantize.FORMAT}: "
                    f"{_REMEDY}"
                )
            int8 = content.int8()
    except _DAMAGE as error:
        raise DataError(f"{shown} is damaged ({_one_line(error)}): {_REMEDY}") from error
    if int8.weights != weights_fingerprint(model):
        raise DataError(f"{shown} was made from other weights than the checkpoint has: {_REMEDY}")
    if threshold_logit is not None and not math.isclose(
        int8.threshold_logit, threshold_logit, rel_tol=1e-4, abs_tol=1e-4
    ):
        raise ConfigError(
            f"{shown} was verified for a threshold at logit {int8.threshold_logit:.4f}, and the one that is "
            f"asked for is at {threshold_logit:.4f}: {_REMEDY}"
        )
    return int8


class _Members:
    """The arrays of a file, each checked against the one kind and shape that it can have.

    Args:
        archive: open for reading.
        model: says how many ranges there are, and how large probes are.
    """

    def __init__(self, archive: zipfile.ZipFile, model: RewardModel) -> None:
        _, height, width = model.config.image_size
        self._archive = archive
        self._names = [step.output for step in resnet_steps(model.resnet, (height, width))]
        self._probe = _probe_shape(model)
        self.format = int(self._read("format", "<i8"))

    def int8(self) -> Int8Model:
        """All of it; raises a `ValueError` if a number is not possible."""
        probes, probe_logits = self._read("probes", "|u1", 5), self._read("probe_logits", "<f8", 1)
        count = len(probes)
        if probes.shape[1:] != self._probe or not 1 <= count <= MAX_PROBES or probe_logits.shape != (count,):
            raise ValueError(f"probes of shape {probes.shape} do not fit the model")
        ranges = self._read("ranges", "<f8", 2)
        if ranges.shape != (len(self._names), 2):
            raise ValueError(f"ranges of shape {ranges.shape} instead of {(len(self._names), 2)}")
        low, high = ranges.T
        floats: dict[str, Any] = {name: float(self._read(name, "<f8")) for name in _FLOATS}
        texts: dict[str, Any] = {name: self._text(name) for name in _TEXTS}
        possible = (
            np.abs([*floats.values(), *probe_logits, *ranges.flat]).max() <= _MOST  # no NaN is
            and (low <= 0).all()
            and (high > 1e-12).all()
            and floats["margin"] >= 0
            and all(0 <= floats[name] <= 1 for name in ("agreement", "judged_twice"))
        )
        num_check_frames = int(self._read("num_check_frames", "<i8"))
        if not possible or num_check_frames < 1:
            raise ValueError("its numbers are not possible")
        return Int8Model(
            ranges=dict(zip(self._names, map(tuple, ranges.tolist()), strict=True)),
            probes=probes,
            probe_logits=probe_logits,
            num_check_frames=num_check_frames,
            **floats,
            **texts,
        )

    def _text(self, name: str) -> str:
        text = self._read(name, "<U")
        codes = np.frombuffer(
            text.tobytes(), "<u4"
        )  # numpy makes no string of numbers that are no characters
        if not ((codes >= 32) & (codes < 127)).all():
            raise ValueError(f"{name} is not plain text")
        return str(text)

    def _read(self, name: str, kind: str, ndim: int = 0) -> NDArray[Any]:
        """One array of a kind that `_HEADER` knows, without an allocation that the file does not pay for."""
        info = self._archive.getinfo(f"{name}.npy")
        if info.compress_type != zipfile.ZIP_STORED:  # so that no array is larger than the file
            raise ValueError(f"{name} is compressed")
        data = self._archive.read(info)
        header = _HEADER.match(data)
        if header is None or not header["type"].startswith(kind.encode()):
            raise ValueError(f"{name} is not an array of {kind}")
        shape = tuple(int(size) for size in header["shape"].split(b",") if size.strip())
        dtype = np.dtype(header["type"].decode())
        num_bytes = len(data) - header.end()
        if len(shape) != ndim or math.prod(shape) * dtype.itemsize != num_bytes:
            raise ValueError(f"{name} has the shape {shape} and {num_bytes} bytes")
        return np.frombuffer(data, dtype, offset=header.end()).reshape(shape).copy()


def _probe_shape(model: RewardModel) -> tuple[int, int, int, int]:
    """(K, H, W, c) of one frame as the model wants it."""
    _, height, width = model.config.image_size
    return len(model.config.image_keys), height, width, model.num_channels


def _most_bytes(model: RewardModel) -> int:
    one = math.prod(_probe_shape(model))
    return max(one, min(MAX_PROBES * one, PROBE_BYTES)) + _OTHER_BYTES


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
