"""The monitor on made-up streams whose truth is known, and on a cheat that fools a real reward model."""

import json
import logging
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from PIL import Image

from guerdon.config import MonitorConfig
from guerdon.core.errors import DataError, WorkerLostError
from guerdon.envs import ScriptedExpert
from guerdon.envs.tabletop.env import TabletopVectorEnv
from guerdon.envs.tabletop.scene import CUBE, CUBE_TO_GOAL, DECOY, GOAL
from guerdon.models import Contract
from guerdon.monitoring.alarm_check import Signal
from guerdon.monitoring.alarms import ALARMS, FeatureDrift
from guerdon.monitoring.monitor import RewardMonitor, ScoredRollout

STEPS, ENVS, LENGTH = 25, 16, 20
CFG = MonitorConfig()
CONTRACT = Contract(
    model={"num_members": 3},
    threshold=0.5,
    feature_mean=(0.0,) * 8,
    feature_std=(1.0,) * 8,
    calibration={"threshold": {"false_positive_interval": [0.0, 0.02]}},
    metrics={
        "first_success_step": 8.0,
        "num_frames": 2000.0,
        "num_positive_frames": 200.0,
        "num_episodes": 100.0,
        "num_success_episodes": 50.0,
    },
)


def stream(seed, num_batches, *, success=0.5, wrong=0.01, cheat=None, cheat_from=10, offset=0):
    """Batches of episodes of 20 steps that run on over batches of 25.

    A share `success` of the episodes succeeds from step 12 on and fires there; `wrong` of the other frames
    fire at random. `cheat` gives the share of cheating episodes as a function of the batch number: these
    never succeed and fire from step `cheat_from` on.
    """
    rng = np.random.default_rng(seed)
    elapsed = np.arange(ENVS) % LENGTH  # environments are out of step with each other
    kind = rng.random(ENVS)
    cheats = np.zeros(ENVS, bool)
    for number in range(num_batches):
        values = {name: [] for name in ("prob_success", "done", "elapsed", "env_success", "disagreement")}
        for _ in range(STEPS):
            there = (kind < success) & (elapsed >= 12) & ~cheats
            fires = there | (rng.random(ENVS) < wrong) | (cheats & (elapsed >= cheat_from))
            prob = np.where(fires, rng.uniform(0.6, 1.0, ENVS), rng.uniform(0.0, 0.4, ENVS))
            done = elapsed == LENGTH - 1
            for name, value in zip(values, (prob, done, elapsed, there, 0.05 + 0.0 * prob), strict=True):
                values[name].append(value.copy())
            elapsed = np.where(done, 0, elapsed + 1)
            kind = np.where(done, rng.random(ENVS), kind)
            share = 0.0 if cheat is None else cheat(number)
            cheats = np.where(done, rng.random(ENVS) < share, cheats)
        stacked = {name: np.stack(value) for name, value in values.items()}
        yield ScoredRollout(
            prob_success=stacked["prob_success"].astype(np.float32),
            done=stacked["done"],
            elapsed=stacked["elapsed"],
            env_success=stacked["env_success"],
            disagreement=stacked["disagreement"].astype(np.float32),
            features=(rng.normal(size=(64, 8)) + offset).astype(np.float32),
            frame=lambda t, n: np.full((6, 5, 3), (t, n, 7), np.uint8),
        )


def watch(monitor, batches, first=0):
    """Feed the batches; returns the alarms and the number of the batch at which each rose."""
    found = []
    for number, batch in enumerate(batches, first):
        found += [(number, alarm) for alarm in monitor.observe((number + 1) * STEPS * ENVS, batch)]
    return found


def make(tmp_path, cfg=CFG, contract=CONTRACT, threshold=0.5, knows_success=True):
    return RewardMonitor(cfg, contract, threshold, tmp_path, knows_success=knows_success)


