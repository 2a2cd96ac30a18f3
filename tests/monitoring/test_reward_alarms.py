"""The monitor of a model that gives rewards, on made-up streams whose truth is known."""

import json
from dataclasses import replace

import numpy as np
import pytest

from guerdon.config import MonitorConfig
from guerdon.core.errors import DataError
from guerdon.monitoring.monitor import RewardMonitor, ScoredRollout
from guerdon.rewards.image.contract import Contract

STEPS, ENVS, LENGTH = 25, 16, 20
CFG = MonitorConfig()
HACKED = {"success": lambda n: 0.9 if n < 15 else 0.1, "bonus": lambda n: 0.0 if n < 15 else 1.0}


def stream(seed, num_batches, *, success=lambda n: 0.5, bonus=lambda n: 0.0, scale=lambda n: 1.0):
    """Batches of episodes of 20 steps that run on over batches of 25.

    A share `success` of the episodes succeeds from step 12 on, where a step earns 1 more; every step earns
    noise and, whatever comes of the episode, a `bonus`. `scale` multiplies it all.
    """
    rng = np.random.default_rng(seed)
    elapsed, kind = np.arange(ENVS) % LENGTH, rng.random(ENVS)
    for number in range(num_batches):
        values = {name: [] for name in ("rewards", "done", "elapsed", "env_success")}
        for _ in range(STEPS):
            there = (kind < success(number)) & (elapsed >= 12)
            rewards = scale(number) * (there + bonus(number) + rng.normal(0.0, 0.3, ENVS))
            done = elapsed == LENGTH - 1
            row = (rewards.astype(np.float32), done, elapsed.copy(), there)
            for name, value in zip(values, row, strict=True):
                values[name].append(value)
            elapsed, kind = np.where(done, 0, elapsed + 1), np.where(done, rng.random(ENVS), kind)
        yield ScoredRollout.of_rewards(**{name: np.stack(value) for name, value in values.items()})


def make(folder, knows_success=True):
    return RewardMonitor(CFG, None, None, folder, knows_success=knows_success)


def watch(monitor, batches, first=0):
    found = []
    for number, batch in enumerate(batches, first):
        found += [(number, alarm) for alarm in monitor.observe((number + 1) * STEPS * ENVS, batch)]
    return found


@pytest.mark.parametrize("success", [lambda n: 0.0, lambda n: 0.5, lambda n: min(n / 40, 1.0)])
def test_an_honest_stream_never_alarms(tmp_path, success):
    for seed in range(10):
        monitor = make(tmp_path)
        assert watch(monitor, stream(seed, 40, success=success)) == []
        seen = monitor.metrics()
        assert set(seen) == {
            *("monitor/success_drop", "monitor/reward_collapse", "monitor/nonfinite_rewards"),
            *("monitor/alarms", "monitor/alarms_on"),
        }
        assert seen["monitor/nonfinite_rewards"] == 0.0 and seen["monitor/reward_collapse"] < 0.5
    assert list(tmp_path.iterdir()) == []


def test_a_return_that_rises_while_success_falls_is_found(tmp_path):
    for seed in range(10):
        ((number, alarm),) = watch(make(tmp_path), stream(seed, 40, **HACKED))
        assert alarm.name == "success_drop" and 16 <= number <= 24
        assert alarm.value > alarm.limit == CFG.max_success_drop and alarm.frames == []
    line = json.loads((tmp_path / "alarms.jsonl").read_text().splitlines()[-1])
    assert line["name"] == "success_drop" and "refit" in line["remedy"] and line["frames"] == []


def test_a_policy_that_only_gets_worse_is_no_hacking(tmp_path):
    monitor = make(tmp_path)
    assert watch(monitor, stream(0, 40, success=HACKED["success"])) == []
    assert monitor.metrics()["monitor/success_drop"] == 0.0


def test_rewards_that_no_longer_differ_are_found(tmp_path):
    ((number, alarm),) = watch(make(tmp_path), stream(0, 30, scale=lambda n: 1.0 if n < 15 else 1e-3))
    assert alarm.name == "reward_collapse" and 16 <= number <= 21
    waning = stream(0, 30, scale=lambda n: 1.0 if n < 15 else 0.1)  # as curiosity does
    assert watch(make(tmp_path), waning) == []


def test_a_reward_that_has_not_come_yet_is_no_collapse(tmp_path):
    monitor = make(tmp_path)
    assert watch(monitor, stream(0, 30, scale=lambda n: 0.0)) == []
    assert monitor.metrics()["monitor/reward_collapse"] == 0.0


def test_rewards_that_are_no_numbers_are_found(tmp_path):
    batches = list(stream(0, 15))
    for batch in batches[6:]:
        batch.rewards[3, 4], batch.rewards[5, 6] = np.nan, np.inf
    ((number, alarm),) = watch(make(tmp_path), batches)
    assert alarm.name == "nonfinite_rewards" and 8 <= number <= 12
    assert alarm.value == pytest.approx(2 / (STEPS * ENVS))


def test_pictures_are_kept_where_there_are_any(tmp_path):
    batches = stream(0, 40, **HACKED)
    shown = (replace(batch, frame=lambda t, n: np.full((6, 5, 3), n, np.uint8)) for batch in batches)
    ((_, alarm),) = watch(make(tmp_path), shown)
    assert len(alarm.frames) == CFG.num_frames and all(path.is_file() for path in alarm.frames)


def test_steps_that_were_not_scored_count_for_nothing(tmp_path):
    monitor = make(tmp_path)
    for number, batch in enumerate(stream(0, 10)):
        rewards = np.where(batch.done, batch.rewards, np.float32(np.nan))  # at the end of an episode alone
        others = {name: getattr(batch, name) for name in ("done", "elapsed", "env_success")}
        assert monitor.observe(number, ScoredRollout.of_rewards(rewards, batch.done, **others)) == []
    assert monitor.metrics()["monitor/nonfinite_rewards"] == 0.0
    assert monitor.checks["success_drop"].memory["best"] is not None


def test_resume_in_the_middle_gives_the_same_alarms(tmp_path):
    batches = list(stream(3, 40, **HACKED))
    whole = [(number, alarm.name, alarm.value) for number, alarm in watch(make(tmp_path), batches)]
    assert len(whole) == 1
    for cut in (5, 15, 17, 18):
        first, second = make(tmp_path), make(tmp_path)
        found = watch(first, batches[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += watch(second, batches[cut:], cut)
        assert [(number, alarm.name, alarm.value) for number, alarm in found] == whole


def test_what_rewards_do_not_allow_is_said(tmp_path):
    reported = make(tmp_path, knows_success=False).cannot_watch
    names = [line.partition(": ")[0] for line in reported]
    assert names == ["success gap", "fire rate", "early fires", "drift", "disagreement", "success drop"]
    assert reported[0] == "success gap: the model gives rewards, and no probabilities"
    assert reported[-1] == "success drop: the environment does not tell success"


def test_a_batch_of_the_other_kind_is_refused(tmp_path):
    batch = next(stream(0, 1))
    with pytest.raises(DataError, match="a model that gives rewards"):
        make(tmp_path).observe(0, replace(batch, rewards=None))
    images = RewardMonitor(CFG, Contract(model={"num_members": 1}), 0.5, tmp_path, knows_success=True)
    assert not {"success_drop", "reward_collapse", "nonfinite_rewards"} & set(images.checks)
    with pytest.raises(DataError, match="a model that gives probabilities"):
        images.observe(0, batch)
    with pytest.raises(DataError, match=r"ScoredRollout.rewards must have shape \[25, 16\]"):
        replace(batch, rewards=batch.rewards[:3])
