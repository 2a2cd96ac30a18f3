"""Judging ahead: the same verdicts as judging everything in the end, whatever comes in between."""

import threading

import numpy as np
import pytest

from guerdon.core.errors import DataError
from guerdon.rewards.image.scorer import Scores
from guerdon.rewards.image.worker import MINI_BATCH
from guerdon.training.ahead import AHEAD_FRAMES, StreamingScorer


class Judge:
    """Says of every frame what its first pixel says; notes what it was asked."""

    def __init__(self):
        self.asked = []
        self.may_go = threading.Event()
        self.may_go.set()

    def score_some(self, frames, start, stop):
        assert self.may_go.wait(30)
        self.asked.append((start, stop))
        prob = frames["camera"][start:stop, 0, 0, 0].astype(np.float32)
        if (prob == 255).any():
            raise DataError("a white frame")
        return Scores(prob_success=prob, disagreement=-prob)


@pytest.fixture
def judge():
    return Judge()


@pytest.fixture
def ahead(judge):
    ahead = StreamingScorer(judge)
    yield ahead
    ahead.close()


def make_frames(count, seed=0):
    return {"camera": np.random.default_rng(seed).integers(0, 255, (count, 1, 1, 1), dtype=np.uint8)}


@pytest.mark.parametrize("num_envs", [3, 64, 1500])
def test_all_frames_are_judged_once_in_order_and_in_whole_mini_batches(judge, ahead, num_envs):
    total = 5 * num_envs
    frames = {"camera": np.zeros((total, 1, 1, 1), np.uint8)}
    made = make_frames(total)["camera"]
    for rollout in range(2):
        ahead.begin()
        for step in range(5):
            rows = slice(step * num_envs, (step + 1) * num_envs)
            frames["camera"][rows] = made[rows]
            ahead.ready(frames, rows.stop, last=step == 4)
        verdict = ahead.verdict()
        np.testing.assert_array_equal(verdict.prob_success, made[:, 0, 0, 0])
        np.testing.assert_array_equal(verdict.disagreement, -made[:, 0, 0, 0].astype(np.float32))
        made = make_frames(total, seed=rollout + 1)["camera"]
    starts = [start for start, _ in judge.asked]
    assert all(start % MINI_BATCH == 0 for start in starts)
    assert starts == 2 * list(range(0, total, AHEAD_FRAMES))


def test_frames_are_judged_before_the_rollout_is_over(judge, ahead):
    frames = make_frames(3 * AHEAD_FRAMES)
    ahead.begin()
    ahead.ready(frames, AHEAD_FRAMES)
    assert ahead.verdict().prob_success.shape == (AHEAD_FRAMES,)
    assert judge.asked == [(0, AHEAD_FRAMES)]


def test_what_a_broken_rollout_left_is_dropped(judge, ahead):
    judge.may_go.clear()
    ahead.begin()
    ahead.ready(make_frames(3 * AHEAD_FRAMES), 3 * AHEAD_FRAMES)
    ahead.begin()
    judge.may_go.set()
    ahead.ready(make_frames(10, seed=4), 10, last=True)
    np.testing.assert_array_equal(
        ahead.verdict().prob_success, make_frames(10, seed=4)["camera"][:, 0, 0, 0].astype(np.float32)
    )


def test_an_error_of_the_judge_is_raised_with_the_verdict(ahead):
    frames = make_frames(20)
    frames["camera"][7] = 255
    ahead.begin()
    ahead.ready(frames, 20, last=True)
    with pytest.raises(DataError, match="a white frame"):
        ahead.verdict()
