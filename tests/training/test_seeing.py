"""Runs with a reward model that sees several frames, and runs that reuse verdicts where nothing moved."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.cli.train import train
from guerdon.config import RewardConfig, RewardModelConfig, load_config
from guerdon.core.errors import ConfigError
from guerdon.core.images import stack_episode
from guerdon.envs import TabletopVectorEnv
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.serve import RewardManager
from guerdon.wrappers import GymVectorToSB3, LearnedRewardVecEnv, LearnedRewardVectorWrapper
from tests.training.conftest import SIZE, short_settings, views
from tests.training.short_runs import SAC, demonstrate, lines, make_runner, without_times

LAZY = ["env.train.id=tests.training.lazy:guerdon/Lazy-v0"]


@pytest.fixture(scope="session")
def two_frames(tmp_path_factory):
    """An untrained model that judges two frames together; its threshold is the median over random play."""
    torch.manual_seed(0)
    model = build_model(
        RewardModelConfig(arch="resnet10", width=8, image_size=(3, 24, 24), hidden_dim=8, num_frames=2)
    ).eval()
    stacks = np.stack([views(64), views(64, seed=1)], axis=1)
    with torch.no_grad():
        prob = torch.sigmoid(model(stacks)).numpy()
    contract = replace(
        Contract.of(model, frame_sizes={"base_camera": (*SIZE, 3)}),
        threshold=float(np.median(prob)),
        data_hash="test",
    )
    return save_checkpoint(tmp_path_factory.mktemp("two") / "model", model, contract)


def run(settings, folder, more=()):
    place = [*settings, *more, f"runner.logger.log_path={folder}"]
    return lines(train(load_config("train", place))[0])


def on(checkpoint):
    return f"reward.model.checkpoint_path={checkpoint}"


@pytest.mark.parametrize("mode", ["per_step", "terminal"])
def test_the_verdicts_of_a_rollout_are_on_the_stacks_of_its_episodes(settings, tmp_path, two_frames, mode):
    runner = make_runner(settings, tmp_path, [on(two_frames), f"reward.reward_mode={mode}"])
    manager = RewardManager(RewardConfig(model=replace(RewardModelConfig(), checkpoint_path=str(two_frames))))
    env, seen = runner.env_worker.env.unwrapped, []
    real = env.step

    def step(actions):
        answer = real(actions)
        seen.append((env.render_frames(final=True).copy(), answer[2] | answer[3]))
        return answer

    env.step = step
    runner.loop.reset(3)
    for _ in range(2):
        watched = runner.loop.advance(0.0).for_monitor
        done = np.stack([item[1] for item in seen[-25:]])
        np.testing.assert_array_equal(watched.done, done)
    frames, done = (np.stack([item[part] for item in seen]) for part in (0, 1))  # [50, 8, ...]
    for number in range(8):
        ends = np.flatnonzero(done[:, number])
        starts = np.append(0, ends + 1)
        expected = np.concatenate(
            [
                manager.score({"base_camera": stack_episode(frames[low:high, number], 2)}).prob_success
                for low, high in zip(starts, [*(ends + 1), 50], strict=True)
                if high > low
            ]
        )[25:]
        found = watched.prob_success[:, number]
        scored = done[25:, number] if mode == "terminal" else np.ones(25, np.bool_)
        assert (np.isfinite(found) == scored).all() and scored.any()
        np.testing.assert_allclose(found[scored], expected[scored], atol=1e-5)


@pytest.fixture(scope="module")
def finished_on_two(two_frames, tmp_path_factory):
    """(Algorithm, mode of the reward) -> the folder of a finished run, which tests only read."""

    @functools.cache
    def finished(algorithm, mode):
        folder = tmp_path_factory.mktemp("finished") / "run"
        more = [] if algorithm == "ppo" else SAC
        more = [*more, f"reward.reward_mode={mode}", f"asynchronous.enabled={algorithm == 'async'}"]
        run(short_settings(two_frames, folder), folder, more)
        return folder

    return finished


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        ("ppo", "per_step"),
        ("sac", "terminal"),
        ("async", "per_step"),
        pytest.param("ppo", "terminal", marks=pytest.mark.slow),
        pytest.param("sac", "per_step", marks=pytest.mark.slow),
        pytest.param("async", "terminal", marks=pytest.mark.slow),
    ],
)
def test_runs_on_two_frames_leave_everything_behind(finished_on_two, algorithm, mode):
    folder = finished_on_two(algorithm, mode)
    entries = lines(folder)
    counted = [entry for entry in entries if "reward/frames_scored" in entry]
    scored = sum(entry["reward/frames_scored"] for entry in counted)
    rendered = sum(entry["reward/frames_rendered"] for entry in counted)
    if mode == "terminal":  # two frames of each episode that ended
        episodes = sum(entry.get("env/episodes", 0) for entry in counted)
        assert scored == episodes > 0 and rendered == 2 * episodes
    else:
        assert scored == rendered == entries[-1]["step"]
    assert (folder / "videos" / "eval_0.gif").stat().st_size > 0


@pytest.mark.slow
def test_stacks_are_kept_for_relabelling_and_demonstrations_are_judged_by_them(
    settings, tmp_path, two_frames
):
    demos = demonstrate(tmp_path / "demos", episodes=4)
    curves = []
    for when in ("insertion", "sampling"):
        more = [*SAC, on(two_frames), f"reward.relabel_at={when}", f"learner.sac.prior_data={demos}"]
        curves.append([without_times(entry) for entry in run(settings, tmp_path / when, more)])
    for first, second in zip(*curves, strict=True):
        assert first == pytest.approx(second, rel=1e-3, abs=1e-5)


def test_a_resumed_run_on_two_frames_gives_the_same_curve(settings, tmp_path, two_frames, finished_on_two):
    folder = finished_on_two("ppo", "per_step")
    entries = lines(folder)
    steps = sorted(int(item.name[5:]) for item in (folder / "checkpoints").iterdir())
    place = folder / "checkpoints" / f"step_{steps[0]}"
    again = run(settings, tmp_path / "again", [on(two_frames), f"runner.resume_dir={place}"])
    expected = [without_times(entry) for entry in entries if entry["step"] > steps[0]]
    assert [without_times(entry) for entry in again] == expected and len(expected) >= 2


@pytest.mark.parametrize("autoreset", ["SameStep", "NextStep"])
@pytest.mark.parametrize("mode", ["per_step", "terminal"])
def test_wrappers_judge_the_stacks_of_each_episode(two_frames, autoreset, mode):
    manager = RewardManager(RewardConfig(model=replace(RewardModelConfig(), checkpoint_path=str(two_frames))))
    plain, wrapped = (
        TabletopVectorEnv(3, image_size=SIZE, max_episode_steps=4, autoreset_mode=autoreset) for _ in range(2)
    )
    wrapper = LearnedRewardVectorWrapper(wrapped, manager, replace(manager.cfg, reward_mode=mode))
    plain.reset(seed=0)
    wrapper.reset(seed=0)
    for env in (plain, wrapped):
        env._elapsed[:] = [0, 1, 2]  # episodes end at different steps
    rng = np.random.default_rng(0)
    histories, ended, seen = [[], [], []], np.zeros(3, np.bool_), 0
    for _ in range(14):
        actions = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
        _, _, _, truncated, _ = plain.step(actions)
        *_, info = wrapper.step(actions)
        frames = plain.render_frames(final=True)
        for number in range(3):
            if autoreset == "NextStep" and ended[number]:  # this step only began an episode
                assert np.isnan(info["prob_success"][number])
                continue
            histories[number].append(frames[number])
            scored = mode == "per_step" or truncated[number]
            assert np.isfinite(info["prob_success"][number]) == scored
            if scored:
                stack = stack_episode(np.stack(histories[number]), 2)[-1:]
                expected = manager.score({"base_camera": stack}).prob_success[0]
                assert info["prob_success"][number] == pytest.approx(expected, abs=1e-5)
                seen += 1
            if truncated[number]:
                histories[number] = []
        ended = truncated
    assert seen > (6 if mode == "terminal" else 30)


def test_stable_baselines_environments_are_judged_by_the_same_stacks(two_frames):
    manager = RewardManager(RewardConfig(model=replace(RewardModelConfig(), checkpoint_path=str(two_frames))))
    first, second = (
        TabletopVectorEnv(3, image_size=SIZE, max_episode_steps=4, autoreset_mode="SameStep")
        for _ in range(2)
    )
    vector = LearnedRewardVectorWrapper(first, manager)
    batch = LearnedRewardVecEnv(GymVectorToSB3(second), manager)
    batch.seed(0)
    batch.reset()
    vector.reset(seed=0)
    rng = np.random.default_rng(0)
    for step in range(10):
        if step == 6:  # in the middle of an episode
            batch.seed(9)
            batch.reset()
            vector.reset(seed=9)
        actions = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
        *_, infos = batch.step(actions)
        *_, info = vector.step(actions)
        np.testing.assert_allclose([item["prob_success"] for item in infos], info["prob_success"], atol=1e-6)


# Verdicts that are reused


@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(it, marks=pytest.mark.slow) for it in ("sac", "dim"))]
)
def test_reusing_verdicts_changes_no_number_and_judges_fewer_frames(
    settings, tmp_path, two_frames, checkpoint, algorithm
):
    more = [*LAZY, *(SAC if algorithm == "sac" else [])]
    more.append(on(two_frames if algorithm == "dim" else checkpoint))
    curves = {}
    for cached in ("false", "true"):
        options = [*more, f"reward.cache_verdicts={cached}", "reward.cache_tolerance=0"]
        curves[cached] = [without_times(entry) for entry in run(settings, tmp_path / cached, options)]
    counts = {}
    for cached, entries in curves.items():
        counts[cached] = {
            name: sum(entry.pop(f"reward/frames_{name}", 0) for entry in entries)
            for name in ("scored", "rendered")
        }
        for entry in entries:  # of other frames, drawn from those that were judged
            entry.pop("monitor/drift", None)
    for plain, reused in zip(curves["false"], curves["true"], strict=True):
        assert reused == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert counts["true"]["scored"] < 0.6 * counts["false"]["scored"]
    assert counts["true"]["rendered"] < 0.6 * counts["false"]["rendered"]


def test_an_asynchronous_run_reuses_verdicts_within_a_request(settings, tmp_path, checkpoint):
    more = [*LAZY, *SAC, "asynchronous.enabled=true", "reward.cache_verdicts=true"]
    entries = run(settings, tmp_path / "run", more)
    counted = [entry for entry in entries if "reward/frames_scored" in entry]
    assert sum(entry["reward/frames_scored"] for entry in counted) < 0.8 * entries[-1]["step"]
    assert all(np.isfinite(entry["rollout/learned_rewards"]) for entry in counted)


def test_reusing_verdicts_and_judging_again_exclude_each_other(settings, tmp_path):
    more = [*SAC, "reward.cache_verdicts=true", "reward.relabel_at=sampling"]
    with pytest.raises(ConfigError, match="use one of the two"):
        make_runner(settings, tmp_path, more)
