"""Writers in processes of their own: side by side, and killed at the worst moment."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from guerdon.core.atomic import NumberedFiles, write_atomic
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import get_format, realworld_pkl
from guerdon.data.formats.realworld_pkl import RealworldPklWriter, RecordedEpisode

FORK = multiprocessing.get_context("fork")
FORMATS = ("native", "npy-trajectory", "pkl-episode", "folder", "realworld-pkl", "reward-pt")
LEFT = ".999999-abcdef012345.tmp"


def episode(marker, success=True, steps=2):
    frames = np.full((steps, 3, 3, 3), marker, np.uint8)
    labels = np.full(steps, success, np.float32)
    return Episode(frames={"base_camera": frames}, labels=labels, success=success)


def recorded(marker):
    made = episode(marker)
    return RecordedEpisode(episode=made, at_target=made.labels > 0.5)


def markers(path, name):
    items = list(get_format(name).read(path))
    assert not [item for item in items if isinstance(item, Fault)]
    return sorted(int(item.frames["base_camera"][0, 0, 0, 0]) for item in items)


def run_all(*functions):
    """Each in a process of its own, at the same time."""
    children = [FORK.Process(target=function) for function in functions]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0] * len(children)


# Several recordings in one folder


def test_two_recordings_in_one_folder_lose_nothing(tmp_path):
    start = FORK.Barrier(2)

    def record(first, count):
        writer = RealworldPklWriter(tmp_path)
        start.wait(60)
        for marker in range(first, first + count):
            writer.add(recorded(marker))
        writer.close()

    run_all(lambda: record(0, 14), lambda: record(100, 10))
    assert markers(tmp_path, "realworld-pkl") == [*range(14), *range(100, 110)]
    assert [item.name for item in tmp_path.iterdir()] == ["data.pkl"]


def test_a_recording_goes_on_while_another_writer_finishes_the_file(tmp_path):
    recording = RealworldPklWriter(tmp_path)
    recording.add(recorded(0))
    with get_format("realworld-pkl").writer(tmp_path) as other:
        other.add(episode(1))
        other.add(episode(2))
    recording.add(recorded(3))  # its own count of transitions is behind by now
    assert markers(tmp_path, "realworld-pkl") == [0, 1, 2, 3]
    recording.close()
    assert markers(tmp_path, "realworld-pkl") == [0, 1, 2, 3]


def test_parts_of_an_older_version_are_read_and_joined(tmp_path):
    RealworldPklWriter(tmp_path / "new").add(recorded(7))
    (part,) = (tmp_path / "new").glob("data.pkl.parts/*.pkl")
    with get_format("realworld-pkl").writer(tmp_path / "old") as writer:
        writer.add(episode(5))  # two transitions
    parts = tmp_path / "old" / "data.pkl.parts"
    parts.mkdir()
    (parts / "00000000.pkl").write_bytes(part.read_bytes())  # in the file already, by its number
    (parts / "00000002.pkl").write_bytes(part.read_bytes())
    assert markers(tmp_path / "old", "realworld-pkl") == [5, 7]
    RealworldPklWriter(tmp_path / "old").close()
    assert markers(tmp_path / "old", "realworld-pkl") == [5, 7]
    assert not parts.exists()


def test_a_part_that_is_joined_while_it_is_read_is_read_from_the_file(tmp_path, monkeypatch):
    writer = RealworldPklWriter(tmp_path)
    writer.add(recorded(7))
    real = realworld_pkl._load_list

    def too_late(path):
        monkeypatch.setattr(realworld_pkl, "_load_list", real)
        writer.close()
        return real(path)

    monkeypatch.setattr(realworld_pkl, "_load_list", too_late)
    (item,) = realworld_pkl.read_recorded(tmp_path)
    assert isinstance(item, RecordedEpisode)


# Killed writers

WRITER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from guerdon.data.formats import get_format
    from guerdon.core.types import Episode

    path, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    writer = get_format(name).writer(path)
    for marker in range(250):
        frames = np.full((steps, 3, 3, 3), marker, np.uint8)
        labels = (np.arange(steps) >= steps // 2).astype(np.float32)
        writer.add(Episode(frames={"base_camera": frames}, labels=labels, success=True))
        print(marker, flush=True)  # said only after the episode is safe
    """
)


def start_writer(path, name, steps):
    command = [sys.executable, "-c", WRITER, str(path), name, str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process):
    """Kill -9; returns what it had said."""
    process.send_signal(signal.SIGKILL)
    return [int(line) for line in process.communicate()[0].splitlines()]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "reward-pt"])
