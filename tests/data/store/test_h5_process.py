"""HDF5 files that end, hold up or blow up their reader: the other episodes are read all the same."""

import os
import signal
import threading
import time

import h5py
import numpy as np
import pytest

from guerdon.core.types import Episode, Fault
from guerdon.data.formats import h5_process
from guerdon.data.formats.maniskill_h5 import ManiSkillH5

STEPS = 3


@pytest.fixture
def file(tmp_path):
    """Three trajectories with frames."""
    path = tmp_path / "trajectory.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as opened:
        for number in range(3):
            group = opened.create_group(f"traj_{number}")
            group["actions"] = rng.random((STEPS, 4), np.float32)
            group["success"] = np.array([False, False, number == 0])
            frames = rng.integers(0, 255, (STEPS + 1, 8, 8, 3), np.uint8)
            group.create_dataset("obs/sensor_data/base_camera/rgb", data=frames, compression="gzip")
            group["obs/agent/qpos"] = rng.random((STEPS + 1, 9), np.float32)
    return path


def read(path):
    items = list(ManiSkillH5().read(path))
    return [i for i in items if isinstance(i, Episode)], [i for i in items if isinstance(i, Fault)]


def test_episodes_come_back_exactly(file):
    episodes, faults = read(file)
    assert not faults and [episode.success for episode in episodes] == [True, False, False]
    with h5py.File(file) as opened:
        for number, episode in enumerate(episodes):
            group = opened[f"traj_{number}"]
            np.testing.assert_array_equal(episode.actions, group["actions"][:])
            np.testing.assert_array_equal(
                episode.frames["base_camera"], group["obs/sensor_data/base_camera/rgb"][1:]
            )
            np.testing.assert_array_equal(episode.initial_state, group["obs/agent/qpos"][0])
            assert episode.source.endswith(f"trajectory.h5:traj_{number}")


@pytest.mark.parametrize("how", ["SIGSEGV", "took too long"])
def test_a_reader_that_crashes_or_hangs_costs_one_episode(file, monkeypatch, how):
    real, begun = h5_process._Child.answer, []

    def answer(child, seconds):
        if begun == ["traj_0", "traj_1"]:
            begun.append("an end")
            if how != "SIGSEGV":
                raise TimeoutError
            os.kill(child._process.pid, signal.SIGSEGV)
            child._process.wait()
            raise EOFError
        head, arrays = real(child, seconds)
        begun.extend([head["name"]] if head["kind"] == "begin" else [])
        return head, arrays

    monkeypatch.setattr(h5_process._Child, "answer", answer)
    episodes, faults = read(file)
    assert begun == ["traj_0", "traj_1", "an end", "traj_2"]
    assert [fault.path.rpartition(":")[2] for fault in faults] == ["traj_1"]
    assert how in faults[0].reason
    assert [episode.source[-6:] for episode in episodes] == ["traj_0", "traj_2"]


def test_a_reader_that_really_hangs_is_ended(file, monkeypatch):
    assert len(read(file)[0]) == 3
    monkeypatch.setattr(h5_process, "EPISODE_SECONDS", 0.5)
    real = h5_process._Child.ask
    children = []

    def ask(child, request):
        if "path" in request:
            children.append(child._process)
            os.kill(child._process.pid, signal.SIGSTOP)
        real(child, request)

    monkeypatch.setattr(h5_process._Child, "ask", ask)
    episodes, (fault,) = read(file)
    assert not episodes and "took too long" in fault.reason
    assert [process.poll() for process in children] == [-signal.SIGKILL]


def test_chains_of_hard_links_do_not_hang(file):
    with h5py.File(file, "a") as opened:
        group = opened["traj_1/obs/agent"]
        for _ in range(40):  # two names for each next group: 2 ** 40 ways to the end
            below = group.create_group("left")
            group["right"] = below
            group = below
    episodes, faults = read(file)
    assert len(episodes) == 2 and "linked twice" in faults[0].reason


def test_never_written_data_sets_are_refused(file):
    with h5py.File(file, "a") as opened:
        del opened["traj_0/obs"], opened["traj_1/obs"]
        shape = (STEPS + 1, 20_000, 20_000, 3)
        opened["traj_0"].create_dataset("obs/sensor_data/base_camera/rgb", shape, "u1", chunks=(1, 64, 64, 3))
        opened["traj_1"].create_dataset("obs/sensor_data/base_camera/rgb", shape, "u1")
        opened["traj_2"].create_dataset("rewards", (10**12,), "f4", chunks=(1000,))
    assert file.stat().st_size < 1 << 20
    episodes, faults = read(file)
    assert not episodes and len(faults) == 3
    assert "bytes" in faults[0].reason and "at most" in faults[2].reason


def test_vectors_without_entries_do_not_count_as_a_thousand_million_frames(file):
    with h5py.File(file, "a") as opened:
        del opened["traj_0/actions"]
        opened["traj_0"].create_dataset("actions", (10**9, 0), "f4")
    episodes, faults = read(file)
    assert len(episodes) == 2 and "1000000000 actions" in faults[0].reason


def test_a_listing_that_cannot_be_read_is_a_fault(file):
    """Bytes of the root group's own tables: libhdf5 fails while it lists the groups."""
    content = bytearray(file.read_bytes())
    for mark in (b"SNOD", b"HEAP", b"TREE"):
        start = content.index(mark)
        content[start : start + 4] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    episodes, faults = read(file)
    assert not episodes and faults[0].path.endswith("trajectory.h5")


def test_two_readers_at_once(file):
    """Each has a child of its own while it reads."""
    readers = [ManiSkillH5().read(file) for _ in range(2)]
    pairs = list(zip(*readers, strict=True))
    assert len(pairs) == 3
    for left, right in pairs:
        np.testing.assert_array_equal(left.actions, right.actions)


def test_a_child_that_is_not_needed_ends(file, monkeypatch):
    monkeypatch.setattr(h5_process, "IDLE_SECONDS", 3.0)  # the fuzzing keeps its children for longer
    monkeypatch.setattr(h5_process._Child, "_idle", [])
    assert len(read(file)[0]) == 3
    child = h5_process._Child._idle[-1]
    ended = threading.Event()
    for _ in range(600):
        if child._process.poll() is not None:
            ended.set()
            break
        time.sleep(0.1)
    assert ended.is_set()
    assert len(read(file)[0]) == 3  # and a new one takes its place
    for left in {child, *h5_process._Child._idle}:
        left._is_idle = False
        left.end_unless_released()
