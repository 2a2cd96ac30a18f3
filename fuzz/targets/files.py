"""Foreign data sets and demonstrations: pickles, `.npy`, `.npz`, `.pt`, Arrow and pictures."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save as save_safetensors

from fuzz.engine import Target
from fuzz.episode import make_episode
from fuzz.mutations import mutate_bytes
from fuzz.structures import mutate_opcodes, mutate_png, mutate_record, mutate_safetensors, mutate_zip
from guerdon.core.errors import GuerdonError
from guerdon.core.images import to_unit_chw
from guerdon.core.types import Episode, Fault
from guerdon.data.files import safe_pickle
from guerdon.data.formats import FORMATS
from guerdon.data.formats.pkl_episode import to_record
from guerdon.data.formats.realworld_pkl import to_transitions
from guerdon.rewards.zoo.demonstrations import read_demonstrations

_Record = Callable[[], Any]


# What the files hold


@cache
def _npy_record() -> Any:
    episode = make_episode()
    images = {camera: to_unit_chw(frames) for camera, frames in episode.frames.items()}
    return {"images": images, "labels": episode.labels}


@cache
def _pkl_record() -> Any:
    return to_record(make_episode(cameras=2))


@cache
def _rlinf_record() -> Any:
    episode = make_episode()
    observations = [
        {"main_images": torch.from_numpy(frame), "states": torch.from_numpy(state)}
        for frame, state in zip(episode.frames["camera_0"], episode.states, strict=True)  # type: ignore[arg-type]
    ]
    return {
        "observations": [observations[0], *observations],
        "actions": list(torch.from_numpy(episode.actions)),
        "rewards": [torch.tensor([0.0]), torch.tensor([1.0])],
        "terminated": [False, True],
        "truncated": [False, False],
        "infos": [
            {},
            {"success": True, "is_grasped": True},
            {"success": torch.tensor([True]), "is_grasped": False},
        ],
    }


@cache
def _realworld_record() -> Any:
    return to_transitions(make_episode()) + to_transitions(make_episode(cameras=2))[:1]


@cache
def _pt_record() -> Any:
    frames = torch.from_numpy(make_episode().frames["camera_0"])
    return {
        "images": list(frames),
        "labels": [0, 1],
        "metadata": {
            "camera_names": ["camera_0"],
            "extra_images": {"side": frames},
            "episode_ids": [0, 0],
            "step_ids": [0, 1],
            "episodes": {0: {"success": True, "seed": 3}},
        },
    }


@cache
def _demonstration_record() -> Any:
    step = {"obs": torch.ones(3), "action": torch.tensor([1]), "next_obs": torch.ones(3), "reward": 1.0}
    return [{**step, "done": False}, {**step, "done": True}]


# And how they are written


def _pickled(record: Any) -> bytes:
    return pickle.dumps(record, protocol=4)


def _npy(record: Any) -> bytes:
    file = io.BytesIO()
    content = np.empty((), dtype=object)
    content[()] = record  # as it is; np.array would look into nested lists
    np.save(file, content, allow_pickle=True)
    return file.getvalue()


def _torch_saved(record: Any, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(record, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _dumped(record: Any, dump: Callable[[Any], bytes], rng: random.Random, data: bytes) -> bytes:
    """A record with hostile parts, written; `data` changed as bytes where it cannot be written."""
    try:
        return dump(mutate_record(record, rng))
    except (RecursionError, TypeError, ValueError, OverflowError, MemoryError, pickle.PicklingError):
        return mutate_bytes(data, rng)


def mutate_dumped(make: _Record, dump: Callable[[Any], bytes], data: bytes, rng: random.Random) -> bytes:
    """A record with hostile parts, written; or `data` with other opcodes or bytes."""
    kind = rng.random()
    if kind < 0.4:
        return _dumped(make(), dump, rng, data)
    return mutate_opcodes(data, rng) if kind < 0.7 else mutate_bytes(data, rng)


# Targets


def _nbytes(item: Episode) -> int:
    arrays = [*item.frames.values(), item.actions, item.states, item.env_rewards]
    return sum(array.nbytes for array in arrays if array is not None)


def _names(error: GuerdonError, path: Path) -> None:
    text = str(error)
    assert path.name in text or path.parent.name in text, f"the file is not named: {text!r}"
    assert "\n" not in text, f"more than one line: {text!r}"


_ALONE, _BESIDE = Path("alone"), Path("beside")


def _read(name: str, file: str, others: int, data: bytes, scratch: Path) -> int:
    """Read a data set of a format with `data` as `file`; at times beside `others` that are sound."""
    root, wanted = (_BESIDE, others) if zlib.crc32(data) % 8 == 0 else (_ALONE, 0)
    (scratch / root / file).write_bytes(data)
    found = list(FORMATS[name].read(scratch / root))
    for item in found:
        if isinstance(item, Fault):
            assert item.path and item.reason and "\n" not in item.reason, item
    episodes = [item for item in found if isinstance(item, Episode)]
    assert len(episodes) >= wanted, f"{len(episodes)} episodes were read, and {wanted} others are sound"
    return sum(_nbytes(item) for item in episodes)


def _place(scratch: Path, file: str, other: str, data: bytes) -> None:
    """Folders for `file`, and `data` as the sound file `other` beside it."""
    for root, name in ((_ALONE, file), (_BESIDE, file), (_BESIDE, other)):
        (scratch / root / name).parent.mkdir(parents=True, exist_ok=True)
    if other:
        (scratch / _BESIDE / other).write_bytes(data)


def _format(name: str, file: str, make: _Record, dump: Callable[[Any], bytes], other: str = "") -> Target:
    """A format whose file `file` is fuzzed; the file `other`, where there may be one, is sound."""

    def seeds(scratch: Path) -> list[bytes]:
        data = dump(make())
        _place(scratch, file, other, data)
        return [data]

    return Target(seeds, partial(_read, name, file, 1 if other else 0), partial(mutate_dumped, make, dump))


def _pickle_target() -> Target:
    def run(data: bytes, scratch: Path) -> None:
        try:
            safe_pickle.loads(data, name="some.pkl")
        except GuerdonError as error:
            _names(error, scratch / "some.pkl")
            raise

    records = (_pkl_record, _rlinf_record, _realworld_record, _demonstration_record)
    return Target(
        lambda _: [_pickled(make()) for make in records],
        run,
        lambda data, rng: mutate_dumped(rng.choice(records), _pickled, data, rng),
    )


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(make_episode().frames["camera_0"][0]).save(file, format=kind)
    return file.getvalue()


def _pictures(suffix: str, kinds: tuple[str, ...]) -> Target:
    file = f"success/a_000001_frame000.{suffix}"

    def seeds(scratch: Path) -> list[bytes]:
        _place(scratch, file, "failure/b_000000_frame000.png", _picture("PNG"))
        return [_picture(kind) for kind in kinds]

    return Target(seeds, partial(_read, "folder", file, 1), mutate_png if suffix == "png" else None)


def _demonstrations(file: str, make: Callable[[], list[bytes]], mutate: Any = None) -> Target:
    def run(data: bytes, scratch: Path) -> None:
        (scratch / file).write_bytes(data)
        try:
            read_demonstrations(scratch / file)
        except GuerdonError as error:
            _names(error, scratch / file)
            raise

    return Target(lambda _: make(), run, mutate)


def _trajectory() -> dict[str, Any]:
    return {
        "obs": [[0.0, 1.0]] * 3,
        "acts": [[1.0], [0.0]],
        "rews": [0.0, 1.0],
        "terminal": True,
        "infos": "x",
    }


def _arrow(new: Any) -> bytes:
    table = pa.table({name: [value, value] for name, value in _trajectory().items()})
    file = io.BytesIO()
    with new(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def _npz() -> list[bytes]:
    file = io.BytesIO()
    np.savez_compressed(
        file,
        acts=np.zeros((4, 1), np.float32),
        rews=np.zeros(4, np.float32),
        obs=np.zeros((6, 2), np.float32),
        indices=np.array([2]),
        terminal=np.array([True, False]),
    )
    stored = io.BytesIO()
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(stored, "w") as copy:
        for name in source.namelist():
            copy.writestr(name, source.read(name))
    return [file.getvalue(), stored.getvalue(), *_own_npz()]


def _own_npz() -> list[bytes]:
    """Arrays under the names that people use: flags for each step, or numbers of steps."""
    steps: dict[str, NDArray[Any]] = {
        "observations": np.zeros((4, 2), np.float32),
        "actions": np.zeros(4, np.int64),
    }
    flags: dict[str, NDArray[Any]] = {
        "terminals": np.array([0, 1, 0, 0], np.bool_),
        "timeouts": np.array([0, 0, 0, 1], np.bool_),
    }
    marks = {"episode_ends": np.array([2, 4])}
    made = []
    ended: list[dict[str, NDArray[Any]]] = [
        {**flags, "next_observations": np.ones((4, 2), np.float32)},
        marks,
    ]
    for more in ended:
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **steps, **more)
        made.append(file.getvalue())
    return made


def _safetensors() -> list[bytes]:
    rows = {"obs": torch.ones(2, 3), "next_obs": torch.ones(2, 3), "actions": torch.zeros(2, 1)}
    ends = {"terminated": torch.tensor([False, True]), "truncated": torch.tensor([False, False])}
    return [save_safetensors({**rows, **ends, "env_rewards": torch.zeros(2)})]


TARGETS: dict[str, Target] = {
    "pickle": _pickle_target(),
    "npy-trajectory": _format(
        "npy-trajectory", "positive/000001.npy", _npy_record, _npy, "negative/000000.npy"
    ),
    "pkl-episode": _format(
        "pkl-episode", "success/episode_000001.pkl", _pkl_record, _pickled, "failure/episode_000000.pkl"
    ),
    "rlinf-episode": _format(
        "rlinf-episode",
        "rank_0_env_0_episode_1_success.pkl",
        _rlinf_record,
        _pickled,
        "rank_0_env_0_episode_0_fail.pkl",
    ),
    "realworld-pkl": _format("realworld-pkl", "data.pkl", _realworld_record, _pickled),
    "reward-pt": _format("reward-pt", "train.pt", _pt_record, _torch_saved, "val.pt"),
    "reward-pt-stream": _format(
        "reward-pt", "train.pt", _pt_record, partial(_torch_saved, zipped=False), "val.pt"
    ),
    "folder-png": _pictures("png", ("PNG", "JPEG")),
    "folder-jpg": _pictures("jpg", ("JPEG",)),
    "demonstrations-pkl": _demonstrations(
        "expert_data.pkl",
        lambda: [_pickled(_demonstration_record())],
        partial(mutate_dumped, _demonstration_record, _pickled),
    ),
    "demonstrations-npz": _demonstrations("demos.npz", _npz, mutate_zip),
    "demonstrations-arrow": _demonstrations(
        "demos.arrow", lambda: [_arrow(pa.ipc.new_stream), _arrow(pa.ipc.new_file)]
    ),
    "demonstrations-safetensors": _demonstrations("demos.safetensors", _safetensors, mutate_safetensors),
}
