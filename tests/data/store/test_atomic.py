from __future__ import annotations

import errno
import multiprocessing
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from guerdon.core import atomic
from guerdon.core.atomic import NameTakenError, NumberedFiles, next_number, write_atomic
from guerdon.core.errors import StorageError
from guerdon.core.types import Episode
from guerdon.data.formats import get_format

NUMBER = re.compile(r"(\d+)\.npy")


def writes(content: bytes) -> Callable[[BinaryIO], object]:
    return lambda file: file.write(content)


def names(directory: Path) -> list[str]:
    return sorted(item.name for item in directory.iterdir())


def in_child(run: Callable[[], None]) -> None:
    """Run a function in a forked process; its failure is a failure of the test."""
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_write_and_replace(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", writes(b"one"))
    write_atomic(tmp_path / "a", writes(b"two"))
    assert (tmp_path / "a").read_bytes() == b"two"
    assert names(tmp_path) == ["a"]


def test_exclusive_leaves_the_file_that_is_there(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", writes(b"one"), exclusive=True)
    with pytest.raises(NameTakenError, match=r"cannot write .*/a: it exists already"):
        write_atomic(tmp_path / "a", writes(b"two"), exclusive=True)
    assert (tmp_path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["a"]


def test_exclusive_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*args: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    write_atomic(tmp_path / "a", writes(b"one"), exclusive=True)
    with pytest.raises(NameTakenError):
        write_atomic(tmp_path / "a", writes(b"two"), exclusive=True)
    assert (tmp_path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["a"]


def test_failing_content_leaves_nothing(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise ZeroDivisionError

    write_atomic(tmp_path / "a", writes(b"one"))
    with pytest.raises(ZeroDivisionError):
        write_atomic(tmp_path / "a", fail)
    assert (tmp_path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EACCES, "no permission"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_messages(tmp_path: Path, number: int, reason: str) -> None:
    def fail(file: BinaryIO) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, match=rf"^cannot write .*/a: {reason}$"):
        write_atomic(tmp_path / "a", fail)
    assert names(tmp_path) == []


def test_full_disk_while_torch_saves(tmp_path: Path) -> None:
    """A limit on file sizes stops root too; torch hides the cause behind a RuntimeError."""

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for content in (
            writes(b"x" * 10_000),
            lambda file: torch.save([torch.zeros(9)] * 9 + [torch.zeros(5000)], file),
        ):
            with pytest.raises(StorageError, match="larger than this process may write"):
                write_atomic(tmp_path / "a", content)
        assert names(tmp_path) == []

    in_child(run)


def test_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write .*file/x: a part of the path is a file"):
        atomic.make_directory(tmp_path / "file" / "x")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        write_atomic(tmp_path / "file" / "x", writes(b""))
    with pytest.raises(StorageError, match="it exists already"):
        atomic.make_directory(tmp_path / "file")


def test_next_number(tmp_path: Path) -> None:
    assert next_number(tmp_path / "missing", NUMBER) == 0
    assert next_number(tmp_path, NUMBER) == 0
    for name in ("000003.npy", "000010.npy", "x.npy", "000099.npy.tmp", ".000098.npy"):
        (tmp_path / name).touch()
    assert next_number(tmp_path, NUMBER) == 11


def test_numbers_continue_and_are_shared(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    b.mkdir()
    (b / "e_000004.x").write_bytes(b"old")
    files = NumberedFiles([a, b], prefix="e_", suffix=".x")
    other = NumberedFiles([a, b], prefix="e_", suffix=".x")
    assert files.write(a, writes(b"1")).name == "e_000005.x"
    assert other.write(b, writes(b"2")).name == "e_000006.x"  # not its own idea of 5
    assert files.write(a, writes(b"3")).name == "e_000007.x"
    assert names(b) == ["e_000004.x", "e_000006.x"]
    assert (b / "e_000004.x").read_bytes() == b"old"


def episode(marker: int, success: bool) -> Episode:
    frames = np.full((2, 3, 3, 3), marker, np.uint8)
    labels = np.full(2, success, np.float32)
    return Episode(frames={"base_camera": frames}, labels=labels, success=success)


@pytest.mark.parametrize("name", ["npy-trajectory", "pkl-episode", "folder", "realworld-pkl", "reward-pt"])
def test_concurrent_writers_lose_nothing(tmp_path: Path, name: str) -> None:
    processes, each = 4, 6
    barrier = multiprocessing.get_context("fork").Barrier(processes)

    def run(process: int) -> None:
        with get_format(name).writer(tmp_path) as writer:
            barrier.wait(30)
            for index in range(each):
                writer.add(episode(process * each + index, bool(index % 2)))

    torch.set_num_threads(1)
    children = [
        multiprocessing.get_context("fork").Process(target=run, args=(process,))
        for process in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * processes
    items: list[Any] = list(get_format(name).read(tmp_path))
    markers = sorted(int(item.frames["base_camera"][0, 0, 0, 0]) for item in items)
    assert markers == list(range(processes * each))
    if name == "pkl-episode":
        numbers = [path.name for path in tmp_path.rglob("*.pkl")]
        assert len(set(numbers)) == len(numbers), "one counter over both directories"
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["npy-trajectory", "pkl-episode", "folder", "realworld-pkl", "reward-pt"])
def test_unwritable_and_full(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^cannot write .*file.*: a part of the path is a file"):
        get_format(name).writer(tmp_path / "file" / "below").close()

    def run() -> None:
        with get_format(name).writer(tmp_path / "full") as writer:
            writer.add(episode(1, True))
        before = {path: path.read_bytes() for path in (tmp_path / "full").rglob("*.*")}
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        noise = np.random.default_rng(0).integers(0, 256, (3, 90, 90, 3), dtype=np.uint8)
        large = Episode(frames={"base_camera": noise}, labels=np.ones(3, np.float32), success=True)
        with (
            pytest.raises(
                StorageError, match=r"^cannot write .*: the file is larger than this process may write$"
            ),
            get_format(name).writer(tmp_path / "full") as writer,
        ):
            writer.add(large)
        assert {path: path.read_bytes() for path in (tmp_path / "full").rglob("*.*")} == before

    in_child(run)
