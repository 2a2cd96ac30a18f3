"""What the policy is trained on, step by step: terminal rewards, frames, prior data, collecting with it."""

import functools
import logging
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.cli.main import main
from guerdon.cli.train import train
from guerdon.config import load_config
from guerdon.core.errors import DataError
from guerdon.core.types import Fault
from guerdon.data.formats import detect_format
from guerdon.data.store import EpisodeStore
from guerdon.training.checkpoints import load_policy
from tests.training.short_runs import SAC, demonstrate, lines, make_runner, run_with, without_times

EPISODE, ENVS = 20, 8
TERMINAL = ["reward.reward_mode=terminal", "reward.success_reward=2", "reward.fail_reward=-1"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """(Number of episodes, format) -> the folder of such demonstrations, which tests only read."""
    root = tmp_path_factory.mktemp("shown")

    @functools.cache
    def made(episodes, format):
        return demonstrate(root / f"{format}_{episodes}", episodes, format)

    return lambda episodes, format="native": made(episodes, format)


def expected(prob_success, threshold):
    return np.where(np.isnan(prob_success), 0.0, np.where(prob_success > threshold, 2.0, -1.0))


# Terminal mode


def test_ppo_with_rollouts_in_which_no_episode_ends(settings, tmp_path):
    more = [*TERMINAL, "learner.ppo.num_steps=8", "learner.ppo.minibatch_size=16"]
    runner = make_runner(settings, tmp_path, more)
    loop, seen = runner.loop, []
    loop.reset(0)
    for number in range(8):
        iteration = loop.advance(0.0)
        steps = np.arange(8 * number, 8 * number + 8)
        ends = np.repeat((steps % EPISODE == EPISODE - 1)[:, None], ENVS, 1)
        watched, rollout = iteration.for_monitor, loop.rollout
        np.testing.assert_array_equal(watched.done, ends)
        np.testing.assert_array_equal(watched.elapsed, np.repeat((steps % EPISODE)[:, None], ENVS, 1))
        np.testing.assert_array_equal(np.isfinite(watched.prob_success), ends)
        rewards = rollout.training_rewards.numpy()
        threshold = runner.reward_worker.threshold
        np.testing.assert_array_equal(rewards, expected(watched.prob_success, threshold))
        assert all(np.isfinite(value) for value in iteration.metrics.values())
        assert ("reward/fire_rate" in iteration.metrics) == ends.any()
        assert loop.path_checked == (steps[-1] >= EPISODE - 1)  # there is nothing to check it on before
        seen += rewards[ends].tolist()
    runner.env_worker.close()
    assert set(seen) == {2.0, -1.0} and len(seen) == 3 * ENVS
    summary = run_with(settings, tmp_path, [*more, "learner.total_steps=400", "learner.save_interval=200"])
    assert summary["env_steps"] >= 400 and summary["stopped"] is None


# PendingScores while the rollout goes on


def judged_run(runner, monkeypatch):
    """Three iterations: prob_success [3, T, N], the policy in the end, and by whom frames were judged."""
    worker, calls = runner.reward_worker, []
    real = worker.score_some

    def score_some(frames, start, stop):
        calls.append((threading.current_thread() is threading.main_thread(), stop - start))
        return real(frames, start, stop)

    monkeypatch.setattr(worker, "score_some", score_some)
    runner.loop.reset(0)
    prob = [runner.loop.advance(0.0).for_monitor.prob_success for _ in range(3)]
    weights = runner.learner.policy_state()["actor"]
    runner.env_worker.close()
    return np.stack(prob), weights, calls


def test_frames_scored_during_the_rollout_and_at_its_end_get_the_same_verdicts(
    settings, tmp_path, monkeypatch
):
    more = ["env.train.num_envs=48", "learner.ppo.minibatch_size=400"]  # 1200 frames in a rollout
    ahead = judged_run(make_runner(settings, tmp_path, more), monkeypatch)
    late = make_runner(settings, tmp_path, more)
    late.loop.score_after_rollout()
    at_the_end = judged_run(late, monkeypatch)
    assert ahead[2] == 3 * [(False, 512), (False, 512), (False, 176)]  # on a thread of its own
    assert at_the_end[2] == 3 * [(True, 1200)]
    assert ahead[0].shape == (3, 25, 48) and np.isfinite(ahead[0]).all() and ahead[0].std() > 0
    np.testing.assert_array_equal(ahead[0], at_the_end[0])
    for name, weights in ahead[1].items():
        np.testing.assert_array_equal(weights, at_the_end[1][name])


@pytest.mark.parametrize(
    ("control", "standalone", "ends"),
    [("none", True, True), ("off", True, False), ("shuffled", True, False), ("off", False, True)],
)
def test_in_a_control_ends_that_the_model_decides_are_time_limits(
    settings, tmp_path, control, standalone, ends
):
    """Where success ends the episode, a policy learned it from a reward of zero, with values below zero."""
    runner = make_runner(settings, tmp_path, [*SAC, "learner.sac.learning_starts=600"])
    loop = runner.loop
    loop.path_checked = True
    loop.reset(0)
    loop.advance(0.0)
    loop.cfg = replace(loop.cfg, control=control, standalone=standalone)
    batch = loop._sample(loop.replay, 64)
    batch = replace(batch, terminated=torch.ones_like(batch.terminated))
    made = loop._train_batch(batch)
    assert (made.not_terminated.numpy() == (0.0 if ends else 1.0)).all()
    if control == "off":
        assert (made.training_rewards == 0.0).all()


def test_sac_gives_an_episode_that_a_checkpoint_cut_off_no_learned_reward(settings, tmp_path):
    runner = make_runner(settings, tmp_path, [*SAC, *TERMINAL, "learner.sac.learning_starts=600"])
    loop = runner.loop
    loop.path_checked = True
    loop.reset(0)
    prob = loop.advance(0.0).for_monitor.prob_success
    steps = len(prob)
    assert steps % EPISODE not in (0, EPISODE - 1)  # episodes are running
    runner._save(loop.env_steps)
    batch = loop._sample(loop.replay, 8192)
    rewards = loop._train_batch(batch).training_rewards.numpy()
    at, env = np.divmod(batch.rows[:, 0], ENVS)
    assert set(batch.rows[:, 0]) == set(range(steps * ENVS))
    np.testing.assert_array_equal(
        rewards, expected(prob, runner.reward_worker.threshold)[at, env].astype(np.float32)
    )
    assert {2.0, -1.0} == set(rewards[at % EPISODE == EPISODE - 1])
    cut = at == steps - 1
    assert batch.truncated.numpy()[cut].all() and not batch.terminated.numpy()[cut].any()
    assert (rewards[cut] == 0.0).all()
    for _ in range(2):  # learns on, over the cut
        metrics = loop.advance(0.5).metrics
    assert np.isfinite(metrics["train/critic_loss"])
    assert all(torch.isfinite(part).all() for part in (loop.learner.critics.flat, loop.learner.actor.flat))
    runner.env_worker.close()


# Frames


@pytest.mark.parametrize("mode", ["per_step", "terminal"])
@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_the_frames_that_an_alarm_would_show_are_those_that_were_judged(settings, tmp_path, algorithm, mode):
    more = SAC if algorithm == "sac" else []
    runner = make_runner(settings, tmp_path, [*more, f"reward.reward_mode={mode}"])
    runner.loop.reset(0)
    watched = runner.loop.advance(0.0).for_monitor
    steps, envs = np.nonzero(np.isfinite(watched.prob_success))
    chosen = np.random.default_rng(0).permutation(len(steps))[:40]
    assert len(set(steps[chosen])) > 2 or (algorithm, mode) == ("ppo", "terminal")  # one end in a rollout
    frames = np.stack([watched.frame(int(steps[i]), int(envs[i])) for i in chosen])
    again = runner.reward_worker.score({"base_camera": frames}).prob_success
    np.testing.assert_allclose(again, watched.prob_success[steps[chosen], envs[chosen]], atol=1e-5)
    assert len(np.unique(again.round(5))) > 3
    runner.env_worker.close()


# Prior data


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sac_starts_warm_and_with_prior_data(settings, shown, tmp_path, caplog, asynchronous):
    caplog.set_level(logging.INFO, "guerdon")
    data = shown(20)
    longer = [item for item in settings if "max_episode_steps" not in item]
    prior = [
        f"learner.warm_start.data={data}",
        "learner.warm_start.epochs=150",
        "learner.sac.learning_starts=900",  # a few updates: there is nothing to learn from this reward
        "learner.sac.actor_lr=1e-3",
        f"learner.sac.prior_data={data}",
        "learner.sac.num_critics=4",
        "learner.sac.bc_coef=0.5",
        "learner.network.hidden=[64,64]",
        "learner.network.activation=relu",
        f"asynchronous.enabled={asynchronous}",
    ]
    run_with(longer, tmp_path, [*SAC, *prior])
    reported = re.search(r"warm start: 1000 demonstrated actions, loss (\S+) to (\S+)", caplog.text)
    assert float(reported[2]) < 0.3 * float(reported[1])
    assert any("train/critic_loss" in entry for entry in lines(tmp_path / "run"))


def test_sac_with_prior_data_resumes_to_the_same_losses(settings, shown, tmp_path):
    more = [*SAC, f"learner.sac.prior_data={shown(3)}", "learner.sac.bc_coef=0.5"]
    folder, _ = train(load_config("train", [*settings, *more]))
    middle = folder / "checkpoints" / "step_512"
    again = [f"runner.logger.log_path={tmp_path / 'resumed'}", f"runner.resume_dir={middle}"]
    other, _ = train(load_config("train", [*settings, *more, *again]))
    rest = [without_times(entry) for entry in lines(folder) if entry["step"] > 512]
    assert [without_times(entry) for entry in lines(other)] == rest
    assert any("train/critic_loss" in entry for entry in rest)


@pytest.mark.parametrize(
    ("obs_mode", "format"),
    [
        ("state", "native"),
        ("rgb", "native"),
        ("state", "pkl-episode"),
        ("rgb", "realworld-pkl"),
        pytest.param("rgb", "pkl-episode", marks=pytest.mark.slow),
        pytest.param("state", "realworld-pkl", marks=pytest.mark.slow),
    ],
)
def test_prior_data_of_any_format_give_the_same_transitions(settings, shown, tmp_path, format, obs_mode):
    data = shown(3, format)
    more = [*SAC, f"learner.sac.prior_data={data}", f"+env.train.init_params.obs_mode={obs_mode}"]
    runner = make_runner(settings, tmp_path, more)
    prior, images = runner.loop.prior, obs_mode == "rgb"
    assert len(prior) == 3 * (49 if images else 50)  # the frame in which action 0 was chosen is not known
    episodes = [item for item in detect_format(data).read(data) if not isinstance(item, Fault)]
    if images:
        reached = np.concatenate([item.frames["base_camera"][1:] for item in episodes])
        before = np.concatenate([item.frames["base_camera"][:-1] for item in episodes])
    else:
        reached = np.concatenate([item.states for item in episodes])
        before = np.concatenate([[item.initial_state, *item.states[:-1]] for item in episodes])
    actions = np.concatenate([item.actions[1 if images else 0 :] for item in episodes])
    batch = prior.sample(4096, gamma=0.9)
    rows, name = batch.rows[:, 0], "base_camera" if images else "state"
    assert set(rows) == set(range(len(prior)))
    np.testing.assert_array_equal(batch.obs[name].numpy(), before[rows])
    np.testing.assert_array_equal(batch.next_obs[name].numpy(), reached[rows])
    np.testing.assert_array_equal(batch.actions.numpy(), actions[rows])
    assert set(rows[batch.truncated.numpy()]) == {len(prior) // 3 * number - 1 for number in (1, 2, 3)}
    prob = batch.extras["prob_success"].numpy()[:, 0]
    if images:  # what was judged is what was reached
        again = runner.reward_worker.score({"base_camera": batch.next_obs[name].numpy()[:64]}).prob_success
        np.testing.assert_allclose(prob[:64], again, atol=1e-5)
    assert np.isfinite(prob).all() and 0 < (prob > runner.reward_worker.threshold).mean() < 1
    runner.env_worker.close()


def test_prior_data_without_the_cameras_of_the_reward_model_are_refused(settings, shown, tmp_path):
    data = shown(3)
    smaller = [item for item in settings if "image_size" not in item]
    with pytest.raises(DataError, match="the checkpoint was trained on"):
        make_runner([*smaller, *SAC], tmp_path, [f"learner.sac.prior_data={data}"])


# After a run


def test_alarms_from_before_a_resume_stay(settings, tmp_path):
    more = ["monitor.patience=1", "monitor.min_episodes=8"]
    folder, summary = train(load_config("train", [*settings, *more]))
    saved = load_policy(folder / "checkpoints" / "step_400")
    assert saved.state["alarms"]
    again = [f"runner.logger.log_path={tmp_path / 'resumed'}", f"runner.resume_dir={saved.folder}"]
    _, resumed = train(load_config("train", [*settings, *more, *again]))
    assert resumed["alarms"] == summary["alarms"]


def test_dqn_resumes_among_its_random_actions(tmp_path):
    """An odd number of draws leaves half a random number behind, which has to be saved too."""
    options = [
        "env.train.id=CartPole-v1",
        "env.eval.id=CartPole-v1",
        "env.train.num_envs=3",
        "env.eval.num_envs=3",
        "learner.algorithm=dqn",
        "learner.dqn.learning_starts=1300",
        "learner.total_steps=1600",
        "learner.save_interval=500",
        "learner.eval_episodes=3",
        "runner.logger.backends=[]",
    ]
    folder, _ = train(load_config("train", [*options, f"runner.logger.log_path={tmp_path / 'whole'}"]))
    middle = folder / "checkpoints" / "step_513"
    again = [f"runner.logger.log_path={tmp_path / 'resumed'}", f"runner.resume_dir={middle}"]
    other, _ = train(load_config("train", [*options, *again]))
    rest = [without_times(entry) for entry in lines(folder) if entry["step"] > 513]
    assert [without_times(entry) for entry in lines(other)] == rest and len(rest) >= 2


def test_collecting_with_the_policy_of_a_run(finished, tmp_path, capsys):
    folder, _ = finished("ppo")
    options = [
        "env.train.num_envs=1",
        "+env.train.init_params.image_size=[24,24]",
        "collect.policy=checkpoint",
        f"collect.policy_checkpoint={folder}",
        "collect.policy_noise=0",
        "collect.target_success=0",
        "collect.target_failure=2",
        f"collect.save_dir={tmp_path / 'data'}",
    ]
    assert main(["collect", *options]) == 0
    store, policy = EpisodeStore(tmp_path / "data"), load_policy(folder).learner
    assert store.num_episodes == 2 and not store.success.any()
    for episode in store:  # the policy explores as it does in training: the same draws in the same order
        before = np.concatenate([episode.initial_state[None], episode.states[:-1]])
        actions = np.concatenate([policy.act(state[None], deterministic=False) for state in before])
        np.testing.assert_allclose(episode.actions, actions, atol=1e-6)
    capsys.readouterr()
    assert main(["collect", *options, f"collect.policy_checkpoint={tmp_path / 'data'}"]) == 1
    assert "holds no saved policy" in capsys.readouterr().err
