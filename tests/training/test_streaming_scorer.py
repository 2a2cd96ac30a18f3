"""PendingScores streaming: the same verdicts as scores everything in the end, whatever comes in between."""

import threading

import numpy as np
import pytest

from guerdon.core.errors import DataError
from guerdon.rewards.image.scorer import MINI_BATCH, REQUEST_MIN_FRAMES, Scores, StreamingScorer


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
def streaming(judge):
    streaming = StreamingScorer(judge)
    yield streaming
    streaming.close()


def make_frames(count, seed=0):
    return {"camera": np.random.default_rng(seed).integers(0, 255, (count, 1, 1, 1), dtype=np.uint8)}


@pytest.mark.parametrize("num_envs", [3, 64, 1500])
def test_all_frames_are_judged_once_in_order_and_in_whole_mini_batches(judge, streaming, num_envs):
    total = 5 * num_envs
    frames = {"camera": np.zeros((total, 1, 1, 1), np.uint8)}
    made = make_frames(total)["camera"]
    for rollout in range(2):
        streaming.reset()
        for step in range(5):
            rows = slice(step * num_envs, (step + 1) * num_envs)
            frames["camera"][rows] = made[rows]
            streaming.ready(frames, rows.stop, last=step == 4)
        verdict = streaming.scores()
        np.testing.assert_array_equal(verdict.prob_success, made[:, 0, 0, 0])
        np.testing.assert_array_equal(verdict.disagreement, -made[:, 0, 0, 0].astype(np.float32))
        made = make_frames(total, seed=rollout + 1)["camera"]
    starts = [start for start, _ in judge.asked]
    assert all(start % MINI_BATCH == 0 for start in starts)
    assert starts == 2 * list(range(0, total, REQUEST_MIN_FRAMES))


def test_frames_are_judged_before_the_rollout_is_over(judge, streaming):
    frames = make_frames(3 * REQUEST_MIN_FRAMES)
    streaming.reset()
    streaming.ready(frames, REQUEST_MIN_FRAMES)
    assert streaming.scores().prob_success.shape == (REQUEST_MIN_FRAMES,)
    assert judge.asked == [(0, REQUEST_MIN_FRAMES)]


def test_what_a_broken_rollout_left_is_dropped(judge, streaming):
    judge.may_go.clear()
    streaming.reset()
    streaming.ready(make_frames(3 * REQUEST_MIN_FRAMES), 3 * REQUEST_MIN_FRAMES)
    streaming.reset()
    judge.may_go.set()
    streaming.ready(make_frames(10, seed=4), 10, last=True)
    np.testing.assert_array_equal(
        streaming.scores().prob_success, make_frames(10, seed=4)["camera"][:, 0, 0, 0].astype(np.float32)
    )


def test_an_error_of_the_judge_is_raised_with_the_verdict(streaming):
    frames = make_frames(20)
    frames["camera"][7] = 255
    streaming.reset()
    streaming.ready(frames, 20, last=True)
    with pytest.raises(DataError, match="a white frame"):
        streaming.scores()
