"""The recording core: nothing mixed up between environments, nothing lost, nothing overwritten too early."""

import threading
import time

import numpy as np
import pytest

from guerdon.core.errors import DataError, StorageError
from guerdon.core.types import Episode
from guerdon.data.collect.archive import EpisodeArchive
from guerdon.data.collect.recorder import EpisodeRecorder
from guerdon.data.formats.base import EpisodeWriter


class Memory(EpisodeWriter):
    """Keeps copies; can be slow, and can fail like a full disk."""

    def __init__(self, delay=0.0, fail_after=None):
        self.episodes, self.delay, self.fail_after, self.closed = [], delay, fail_after, False

    def add(self, episode):
        time.sleep(self.delay)
        if self.fail_after is not None and len(self.episodes) >= self.fail_after:
            raise StorageError("cannot write here: the disk is full")
        frames = {name: images.copy() for name, images in episode.frames.items()}
        self.episodes.append(
            Episode(
                frames=frames,
                labels=episode.labels.copy(),
                success=episode.success,
                complete=episode.complete,
                seed=episode.seed,
            )
        )
        return str(len(self.episodes))

    def close(self):
        self.closed = True


def step_frames(envs, step, size=8):
    """Frames that tell their environment and step."""
    frames = np.zeros((len(envs), size, size, 3), np.uint8)
    frames[..., 0], frames[..., 1] = np.asarray(envs)[:, None, None], step
    return {"base_camera": frames}


def run(recorder, lengths):
    """Record episodes of the given lengths, one list per environment, in lockstep."""
    queues = [list(items) for items in lengths]
    left = [queue.pop(0) for queue in queues]
    at = [0] * len(queues)
    while any(left):
        envs = np.array([env for env, rest in enumerate(left) if rest])
        frames = step_frames(envs, 0)
        frames["base_camera"][..., 1] = np.array([at[env] for env in envs])[:, None, None]
        recorder.record(envs, frames, np.zeros(len(envs)))
        for env in envs.tolist():
            at[env] += 1
            left[env] -= 1
            if left[env] == 0:
                recorder.end(env)
                at[env] = 0
                left[env] = queues[env].pop(0) if queues[env] else 0


@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_episodes_of_all_environments_arrive_whole(delay):
    lengths = [[5, 3, 9], [2, 2, 2, 2, 2], [17], [1, 1, 30]]
    memory = Memory(delay)
    archive = EpisodeArchive(memory)
    recorder = EpisodeRecorder(4, archive.add, capacity=4)  # too small on purpose: the pool must grow
    run(recorder, lengths)
    archive.close()
    found = [[] for _ in lengths]
    for episode in memory.episodes:
        frames = episode.frames["base_camera"]
        env = int(frames[0, 0, 0, 0])
        assert (frames[..., 0] == env).all()  # no frame of another environment
        np.testing.assert_array_equal(frames[:, 0, 0, 1], np.arange(len(frames)))  # all steps, in order
        found[env].append(len(frames))
    assert found == lengths
    assert memory.closed


def test_a_slow_disk_makes_stepping_wait_instead_of_growing(monkeypatch):
    monkeypatch.setattr("guerdon.data.collect.recorder.POOL_BYTES", 0)  # one spare slot
    gate, ended = threading.Event(), []

    class Slow(Memory):
        def add(self, episode):
            gate.wait()
            return super().add(episode)

    def hand_on(episode, release):
        ended.append(episode)
        archive.add(episode, release)

    memory = Slow()
    archive = EpisodeArchive(memory)
    recorder = EpisodeRecorder(2, hand_on, capacity=4)
    stepping = threading.Thread(target=run, args=(recorder, [[2] * 6, [2] * 6]))
    stepping.start()
    try:
        deadline = time.monotonic() + 60
        while len(ended) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        stepping.join(0.3)
        assert stepping.is_alive() and len(ended) == 2  # three slots, two of them with the writer: it waits
        assert not memory.episodes
    finally:
        gate.set()
        stepping.join(60)
    archive.close()
    assert len(memory.episodes) == len(ended) == 12


