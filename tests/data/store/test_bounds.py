"""Small files that name the same values over and over: what they ask for is counted before it is made."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault
from guerdon.data.files import safe_pickle
from guerdon.data.files.bounds import Allowance, as_array, one_line
from guerdon.data.files.rebuild import check_sizes
from guerdon.data.formats import FORMATS
from guerdon.data.formats.values import stack_images
from guerdon.rewards.zoo.demonstrations import read_demonstrations

pytestmark = pytest.mark.timeout(300)  # without the bounds most of these take years


def nested(width: int = 10, depth: int = 60) -> Any:
    """A list of the list before it, ten times, sixty times over: 10**61 numbers in 1 kB."""
    value: Any = [0.5] * width
    for _ in range(depth):
        value = [value] * width
    return value


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """Python's and numpy's memory stays below this."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes << 20
    finally:
        tracemalloc.stop()


def test_messages_are_short_whatever_the_value() -> None:
    assert one_line("two\nlines") == "two?lines"
    assert one_line(["a", 1, None]) == "['a', 1, None]"
    assert len(one_line(nested())) <= 160
    assert "bits" in one_line(1 << 100_000)
    array = np.empty(1, object)
    array[0] = nested()
    assert one_line(array) == "<ndarray>"


def test_sizes_are_those_of_an_array() -> None:
    assert check_sizes("it", [2, 0, 3]) == (2, 0, 3)
    for sizes in (nested(), [1 << 70], [10**9, 0], [1] * 65, [-1], [1.0]):
        with pytest.raises(DataError, match=r"^it is"):
            check_sizes("it", sizes)


