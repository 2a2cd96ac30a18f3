from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guerdon.core.errors import DataError, UnsafeDataError
from guerdon.data.files import safe_pickle
from guerdon.data.files.rebuild import Allowed, Token
from guerdon.data.files.torch_files import ALLOWED

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(4, dtype=">i4"),
    np.array([True, False]),
    np.array(3.5),
    np.zeros((0, 3), np.uint8),
    np.array(["a", "bcd"]),
    np.array([b"xy", b"z"]),
    np.array([1 + 2j]),
    np.array([{"a": np.arange(3)}, None], dtype=object),
]


def check_equal(have: object, want: object) -> None:
    assert type(have) is type(want)
    if isinstance(want, np.ndarray):
        assert have.dtype == want.dtype and have.shape == want.shape
        for one, other in zip(have.flat, want.flat, strict=True):
            check_equal(one, other)
    elif isinstance(want, torch.Tensor):
        assert have.dtype == want.dtype and torch.equal(have, want)
        assert have.requires_grad == want.requires_grad
    elif isinstance(want, dict):
        assert list(have) == list(want)
        for key in want:
            check_equal(have[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(have) == len(want)
        for one, other in zip(have, want, strict=True):
            check_equal(one, other)
    else:
        assert have == want


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays(array: np.ndarray, protocol: int) -> None:
    data = pickle.dumps({"x": array, "again": array}, protocol)
    have = safe_pickle.loads(data)
    check_equal(have, pickle.loads(data))  # numpy turns foreign byte orders into its own
    assert have["x"] is have["again"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_scalars_and_containers(protocol: int) -> None:
    value = {
        "numpy": [np.float32(1.5), np.bool_(True), np.int64(-3), np.str_("ab"), np.str_(""), np.bytes_(b"q")],
        "plain": (1, -1, 2**70, 1.5, True, None, "ä" * 300, b"\xff\x00", b"", 1 + 2j, bytearray(b"ab")),
        "nested": [[], {}, (), [[(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]], {1: {2: 3}, (1, "a"): 4}],
        "sets": [{1, 2}, frozenset({"a"}), set()],
        "others": [slice(1, None, 2), range(3), OrderedDict(a=1), OrderedDict(), 70000, 300, -70000],
    }
    check_equal(safe_pickle.loads(pickle.dumps(value, protocol)), value)


TENSORS = {
    "float": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "view": torch.arange(12).reshape(3, 4).t()[1:],
    "bool": torch.tensor(True),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "grad": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "others": [torch.float32, torch.Size([1, 2]), torch.device("cpu"), torch.device("cuda", 1)],
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_in_pickles(name: str) -> None:
    for protocol in (2, 4, 5):
        check_equal(safe_pickle.loads(pickle.dumps(TENSORS[name], protocol)), TENSORS[name])


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(tmp_path: Path, zipped: bool) -> None:
    linear = torch.nn.Linear(2, 2)
    value = {**TENSORS, "state": linear.state_dict(), "array": ARRAYS[0], "n": [1, 2.0, "x"]}
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    have = safe_pickle.load_torch(tmp_path / "a.pt")
    check_equal(have, value)
    have["float"][0, 0] = 9.0  # mapped tensors are writable, and the file stays as it is
    assert safe_pickle.load_torch(tmp_path / "a.pt")["float"][0, 0] == 0.0


def test_shared_storage_stays_shared(tmp_path: Path) -> None:
    base = torch.arange(10)
    for zipped in (True, False):
        torch.save([base[:5], base[3:]], tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        first, second = safe_pickle.load_torch(tmp_path / "a.pt")
        first[4] = -1
        assert second[1] == -1


def test_npy(tmp_path: Path) -> None:
    for number, array in enumerate(ARRAYS):
        path = tmp_path / f"{number}.npy"
        np.save(path, array, allow_pickle=True)
        check_equal(safe_pickle.load_npy(path), array)
    np.save(tmp_path / "dict.npy", {"a": ARRAYS[0]}, allow_pickle=True)
    check_equal(safe_pickle.load_npy(tmp_path / "dict.npy").item(), {"a": ARRAYS[0]})


def test_load_takes_open_files(tmp_path: Path) -> None:
    assert safe_pickle.load(io.BytesIO(pickle.dumps([1]))) == [1]
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1]))
    with (tmp_path / "a.pkl").open("rb") as file:
        assert safe_pickle.load(file) == [1]


def test_large_files_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "_MAP_FROM", 10)
    array = np.arange(1000)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(array))
    check_equal(safe_pickle.load(tmp_path / "a.pkl"), array)
    np.save(tmp_path / "a.npy", np.array([array, None], dtype=object), allow_pickle=True)
    check_equal(safe_pickle.load_npy(tmp_path / "a.npy")[0], array)


# Code in files


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.marker),)


