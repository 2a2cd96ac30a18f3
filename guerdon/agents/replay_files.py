"""Replay buffers in files: everything that later samples depend on, of one buffer or of several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.atomic import write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.files.checksums import load_npz

if TYPE_CHECKING:
    from guerdon.agents.replay import ReplayBuffer


def arrays_of(buffer: ReplayBuffer) -> dict[str, NDArray[Any]]:
    """All arrays by name, not copied; rows that were never filled are left out."""
    rings = {f"obs/{name}": ring for name, ring in buffer._obs.items()}
    rings |= {f"step/{name}": ring for name, ring in buffer._steps.items()}
    arrays = {name: ring[: buffer._size] for name, ring in rings.items()}
    arrays |= {f"final/{name}": store for name, store in buffer._finals.items()}
    arrays["free"] = np.array(buffer._free, np.int64)
    place = {
        "row": buffer._row,
        "size": buffer._size,
        "num_rows": buffer.num_rows,
        "num_envs": buffer.num_envs,
    }
    arrays["meta"] = np.array(json.dumps({**place, "rng": buffer._rng.bit_generator.state}))
    return arrays


def restore(buffer: ReplayBuffer, state: Mapping[str, NDArray[Any]]) -> None:
    """Take over a state; full rings are adopted, not copied: they may fill most of the memory."""
    own = arrays_of(buffer)
    if state.keys() != own.keys():
        raise DataError(f"the replay buffer keeps {sorted(own)}, the saved one {sorted(state)}")
    meta = json.loads(str(state["meta"]))
    if (meta["num_rows"], meta["num_envs"]) != (buffer.num_rows, buffer.num_envs):
        raise DataError(
            f"the saved replay buffer has {meta['num_rows']} rows of {meta['num_envs']} environments, "
            f"this one {buffer.num_rows} of {buffer.num_envs}: "
            "resume with the env.train.num_envs and the buffer_size that it was saved with"
        )
    for name, array in own.items():
        if state[name].dtype != array.dtype and name != "meta":
            raise DataError(f"{name} of the saved buffer is {state[name].dtype}, not {array.dtype}")
        if state[name].shape[1:] != array.shape[1:]:
            raise DataError(f"{name} of the saved buffer has shape {list(state[name].shape)}")
    row, size = int(meta["row"]), int(meta["size"])
    if not (0 <= row < buffer.num_rows and 0 <= size <= buffer.num_rows):
        raise DataError(f"the saved replay buffer claims to be at row {row} with {size} filled")
    buffer._row, buffer._size = row, size
    for kind, rings in (("obs", buffer._obs), ("step", buffer._steps)):
        for name, ring in rings.items():
            saved = state[f"{kind}/{name}"]
            if len(saved) == buffer.num_rows:
                rings[name] = saved
            else:
                ring[: len(saved)] = saved
    buffer._finals = {name: state[f"final/{name}"] for name in buffer._finals}
    buffer._free = state["free"].tolist()
    buffer._rng.bit_generator.state = meta["rng"]


def save(buffer: ReplayBuffer, path: Path) -> None:
    """Write the state to a file, completely or not at all."""
    write_atomic(path, lambda file: np.savez(file, allow_pickle=False, **arrays_of(buffer)))


def load(buffer: ReplayBuffer, path: Path) -> None:
    """Go on from a file that `save` wrote."""
    try:
        state = load_npz(path)
    except DataError as error:
        raise DataError(f"cannot read the replay buffer {error}") from error
    try:
        restore(buffer, state)
    except DataError:
        raise
    except Exception as error:  # hostile bytes can fail in any way
        shown = display_path(path)
        raise DataError(f"cannot use the replay buffer {shown}: {one_line(error)}") from error


def part_places(path: Path, count: int) -> list[Path]:
    """The files of `count` parts; a single one is the file of a plain buffer."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}_{number}{path.suffix}") for number in range(count)]


def check_layout(path: Path, count: int) -> None:
    """Refuse the files of another number of buffers than `count`; what could be done is said."""
    others = set(path.parent.glob(f"{path.stem}*{path.suffix}")) - set(part_places(path, count))
    if path in others:
        raise DataError(
            f"{display_path(path.parent)} has one replay buffer for all environments, as a synchronous run "
            f"or a single env worker writes it; {count} env workers of an asynchronous run have one each: "
            "resume with asynchronous.enabled=false or with one env worker"
        )
    if others:
        raise DataError(
            f"{display_path(path.parent)} was written asynchronously with another number of env workers: "
            f"{count} now, but there is {sorted(others)[0].name}; a synchronous run counts as one"
        )