def test_lists_become_arrays_within_bounds() -> None:
    np.testing.assert_array_equal(as_array([[1, 2], [3, 4]]), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(as_array([torch.ones(2), np.zeros(2)]), [[1, 1], [0, 0]])
    np.testing.assert_array_equal(as_array(range(3)), [0, 1, 2])
    assert as_array("text").dtype == object
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (nested(), range(10**9), range(10**30), [range(10**9)], cycle, ["x" * 1000], [[b"x"]]):
        with at_most(64), pytest.raises(DataError, match="list"):
            as_array(value)


def test_one_image_may_be_named_often_but_not_at_any_price() -> None:
    image = np.zeros((100, 100, 3), np.float32)
    assert stack_images([image] * 50, "c", Allowance(0, 1 << 21, 0)).shape == (50, 100, 100, 3)
    with at_most(8), pytest.raises(DataError, match="over and over"):
        stack_images([image] * 100_000, "c", Allowance(0, 1 << 30, 0))


def test_float_frames_are_converted_in_pieces() -> None:
    images = np.full((256, 64, 64, 3), 0.5, np.float32)  # 12 MiB, and 3 MiB as frames
    images[255] = 0.01  # dark, and of the same range
    with at_most(40):
        frames = stack_images(images, "c")
    assert frames[0].max() == 128 and frames[255].max() == 3
    with pytest.raises(DataError, match="frame 200 of camera 'c' holds NaN"):
        stack_images([np.full((64, 64, 3), np.nan if step == 200 else 1.0) for step in range(256)], "c")


# Pickles that work more than they should

_COPY = b"h\x00h\x01R"  # call object 0 with object 1


def _again(function: bytes, argument: bytes, times: int) -> bytes:
    """A pickle that calls a function with one piece of bytes again and again."""
    stored = b"B" + struct.pack("<I", len(argument)) + argument
    return b"\x80\x04](c" + function + b"\n\x94" + stored + b"\x85\x940" + _COPY * times + b"e."


def _stream() -> bytes:
    file = io.BytesIO()
    torch.save([1] * 2000, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _huge_product() -> bytes:
    number = b"\x8b" + struct.pack("<i", 200_000) + b"\x7f" * 200_000
    shape = b"(" + number + b"\x94" + b"h\x00" * 3000 + b"t"
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R"
    return b"\x80\x04cnumpy.core.numeric\n_frombuffer\n(C\x00" + dtype + shape + b"X\x01\x00\x00\x00CtR."


def _equal_hashes(num_keys: int) -> bytes:
    """A pickled dict {k * (2^61 - 1): 0}; written as bytes, since building it takes as long as reading it."""
    numbers = (number * (2**61 - 1) for number in range(num_keys))
    keys = (number.to_bytes(10, "little") for number in numbers)
    return b"\x80\x04}(" + b"".join(b"\x8a\x0a" + key + b"K\x00" for key in keys) + b"u."


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_again(b"builtins\nbytearray", b"x" * 200_000, 20_000), "many copies"),
        (_again(b"torch.storage\n_load_from_bytes", _stream(), 20_000), "many copies"),
        (_huge_product(), "integer of 200000 bytes"),
        (_equal_hashes(30_000), "more objects"),
        (b"\x80\x04](" + b"\x8f" * (2 << 20) + b"e.", "more objects"),  # sets of 216 bytes
    ],
    ids=["copies", "streams", "product", "hashes", "sets"],
)
def test_work_for_a_pickle_is_bounded(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        safe_pickle.loads(data)


def test_many_objects_are_read_from_a_file_that_is_large_enough() -> None:
    content = [{"step": step, "pair": (step, 0.5)} for step in range(50_000)]
    assert safe_pickle.loads(pickle.dumps(content)) == content


# Formats


def _frame(**parts: Any) -> dict[str, Any]:
    obs = {"main_images": np.zeros((8, 8, 3), np.uint8), "states": np.zeros(2, np.float32)}
    return {"obs": obs, "success": True, "action": np.zeros(2, np.float32), **parts}


def _transition(**parts: Any) -> dict[str, Any]:
    end = {"rewards": 1.0, "terminations": True, "truncations": False}
    return {"transitions": {"obs": _frame()["obs"]}, "action": None, **end, **parts}


def _write(path: Path, content: Any, save: Callable[[Any, Any], None] = pickle.dump) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        save(content, file)
    return path


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("pkl-episode", "success/episode_000000.pkl", {"frames": [_frame()] * 300_000}),
        ("pkl-episode", "success/episode_000000.pkl", {"frames": [_frame(action=nested())]}),
        ("pkl-episode", "success/episode_000000.pkl", {"frames": [_frame(reward=range(10**9))]}),
        ("realworld-pkl", "data.pkl", [_transition()] * 300_000),
        ("realworld-pkl", "data.pkl", [_transition(terminations=nested())]),
        ("rlinf-episode", "rank_0_env_0_episode_0_fail.pkl", {"actions": np.zeros((10**9, 0))}),
    ],
)
def test_a_small_file_gives_one_fault(tmp_path: Path, name: str, file: str, content: Any) -> None:
    path = _write(tmp_path / file, content)
    assert path.stat().st_size < 1 << 20
    (fault,) = FORMATS[name].read(tmp_path)
    assert isinstance(fault, Fault)
    assert Path(fault.path).name == path.name and fault.reason


def test_one_vector_often_is_counted(tmp_path: Path) -> None:
    vector = np.zeros(500_000, np.float32)
    frames = [_frame(action=vector) for _ in range(1000)]
    _write(tmp_path / "success" / "episode_000000.pkl", {"frames": frames})
    with at_most(64):
        (fault,) = FORMATS["pkl-episode"].read(tmp_path)
    assert isinstance(fault, Fault) and "over and over" in fault.reason


def test_frames_that_are_shared_a_little_are_read(tmp_path: Path) -> None:
    _write(tmp_path / "success" / "episode_000000.pkl", {"frames": [_frame()] * 500})
    (episode,) = FORMATS["pkl-episode"].read(tmp_path)
    assert isinstance(episode, Episode) and episode.num_frames == 500