@pytest.mark.parametrize(
    "success", [pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.5, marks=pytest.mark.slow), 1.0]
)
def test_an_honest_stream_never_alarms(tmp_path, success):
    for seed in range(20):
        monitor = make(tmp_path)
        assert watch(monitor, stream(seed, 30, success=success)) == []
        seen = monitor.metrics()
        assert seen["monitor/alarms"] == 0
        assert 0 <= seen["monitor/success_gap"] < 0.3
        assert 0.5 < seen["monitor/drift"] < 1.1
    assert monitor.cannot_watch == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("successes", "expected"), [(90, []), (0, ["wrong_fires"])])
def test_a_few_hard_failures_of_a_good_policy_are_no_wrong_fires(tmp_path, successes, expected):
    """Four of ten scored failures fire; it matters whether the other fires are successes."""
    shape = (STEPS, ENVS)
    prob, success = np.full(shape, np.nan, np.float32), np.zeros(shape, np.bool_)
    prob.flat[:4], prob.flat[4:10] = 0.9, 0.1
    prob.flat[10 : 10 + successes], success.flat[10 : 10 + successes] = 0.9, True
    done = np.zeros(shape, np.bool_)
    done[-1] = True
    batch = ScoredRollout(
        prob_success=prob,
        done=done,
        elapsed=np.tile(np.arange(STEPS)[:, None], ENVS),
        env_success=success,
        frame=lambda t, n: np.zeros((6, 5, 3), np.uint8),
    )
    found = watch(make(tmp_path), [batch] * 20)
    assert [alarm.name for _, alarm in found if alarm.name == "wrong_fires"] == expected


def test_a_cheat_that_spreads_is_found_soon(tmp_path):
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        monitor = make(folder)
        found = watch(monitor, stream(seed, 30, cheat=lambda n: min(max(0, n - 10) / 5, 0.9)))
        names = [alarm.name for _, alarm in found]
        assert sorted(names) == ["success_gap", "wrong_fires"], names  # each once, though it goes on
        assert all(11 <= number <= 20 for number, _ in found)
        lines = [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]
        for (_, alarm), line in zip(found, lines, strict=True):
            assert (line["name"], line["step"], line["value"]) == (alarm.name, alarm.step, alarm.value)
            assert line["value"] > line["limit"] and "label these frames" in line["remedy"]
            assert len(alarm.frames) == CFG.num_frames
            assert [str(path.relative_to(folder)) for path in alarm.frames] == line["frames"]
            assert alarm.frames[0].parent == folder / "alarms" / f"{alarm.name}_{alarm.step}"
            pictures = [np.asarray(Image.open(path)) for path in alarm.frames]
            assert {picture.shape for picture in pictures} == {(6, 5, 3)}
            assert len({int(picture[0, 0, 1]) for picture in pictures}) == CFG.num_frames  # many environments
        assert monitor.metrics()["monitor/alarms_on"] == 2.0


def test_an_alarm_does_without_pictures_that_are_lost(tmp_path, caplog):
    """Frames of a run on several machines may go with the one that held them."""

    def frame(t, n):
        if n % 2:
            raise WorkerLostError("object", 0, "the machine that held its data has gone")
        return np.full((6, 5, 3), (t, n, 7), np.uint8)

    batches = stream(0, 30, cheat=lambda n: min(max(0, n - 10) / 5, 0.9))
    found = watch(make(tmp_path), (replace(batch, frame=frame) for batch in batches))
    assert sorted(alarm.name for _, alarm in found) == ["success_gap", "wrong_fires"]
    for _, alarm in found:
        shown = {int(np.asarray(Image.open(path))[0, 0, 1]) for path in alarm.frames}
        assert shown and not any(n % 2 for n in shown)
    assert "cannot be shown: the machine that held its data has gone" in caplog.text


