"""Asynchronous runs on Ray: several env workers at their own pace, and workers that are killed."""

import itertools
import json
import os
import signal

import numpy as np
import pytest

from guerdon.cli.train import train
from guerdon.config import load_config
from guerdon.training.trainer import EmbodiedRunner
from tests.training.counting import LENGTH
from tests.training.test_asynchronous import ASYNC, SHORT, lines, steps_of
from tests.training.test_embodied import SAC

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

TWO_ENVS = ["engine=ray", "+cluster.component_placement.env=0-1"]


def stretches(counts):
    """An environment's own counts, cut where it began anew: each must go 1, 2, 3, ..."""
    starts = [*np.flatnonzero(counts == 1), len(counts)]
    assert starts[0] == 0
    parts = [counts[start:stop] for start, stop in itertools.pairwise(starts)]
    for part in parts:
        np.testing.assert_array_equal(part, np.arange(1, len(part) + 1))
    return parts


def test_a_killed_env_worker_loses_only_what_was_under_way(tmp_path):
    (tmp_path / "armed").touch()
    more = [
        *TWO_ENVS,
        "learner.save_interval=100000",
        "asynchronous.max_in_flight=2",
        f"+env.train.init_params.die_file={tmp_path / 'armed'}",
        "+env.train.init_params.die_at=90",
        "+env.train.init_params.seconds=0.001",
        f"+env.train.init_params.journal={tmp_path / 'journal'}",
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    runner = EmbodiedRunner(
        load_config("train", [*SHORT, ASYNC, *more, f"runner.logger.log_path={folder}"]), folder
    )
    summary = runner.run()
    assert summary["restarts"] == 1 and 1500 <= summary["env_steps"] < 1600
    entries = lines(folder)
    assert [entry["fault/env_restarts"] for entry in entries if "fault/env_restarts" in entry][-1] == 1.0
    parts = runner.loop.replay.parts
    assert [part.num_envs for part in parts] == [1, 2]
    assert sum(len(part) for part in parts) == summary["env_steps"]
    ended, begun = 0, []
    for part in parts:
        held = steps_of(part)
        for env in range(part.num_envs):
            runs = stretches(held["env_rewards"][:, env])
            begun.append(len(runs))
            ended += sum(len(run) // LENGTH for run in runs)
            over = held["terminated"][:, env] | held["truncated"][:, env]
            assert over[len(runs[0]) - 1]  # cut off where its worker was lost, and at the end
    assert sorted(begun) in ([1, 1, 2], [1, 2, 2])  # one worker began anew, after 64 of its steps
    counted = sum(entry.get("env/episodes", 0) for entry in entries)
    assert counted == ended
    played = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    lost = len(played) - counted
    assert 0 < lost <= 2 * (90 // LENGTH - 64 // LENGTH)  # those of the request in which it died


def test_a_killed_reward_worker_is_replaced_and_no_verdict_is_missing(settings, tmp_path):
    more = [*SAC, ASYNC, *TWO_ENVS, "+cluster.component_placement.reward=2-3", "reward.timeout_seconds=200"]
    (tmp_path / "run").mkdir()
    runner = EmbodiedRunner(load_config("train", [*settings, *more]), tmp_path / "run")
    try:
        runner.loop.reset(0)
        runner.loop.advance(0.0)
        os.kill(runner.rewards.group.pids[0], signal.SIGKILL)
        iteration = runner.loop.advance(0.0)
        while "fault/reward_restarts" not in iteration.metrics:  # it may not have been asked meanwhile
            iteration = runner.loop.advance(0.0)
        assert iteration.metrics["fault/restarts"] == 1.0
        for part in runner.loop.replay.parts:
            assert len(part) > 0 and np.isfinite(steps_of(part)["prob_success"]).all()
        assert {item.rank for item in runner.loop._stored} == {0, 1}
        stored = iteration.for_monitor.prob_success
        assert np.isfinite(stored).sum() == sum(item.prob_success.size for item in runner.loop._stored)
    finally:
        runner.engine.close()


def test_a_whole_run_with_resume(settings, tmp_path):
    more = [*SAC, "learner.total_steps=1600", "learner.save_interval=1024", ASYNC, *TWO_ENVS]
    folder, summary = train(load_config("train", [*settings, *more]))
    assert summary["reward"] == "learned (replace)" and summary["restarts"] == 0
    entries = lines(folder)
    lags = [entry["async/policy_lag_max"] for entry in entries if "async/policy_lag_max" in entry]
    assert len(lags) == 4 and 0 < max(lags) <= 256
    first = min(int(item.name[5:]) for item in (folder / "checkpoints").iterdir())
    place = folder / "checkpoints" / f"step_{first}"
    assert sorted(item.name for item in place.glob("*.npz")) == ["replay_0.npz", "replay_1.npz"]
    resumed = [f"runner.resume_dir={place}", f"runner.logger.log_path={tmp_path / 'resumed'}"]
    folder, again = train(load_config("train", [*settings, *more, *resumed]))
    assert again["env_steps"] == summary["env_steps"]
    assert min(entry["step"] for entry in lines(folder)) > first