def test_many_episodes_in_one_pt_file_do_not_take_the_square_of_their_time(tmp_path: Path) -> None:
    count = 3000
    images = torch.zeros(count, 8, 8, 3, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(count) % 256
    ids = list(range(count))[::-1]
    content = {"images": images, "labels": [1] * count, "metadata": {"episode_ids": ids}}
    _write(tmp_path / "train.pt", content, torch.save)
    found = [item for item in FORMATS["reward-pt"].read(tmp_path) if isinstance(item, Episode)]
    assert [int(item.frames["base_camera"][0, 0, 0, 0]) for item in found] == [
        id_ % 256 for id_ in ids[::-1]
    ][::-1]


# Demonstrations


def test_demonstrations_that_name_one_step_over_and_over(tmp_path: Path) -> None:
    step = {"obs": np.zeros(9), "action": 0, "next_obs": np.zeros(9), "reward": 0.0, "done": True}
    path = _write(tmp_path / "expert_data.pkl", [step] * 300_000)
    with pytest.raises(DataError, match=r"expert_data\.pkl: has 300000 frames"):
        read_demonstrations(path)
    long = {**step, "obs": np.zeros(300_000), "next_obs": np.zeros(300_000)}
    with at_most(200), pytest.raises(DataError, match="over and over"):
        read_demonstrations(_write(path, [dict(long) for _ in range(1000)]))
    with pytest.raises(DataError, match=r"expert_data\.pkl: holds no demonstrations: other\.npz"):
        read_demonstrations(_write(path, "other.npz"))  # text in a file is not a path to follow


def test_an_archive_that_unpacks_to_much(tmp_path: Path) -> None:
    parts = {"acts": np.zeros((4, 1)), "indices": np.array([2]), "terminal": np.array([True, False])}
    np.savez_compressed(tmp_path / "demos.npz", obs=np.zeros((1 << 15, 1 << 10), np.float32), **parts)
    with at_most(32), pytest.raises(DataError, match="unpacks to more than 64 times its size"):
        read_demonstrations(tmp_path / "demos.npz")


@pytest.mark.parametrize("indices", [[2, 0], [2, 2], [0], [4], [-1]])
def test_cuts_that_overlap(tmp_path: Path, indices: list[int]) -> None:
    obs, acts = np.zeros((4 + len(indices) + 1, 2)), np.zeros((4, 1))
    np.savez(tmp_path / "d.npz", obs=obs, acts=acts, indices=indices, terminal=[True] * (len(indices) + 1))
    with pytest.raises(DataError, match="do not cut its 4 actions"):
        read_demonstrations(tmp_path / "d.npz")


# Pictures and names


def _picture(path: Path, kind: str, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path, format=kind)


@pytest.mark.parametrize("kind", ["EPS", "GIF", "BMP", "TIFF", "WEBP", "PCX"])
def test_only_png_and_jpeg_are_decoded(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was started"))
    _picture(tmp_path / "success" / "a.png", kind)
    _picture(tmp_path / "success" / "b.png", "PNG")
    _picture(tmp_path / "success" / "c.png", "JPEG")
    found = list(FORMATS["folder"].read(tmp_path))
    assert [type(item) for item in found] == [Fault, Episode, Episode]
    assert "not a readable picture" in found[0].reason  # type: ignore[union-attr]


def test_sizes_are_checked_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _picture(tmp_path / "success" / "a.png", "PNG", (13_000, 13_000), "1")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    (fault,) = FORMATS["folder"].read(tmp_path)
    assert isinstance(fault, Fault) and "13000x13000 pixels" in fault.reason


def test_scans_of_a_jpeg_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "success" / "a.jpg"
    path.parent.mkdir()
    Image.new("L", (4000, 4000)).save(path, format="JPEG", progressive=True)
    data = path.read_bytes()
    last = data.rindex(b"\xff\xda")
    path.write_bytes(data[:last] + data[last:-2] * 40 + data[-2:])
    (fault,) = FORMATS["folder"].read(tmp_path)
    assert isinstance(fault, Fault) and "scans" in fault.reason


def test_names_with_digits_that_are_no_numbers(tmp_path: Path) -> None:
    """`"²".isdigit()` is true, and `int("²")` fails."""
    _write(tmp_path / "data.pkl", [_transition()])
    _write(tmp_path / "data.pkl.parts" / "².pkl", [_transition()])
    (episode,) = FORMATS["realworld-pkl"].read(tmp_path)
    assert isinstance(episode, Episode)
    package = Path(safe_pickle.__file__).parent.parent
    using = [file.name for file in package.rglob("*.py") if ".isdigit(" in file.read_text()]
    assert not using, "isdecimal() says what int() can read"