def test_disagreement_is_judged_on_enough_episodes_that_fire(tmp_path):
    """One in five episodes fires: 20 of them take a hundred."""
    monitor, first = make(tmp_path), {}
    for number, batch in enumerate(stream(0, 12, success=0.2, wrong=0.0)):
        monitor.observe(number, batch)
        for name in monitor.metrics():
            first.setdefault(name, number)
    assert first["monitor/success_gap"] <= 1  # 20 episodes end in each batch
    assert 3 <= first["monitor/disagreement"] <= 8


def test_early_fires_drift_and_disagreement_have_their_own_alarms(tmp_path):
    early = watch(make(tmp_path), stream(0, 20, wrong=0.0, cheat=lambda n: 0.6, cheat_from=3))
    assert "early_fires" in {alarm.name for _, alarm in early}
    assert "early_fires" not in {a.name for _, a in watch(make(tmp_path), stream(0, 20, cheat=lambda n: 0.9))}
    drift = watch(make(tmp_path), stream(0, 20, offset=2 * CFG.max_drift))
    assert [alarm.name for _, alarm in drift] == ["drift"]
    assert len(drift[0][1].frames) == CFG.num_frames
    unsure = (replace(batch, disagreement=8 * batch.disagreement) for batch in stream(0, 20))
    assert [alarm.name for _, alarm in watch(make(tmp_path), unsure)] == ["disagreement"]


def test_a_success_that_comes_early_is_not_an_early_fire(tmp_path):
    quick = replace(CONTRACT, metrics={**CONTRACT.metrics, "first_success_step": 15.0})
    monitor = make(tmp_path, contract=quick)
    assert watch(monitor, stream(0, 20, success=1.0, wrong=0.0)) == []
    assert monitor.metrics()["monitor/early_fires"] == 0.0


def test_frames_that_were_not_judged_count_for_nothing(tmp_path):
    monitor = make(tmp_path)
    blind = [
        replace(batch, prob_success=np.full_like(batch.prob_success, np.nan), features=None)
        for batch in stream(0, 10, cheat=lambda n: 0.9)
    ]
    assert watch(monitor, blind) == []
    assert set(monitor.metrics()) == {"monitor/alarms", "monitor/alarms_on"}


def test_an_episode_cut_off_by_a_reset_is_forgotten(tmp_path):
    monitor = make(tmp_path, cfg=replace(CFG, min_episodes=1))

    def episode(elapsed, prob, done):
        shape = (len(elapsed), 1)
        return ScoredRollout(
            prob_success=np.full(shape, prob, np.float32),
            elapsed=np.array(elapsed)[:, None],
            done=np.array(done)[:, None],
            env_success=np.zeros(shape, bool),
            frame=lambda t, n: np.zeros((2, 2, 3), np.uint8),
        )

    monitor.observe(1, episode([0, 1, 2], 0.9, [False, False, False]))  # fires, and is never heard of again
    monitor.observe(2, episode([0, 1, 2], 0.1, [False, False, True]))
    assert monitor.metrics()["monitor/success_gap"] == 0.0
    monitor.observe(3, episode([0, 1], 0.9, [False, False]))  # this one goes on
    monitor.observe(4, episode([2, 3], 0.1, [False, True]))
    assert monitor.metrics()["monitor/success_gap"] == 1.0


def test_hysteresis():
    signal = Signal(limit=1.0)
    rises = [signal.check(value, patience=3) for value in (2, 2, 0.9, 2, 2, 2, 2, 2)]
    assert rises == [False] * 5 + [True] + [False] * 2  # three in a row, once
    for value in (0.7, 0.7, 0.85, 0.7, 0.7):
        assert not signal.check(value, patience=3)
        assert signal.raised
    assert not signal.check(0.7, patience=3)
    assert not signal.raised
    assert [signal.check(2, patience=3) for _ in range(3)] == [False, False, True]