def test_payload_is_refused_and_named(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for protocol in range(2, 6):
        data = pickle.dumps([1, Payload(marker)], protocol)
        path = tmp_path / "evil.pkl"
        path.write_bytes(data)
        with pytest.raises(
            UnsafeDataError, match=r"evil\.pkl: asks for posix\.mkdir, which is not plain data"
        ):
            safe_pickle.load(path)
        assert not marker.exists()
    pickle.loads(data)
    assert marker.exists(), "the payload is a live one"


@pytest.mark.parametrize("zipped", [True, False])
def test_payload_in_torch_file(tmp_path: Path, zipped: bool) -> None:
    torch.save({"x": Payload(tmp_path / "ran")}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeDataError, match=r"a\.pt: asks for posix\.mkdir"):
        safe_pickle.load_torch(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_payload_in_npy_and_in_a_tensor(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", {"x": Payload(tmp_path / "ran")}, allow_pickle=True)
    with pytest.raises(UnsafeDataError, match=r"a\.npy: asks for posix\.mkdir"):
        safe_pickle.load_npy(tmp_path / "a.npy")
    inner = io.BytesIO()
    torch.save(Payload(tmp_path / "ran"), inner, _use_new_zipfile_serialization=False)

    class Storage:
        def __reduce__(self) -> object:
            return torch.storage._load_from_bytes, (inner.getvalue(),)

    with pytest.raises(UnsafeDataError, match=r"posix\.mkdir"):
        safe_pickle.loads(pickle.dumps(Storage()))
    assert not (tmp_path / "ran").exists()


def call(function: object, *args: object) -> bytes:
    """A pickle that calls a function by its name."""

    class Call:
        def __reduce__(self) -> object:
            return function, args

    return pickle.dumps(Call(), 4)


def with_global(module: bytes, name: bytes, rest: bytes) -> bytes:
    return b"\x80\x02c" + module + b"\n" + name + b"\n" + rest


FOREIGN = {
    "old protocol": b"cos\nsystem\n(S'true'\ntR.",
    "eval": call(eval, "1"),
    "getattr": call(getattr, 1, "real"),
    "numpy function": with_global(b"numpy", b"load", b"."),
    "numpy memmap": with_global(b"numpy", b"memmap", b"."),
    "torch.load": with_global(b"torch.serialization", b"load", b"."),
    "dotted": b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.",
    "class instance": pickle.dumps(Path("x")),
    "builtin class": with_global(b"builtins", b"set", b")\x81."),
    "instance opcode": b"\x80\x02(ios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02K\x01Q.",
    "state of a function": with_global(b"builtins", b"set", b"}X\x04\x00\x00\x00callK\x01sb."),
    "state of a dict": b"\x80\x02}}b.",
    "calling data": b"\x80\x02K\x01)R.",
    "calling a token": with_global(b"numpy", b"ndarray", b")R."),
    "calling a dtype": with_global(b"torch", b"float32", b")R."),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_ways_to_run_code(name: str) -> None:
    with pytest.raises(UnsafeDataError, match=r"<bytes>: .*nothing was run"):
        safe_pickle.loads(FOREIGN[name])


def test_allowed_functions_cannot_be_changed() -> None:
    for value in ALLOWED.values():
        if isinstance(value, Allowed | Token):
            with pytest.raises(AttributeError):
                value.name = "x"


# Sizes that a file claims


def dtype_then(state: bytes) -> bytes:
    """A float64 dtype whose state is set to what the opcodes in `state` push."""
    return with_global(b"numpy", b"dtype", b"X\x02\x00\x00\x00f8\x89\x88\x87R" + state + b"b.")


BOMBS = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "integer": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"x.",
    "negative integer": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"x.",
    "bytearray of a number": call(bytearray, 1 << 60),
    "set of a range": call(set, range(1 << 60)),
    "new array": call(np._core.multiarray._reconstruct, np.ndarray, (1 << 50,), b"b"),
    "array from a small buffer": call(np._core.numeric._frombuffer, b"abc", np.dtype("u1"), (1 << 50,), "C"),
    "number of another size": call(np._core.multiarray.scalar, np.dtype("f8"), b"abc"),
    "another encoding": with_global(b"_codecs", b"encode", b"X\x01\x00\x00\x00aX\x05\x00\x00\x00zlib_\x86R."),
    "structured dtype": pickle.dumps(np.zeros(2, [("a", "f4")]), 4),
    "date": pickle.dumps(np.zeros(2, "M8[s]"), 4),
    "altered dtype": dtype_then(b"(K\x03X\x01\x00\x00\x00|N}NK\x01K\x01K?t"),
    "nested key": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
    "odd dict": b"\x80\x02}(K\x01u.",
    "items of a number": b"\x80\x02K\x01(K\x01e.",
    "undefined reference": b"\x80\x02h\x07.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_claims_are_checked(name: str) -> None:
    with pytest.raises(DataError, match=r"^<bytes>: [^\n]+$"):
        safe_pickle.loads(BOMBS[name])


def test_object_pointers_cannot_be_made_from_bytes() -> None:
    """Without the check a dtype with altered flags would turn these bytes into addresses of objects."""
    array = np.zeros(1, object)
    function, arguments, state = array.__reduce__()
    _, _, dtype, _, _ = state

    class Forged:
        def __reduce__(self) -> object:
            return function, arguments, (1, (1,), dtype, False, b"A" * 8)

    with pytest.raises(DataError, match="whose data has another size"):
        safe_pickle.loads(pickle.dumps(Forged(), 4))


def test_array_content_is_set_once() -> None:
    array = b"\x8c\x16numpy._core.multiarray\x8c\x0c_reconstruct\x93"
    array += b"\x8c\x05numpy\x8c\x07ndarray\x93K\x00\x85C\x01b\x87R"
    dtype = b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02u1\x89\x88\x87R"
    state = b"(K\x01K\x02\x85" + dtype + b"\x89C\x02abt"
    check_equal(safe_pickle.loads(b"\x80\x04" + array + state + b"b."), np.array([97, 98], np.uint8))
    with pytest.raises(DataError, match="twice"):
        safe_pickle.loads(b"\x80\x04" + array + state + b"b" + state + b"b.")


@pytest.mark.parametrize("size", [(1 << 40,), (3, 5)])
def test_tensor_beyond_its_storage(size: tuple[int, ...]) -> None:
    storage = torch.arange(4)._typed_storage()
    data = call(torch._utils._rebuild_tensor_v2, storage, 0, size, (0,) * len(size), False, OrderedDict())
    with pytest.raises(DataError, match="4 stored elements"):
        safe_pickle.loads(data)
    data = call(torch._utils._rebuild_tensor_v2, storage, 2, (3,), (1,), False, OrderedDict())
    with pytest.raises(DataError, match="out of bounds"):
        safe_pickle.loads(data)


def test_storage_larger_than_its_bytes(tmp_path: Path) -> None:
    torch.save(torch.arange(4), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "old.pt").read_bytes()
    assert data.count(b"K\x04N") == 1
    (tmp_path / "old.pt").write_bytes(data.replace(b"K\x04N", b"\x8a\x05\x00\x00\x00\x00\x01N"))
    with pytest.raises(DataError, match="claims more tensor data than the file holds"):
        safe_pickle.load_torch(tmp_path / "old.pt")
    torch.save(torch.arange(4), tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as old, zipfile.ZipFile(tmp_path / "forged.pt", "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, content[:8] if info.filename.endswith("data/0") else content)
    with pytest.raises(DataError, match="a tensor storage of 8 bytes instead of 32"):
        safe_pickle.load_torch(tmp_path / "forged.pt")


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(DataError, match=r"a\.pt: is a compressed archive"):
        safe_pickle.load_torch(tmp_path / "a.pt")


def test_npy_header_against_file_size(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(100))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"(100,), }     ", b"(10000000000,)").replace(b"00,)  ", b"00,)} ", 1))
    with pytest.raises(
        DataError, match=r"a\.npy: is truncated: its header promises \d+ bytes of data, it has 800"
    ):
        safe_pickle.load_npy(path)
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match="promises 800 bytes of data, it has 799"):
        safe_pickle.load_npy(path)


def test_max_bytes(tmp_path: Path) -> None:
    data = pickle.dumps(b"x" * 1000)
    (tmp_path / "a.pkl").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.pkl: has \d+ bytes or more; at most 100 are read"):
        safe_pickle.load(tmp_path / "a.pkl", max_bytes=100)
    with pytest.raises(DataError, match="at most 100 are read"):
        safe_pickle.load(io.BytesIO(data), max_bytes=100)


def test_number_of_objects_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "memory_budget", lambda: 1000 * 256)
    with pytest.raises(DataError, match="more objects than fit into memory"):
        safe_pickle.loads(b"\x80\x04" + b"\x8f" * 2000 + b".")


# Damage


def test_missing_empty_and_directory(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for read in (safe_pickle.load, safe_pickle.load_npy, safe_pickle.load_torch):
        with pytest.raises(DataError, match=r"missing: does not exist$"):
            read(tmp_path / "missing")
        with pytest.raises(DataError, match=r"empty: is empty$"):
            read(tmp_path / "empty")
        with pytest.raises(DataError, match=r"cannot be read: Is a directory$"):
            read(tmp_path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "a"
    value = {"a": np.arange(5), "b": [1, "two", 3.0, b"four", torch.arange(3)], "c": {"d": (1, 2)}}
    pickled, legacy, npy, zipped = pickle.dumps(value, 4), io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save(value, legacy, _use_new_zipfile_serialization=False)
    torch.save(value, zipped)
    np.save(npy, np.array(value, dtype=object), allow_pickle=True)
    cases = [
        (safe_pickle.load, pickled, 1),
        (safe_pickle.load_torch, legacy.getvalue(), 7),
        (safe_pickle.load_npy, npy.getvalue(), 3),
        (safe_pickle.load_torch, zipped.getvalue(), 101),
    ]
    for read, data, step in cases:
        for end in range(0, len(data) - 1, step):
            path.write_bytes(data[:end])
            with pytest.raises(DataError, match=r"/a: is [^\n]+$"):
                read(path)


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=1, max_size=60))
def test_garbage(data: bytes) -> None:
    for prefix in (b"", b"\x80\x04"):
        try:
            safe_pickle.loads(prefix + data)
        except DataError as error:
            assert "\n" not in str(error) and str(error).startswith("<bytes>: ")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_flipped_bytes(data: st.DataObject) -> None:
    """Damage inside a valid pickle gives data or a DataError, and nothing else."""
    pickled = bytearray(pickle.dumps({"a": np.arange(3.0), "t": torch.ones(2), "l": [1, {2}, "x"]}, 4))
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    try:
        safe_pickle.loads(bytes(pickled))
    except DataError as error:
        assert "\n" not in str(error)
