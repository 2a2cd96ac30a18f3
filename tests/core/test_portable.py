"""Locks, preallocation and syncs where a system lacks what Linux has."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from guerdon.core import portable

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def without_posix(tmp_path_factory):
    script = Path(__file__).with_name("without_posix.py")
    place = tmp_path_factory.mktemp("work")
    command = [sys.executable, script, place]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_every_module_is_imported_and_a_store_is_written_without_them(without_posix):
    assert without_posix.returncode == 0, without_posix.stderr
    assert without_posix.stdout.splitlines()[-1] == "works"
    left_out = without_posix.stdout.split()[2:-1]
    assert all(
        name.startswith(("guerdon.distributed", "guerdon.integrations.sb3", "guerdon.envs.maniskill"))
        for name in left_out
    ), left_out
    assert without_posix.stderr.count("files cannot be locked") == 1


class Windows:
    """`msvcrt` as far as it is used; locks belong to open files, as there."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self):
        self.held, self.refusals = {}, 0

    def locking(self, handle, mode, count):
        assert (os.lseek(handle, 0, os.SEEK_CUR), count) == (1 << 40, 1)
        file = os.fstat(handle).st_ino
        if mode == self.LK_UNLCK:
            del self.held[file]
        elif self.held.setdefault(file, handle) != handle:
            self.refusals += 1
            if self.refusals == 3:
                del self.held[file]  # the other one ends
            raise PermissionError(13, "Permission denied")


def test_locks_of_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(portable, "fcntl", None)
    monkeypatch.setattr(portable, "msvcrt", Windows())
    monkeypatch.setattr(portable, "POLL_SECONDS", 0.0)
    first, second = (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2))
    os.write(first, b"text")
    assert portable.lock(first, wait=False)
    assert os.lseek(first, 0, os.SEEK_CUR) == 4  # writing goes on where it was
    with pytest.raises(BlockingIOError):
        portable.lock(second, wait=False)
    assert portable.lock(second)  # waits for the other one
    portable.unlock(second)
    assert portable.msvcrt.held == {} and portable.msvcrt.refusals == 3
    os.close(first)
    os.close(second)


def test_a_system_without_locks_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(portable, "fcntl", None)
    monkeypatch.setattr(portable, "msvcrt", None)
    monkeypatch.setattr(portable, "_told", set())
    caplog.set_level(logging.WARNING, "guerdon")
    assert not portable.lock(0) and not portable.lock(0, wait=False)
    portable.unlock(0)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "files cannot be locked on this system"
    ]


def test_writing_at_a_place_without_pwritev(tmp_path, monkeypatch):
    whole = os.write
    plain = SimpleNamespace(
        lseek=os.lseek, SEEK_SET=os.SEEK_SET, write=lambda handle, data: whole(handle, data[:3])
    )
    for name, module in (("few", plain), ("many", os)):
        monkeypatch.setattr(portable, "os", module)
        with (tmp_path / name).open("w+b") as file:
            parts = [memoryview(b"first"), memoryview(b""), memoryview(b"second")]
            portable.write_at(file.fileno(), parts, 2)
            file.seek(0)
            assert file.read() == b"\0\0firstsecond"