def test_a_failing_write_stops_the_run_and_keeps_what_was_finished():
    memory = Memory(fail_after=3)
    archive = EpisodeArchive(memory)
    recorder = EpisodeRecorder(1, archive.add)
    with pytest.raises(StorageError, match="the disk is full"):
        for _ in range(1000):
            run(recorder, [[2]])
            time.sleep(0.001)
    with pytest.raises(StorageError, match="the disk is full"):
        archive.close()
    assert len(memory.episodes) == 3
    assert memory.closed


def test_an_unforeseen_error_of_the_writer_is_not_swallowed():
    class Broken(Memory):
        def add(self, episode):
            raise ZeroDivisionError("oops")

    background = EpisodeArchive(Broken())
    background.add(
        Episode(frames={"c": np.zeros((1, 2, 2, 3), np.uint8)}, labels=np.zeros(1, np.float32), success=False)
    )
    with pytest.raises(StorageError, match="oops"):
        background.flush()
    with pytest.raises(StorageError, match="oops"):
        background.close()


def test_limits_hold_for_successes_and_failures_apart():
    memory = Memory()
    archive = EpisodeArchive(memory, max_success=2, max_failure=1, num_success=1)
    recorder = EpisodeRecorder(1, archive.add)
    for label in (1, 1, 1, 0, 0):
        recorder.record(np.array([0]), step_frames([0], 0), np.array([label]))
        recorder.end(0)
    archive.close()
    assert [episode.success for episode in memory.episodes] == [True, False]
    assert (archive.num_success, archive.num_failure, archive.num_dropped) == (2, 1, 3)
    assert archive.is_full
    assert archive.progress() == "success 2/2 fail 1/1"


def test_unfinished_episodes_are_marked_and_count_for_nothing():
    memory = Memory()
    archive = EpisodeArchive(memory, max_failure=1)
    recorder = EpisodeRecorder(2, archive.add)
    recorder.record(np.array([0, 1]), step_frames([0, 1], 0), np.zeros(2))
    recorder.end(0)
    assert recorder.truncate() == 1
    archive.close()
    assert (archive.num_failure, archive.num_unfinished) == (1, 1)
    assert [e.complete for e in memory.episodes] == [True, False]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ({"base_camera": np.zeros((1, 9, 9, 3), np.uint8)}, r"frames/base_camera has shape \[1, 9, 9, 3\]"),
        ({"wrist_camera": np.zeros((1, 8, 8, 3), np.uint8)}, "cameras and fields must stay the same"),
        ({}, "cameras and fields must stay the same"),
    ],
)
def test_a_change_of_cameras_or_sizes_is_refused(frames, message):
    recorder = EpisodeRecorder(1, lambda episode, release: None)
    recorder.record(np.array([0]), step_frames([0], 0), np.zeros(1))
    with pytest.raises(DataError, match=message):
        recorder.record(np.array([0]), frames, np.zeros(1))


def test_dropping_frees_the_slot():
    recorder = EpisodeRecorder(1, lambda episode, release: release(), capacity=2)

    def drop_often():
        for _ in range(20):  # more often than there are slots
            recorder.record(np.array([0]), step_frames([0], 0), np.zeros(1))
            recorder.drop(0)

    thread = threading.Thread(target=drop_often, daemon=True)  # without a free slot it would wait for ever
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert recorder.lengths[0] == 0


@pytest.mark.parametrize("between", ["nothing", "drop", "end"])
def test_an_episode_has_its_own_beginning_or_none(between):
    episodes = []

    def keep(episode, release):
        episodes.append((episode.seed, episode.initial_state))
        release()

    recorder = EpisodeRecorder(2, keep)
    both = np.array([0, 1])
    recorder.reset(both, np.array([[1.0], [2.0]]), np.array([7, 8]))
    if between != "nothing":
        recorder.record(both, step_frames([0, 1], 0), np.zeros(2))
        getattr(recorder, between)(0)
        assert len(episodes) == (between == "end")
        episodes.clear()
    if between == "nothing":
        recorder.reset(np.array([0]), None)
    recorder.record(both, step_frames([0, 1], 1), np.zeros(2))
    recorder.end(0)
    recorder.end(1)
    assert episodes == [(None, None), (8, np.array([2.0]))]