def test_an_alarm_that_clears_can_rise_again(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="guerdon")
    found = watch(make(tmp_path), stream(0, 60, cheat=lambda n: 0.9 * (n < 15 or n >= 40)))
    gaps = [number for number, alarm in found if alarm.name == "success_gap"]
    assert len(gaps) == 2 and gaps[0] < 12 and 42 <= gaps[1] <= 50
    assert "the alarm success gap ended at step" in caplog.text
    assert len((tmp_path / "alarms.jsonl").read_text().splitlines()) == len(found)


def test_resume_in_the_middle_gives_the_same_alarms(tmp_path):
    batches = list(stream(3, 30, cheat=lambda n: 0.9 * (n > 8)))
    whole = watch(make(tmp_path), batches)
    assert len(whole) >= 2
    for cut in (5, 11, 12, 13, 14):
        first = make(tmp_path)
        found = watch(first, batches[:cut])
        saved = json.loads(json.dumps(first.state_dict()))  # plain containers
        second = make(tmp_path)
        second.load_state_dict(saved)
        found += watch(second, batches[cut:], cut)
        key = [(number, alarm.name, alarm.value) for number, alarm in whole]
        assert [(number, alarm.name, alarm.value) for number, alarm in found] == key
        assert second.num_alarms == len(whole)
    with pytest.raises(DataError, match="the saved monitor watched"):
        make(tmp_path, knows_success=False).load_state_dict(saved)


def test_without_success_information(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="guerdon")
    rare = {**CONTRACT.metrics, "num_positive_frames": 50.0}
    contract = replace(CONTRACT, metrics=rare)  # of a success episode, 5% of the frames showed success
    monitor = make(tmp_path, contract=contract, knows_success=False)
    assert monitor.cannot_watch == ["success gap: the environment does not tell success"]
    assert caplog.text.count("cannot watch") == 1

    def silent(batches):
        return (replace(batch, env_success=None) for batch in batches)

    assert watch(monitor, silent(stream(0, 20, success=0.3))) == []
    monitor = make(tmp_path, contract=contract, knows_success=False)
    found = watch(monitor, silent(stream(0, 20, cheat=lambda n: 0.9 * (n > 5))))
    assert "fire_rate" in {alarm.name for _, alarm in found}
    with pytest.raises(DataError, match="env_success in every batch"):
        watch(make(tmp_path), silent(stream(0, 1)))
    often = make(tmp_path, knows_success=False)  # 20%: five times as much cannot be
    assert [line.split(":")[0] for line in often.cannot_watch] == ["success gap", "fire rate"]


def test_what_the_checkpoint_does_not_allow_is_said(tmp_path):
    bare = Contract(model={"num_members": 1})
    reported = make(tmp_path, contract=bare).cannot_watch
    assert [line.split(":")[0] for line in reported] == [
        "wrong fires",
        "early fires",
        "drift",
        "disagreement",
    ]
    assert 'metrics["first_success_step"]' in reported[1]
    assert "below the calibrated one" in make(tmp_path, threshold=0.2).cannot_watch[0]
    vague = replace(CONTRACT, calibration={"threshold": {"false_positive_interval": [0.0, 0.4]}})
    assert "more than all frames" in make(tmp_path, contract=vague).cannot_watch[0]


def test_off_watches_nothing(tmp_path):
    monitor = make(tmp_path, cfg=replace(CFG, action="off"))
    assert watch(monitor, stream(0, 20, cheat=lambda n: 1.0)) == []
    assert monitor.metrics() == {} and monitor.cannot_watch == []


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    batch = next(stream(0, 1))
    with pytest.raises(DataError, match=r"ScoredRollout.done must have shape \[25, 16\], not \[25, 3\]"):
        replace(batch, done=batch.done[:, :3])
    monitor = make(tmp_path)
    monitor.observe(0, batch)
    fewer = {name: getattr(batch, name)[:, :3] for name in ("prob_success", "done", "elapsed", "env_success")}
    with pytest.raises(DataError, match="watches 16 environments, not 3"):
        monitor.observe(1, ScoredRollout(**fewer, frame=batch.frame))
    with pytest.raises(DataError, match=r"features must have shape \[K, 8\], not \[2, 3\]"):
        FeatureDrift((0.0,) * 8, (1.0,) * 8).distances(np.zeros((2, 3), np.float32))