def test_a_killed_writer_costs_no_finished_episode(tmp_path, name):
    process = start_writer(tmp_path / "data", name, 2)
    first = [int(process.stdout.readline()) for _ in range(5)]
    said = first + kill(process)
    found = [int(item.frames["base_camera"][0, 0, 0, 0]) for item in get_format(name).read(tmp_path / "data")
             if isinstance(item, Episode)]  # fmt: skip
    assert sorted(found)[: len(said)] == said
    assert len(found) <= len(said) + 1  # on disk, but killed before it was said


def test_an_episode_of_a_folder_that_was_cut_short_is_not_taken_for_a_whole_one(tmp_path):
    steps = 4000  # takes seconds
    process = start_writer(tmp_path, "folder", steps)
    limit = time.monotonic() + 120
    while len(list(tmp_path.glob("failure/*_frame*.png"))) < 5:
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.01)
    assert kill(process) == []
    there = len(list(tmp_path.glob("*/*.png")))
    assert 5 <= there < steps
    (fault,) = get_format("folder").read(tmp_path)
    assert isinstance(fault, Fault)
    assert "its writer was killed" in fault.reason
    with get_format("folder").writer(tmp_path) as writer:
        writer.add(episode(9))
    assert markers(tmp_path, "folder") == [9]
    assert len(list(tmp_path.glob("*/*.png"))) == 2
    assert sorted(item.name for item in tmp_path.iterdir()) == ["failure", "success"]


def test_a_folder_that_others_made_is_read_as_before(tmp_path):
    with get_format("folder").writer(tmp_path) as writer:
        writer.add(episode(1, steps=3))
    next(tmp_path.glob("success/*frame001.png")).unlink()  # a picture that somebody did not like
    (whole,) = get_format("folder").read(tmp_path)
    assert whole.complete and whole.num_frames == 2


# What they leave behind


def write_and_hang(path):
    def hang(file):
        file.write(b"half")
        file.flush()
        time.sleep(600)

    write_atomic(path, hang)


def wait_for_temp(directory, but=()):
    limit = time.monotonic() + 60
    while not (
        found := [item for item in directory.glob(".[0-9]*.tmp") if item not in but and item.stat().st_size]
    ):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found[0]


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    (tmp_path / ".notes.tmp").write_bytes(b"somebody's own")
    dead, alive = (FORK.Process(target=write_and_hang, args=(tmp_path / name,)) for name in "ab")
    try:
        dead.start()
        left = wait_for_temp(tmp_path)
        alive.start()
        used = wait_for_temp(tmp_path, [left])
        dead.kill()
        dead.join()
        write_atomic(tmp_path / "c", lambda file: file.write(b"whole"))
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "c", tmp_path / ".notes.tmp", used])
    finally:
        alive.kill()
        alive.join()


def test_clearing_up_beside_many_writers_takes_nothing_from_them(tmp_path):
    start = FORK.Barrier(4)

    def write(number):
        files = NumberedFiles([tmp_path], prefix=f"{number}_", suffix=".x")
        start.wait(60)
        for index in range(60):
            files.write(tmp_path, lambda file, index=index: file.write(b"%d" % index))
            write_atomic(tmp_path / f"{number}.last", lambda file, index=index: file.write(b"%d" % index))

    run_all(*[lambda number=number: write(number) for number in range(4)])
    for number in range(4):
        assert sorted(int(item.read_bytes()) for item in tmp_path.glob(f"{number}_*.x")) == [*range(60)]
        assert (tmp_path / f"{number}.last").read_bytes() == b"59"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_cleared_by_its_next_writer(tmp_path, name):
    with get_format(name).writer(tmp_path) as writer:
        for success in (True, False):
            writer.add(episode(1, success))
    places = [
        tmp_path,
        *(Path(place) / folder for place, folders, _ in os.walk(tmp_path) for folder in folders),
    ]
    if name != "native":  # its writer looks after all of the store; the others after where they write
        places = [place for place in places if any(item.is_file() for item in place.iterdir())]
    assert places
    for place in places:
        (place / LEFT).write_bytes(b"half")
    with get_format(name).writer(tmp_path) as writer:
        for success in (True, False):
            writer.add(episode(2, success))
    assert not list(tmp_path.rglob(LEFT))
    assert markers(tmp_path, name) == [1, 1, 2, 2]