def test_drift_is_not_led_astray_by_a_feature_that_never_varied():
    drift = FeatureDrift((0.0,) * 64, (0.0, *(1.0,) * 63))
    features = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)
    assert 0.7 < np.median(drift.distances(features)) < 1.1
    assert drift.distances(features + 20).min() > 9


def test_checkpoints_of_the_monitor_before_alarms_had_classes_still_load(tmp_path):
    batches = list(stream(3, 30, cheat=lambda n: 0.9 * (n > 8)))
    whole = watch(make(tmp_path), batches)
    first = make(tmp_path)
    watch(first, batches[:12])
    saved = first.state_dict()
    older = {
        **saved,
        "distances": saved["signals"]["drift"].pop("distances"),
        "running": {{"scored": "judged"}.get(name, name): v for name, v in saved["running"].items()},
    }
    second = make(tmp_path)
    second.load_state_dict(json.loads(json.dumps(older)))
    key = [(number, alarm.name, alarm.value) for number, alarm in whole if number >= 12]
    assert [(n, a.name, a.value) for n, a in watch(second, batches[12:], 12)] == key
    del older["signals"]["disagreement"]  # an alarm that a checkpoint does not know yet starts empty
    third = make(tmp_path)
    third.load_state_dict(json.loads(json.dumps(older)))
    assert math.isnan(third.checks["disagreement"].signal.value)


def test_every_alarm_has_a_limit_in_the_settings_and_a_row_in_the_docs():
    names = [alarm.name for alarm in ALARMS]
    assert len(set(names)) == len(names)
    limits = {item.name for item in fields(MonitorConfig) if item.name.startswith("max_")}
    assert {alarm.setting for alarm in ALARMS} == limits
    docs = (Path(__file__).parents[2] / "docs" / "tutorials" / "train.md").read_text()
    for alarm in ALARMS:
        assert alarm.name.replace("_", " ") in docs
        assert alarm.looks_at and alarm.remedy and "refit" in alarm.remedy


def play(manager, seed, *, cheat, num_batches=4, num_envs=20):
    """Whole episodes of the noisy expert in a world with decoys, judged by the model.

    The cheat is told that the goal is where the decoy stands.
    """
    env = TabletopVectorEnv(num_envs, autoreset_mode=AutoresetMode.SAME_STEP, decoy=True)
    env.reset(seed=1000 * seed)
    expert = ScriptedExpert(noise=0.1 if cheat else 0.5, seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        frames, done, success = [], [], []
        for _ in range(50):
            state = env.state()
            if cheat:
                state[:, GOAL] = env._rows[DECOY].T
                state[:, CUBE_TO_GOAL] = state[:, GOAL] - state[:, CUBE]
            _, _, terminated, truncated, infos = env.step(expert.act(state))
            over = terminated | truncated
            final = infos["final_info"]["success"] if over.any() else infos["success"]
            success.append(np.where(over, final, infos["success"]))
            frames.append(env.render_frames(final=True))
            done.append(over)
            if over.any():
                expert.reset(over)
        seen = np.stack(frames)
        scored = seen.reshape(-1, *seen.shape[2:])
        prob = manager.score({"base_camera": scored}).prob_success.reshape(50, num_envs)
        sample = {"base_camera": torch.from_numpy(scored[rng.permutation(len(scored))[:64]])}
        with torch.no_grad():
            features = manager.model.encode(manager.model.preprocess(sample))
        yield ScoredRollout(
            prob_success=prob,
            done=np.stack(done),
            env_success=np.stack(success),
            elapsed=np.repeat(np.arange(50)[:, None], num_envs, axis=1),
            features=features.numpy(),
            frame=lambda t, n, seen=seen: seen[t, n],
        )
