"""A reward model of the zoo in the one trainer: it learns beside the policy, wherever that is trained."""

import json

import gymnasium as gym
import numpy as np
import pytest

import guerdon.envs  # noqa: F401 - registers the tasks
from guerdon.config import EnvConfig, load_config
from guerdon.core.errors import ConfigError
from guerdon.envs.experts import scripted_policy
from guerdon.envs.make import make_vector_env
from guerdon.monitoring.reward_path import RewardPathError
from guerdon.rewards import write_demonstrations
from guerdon.rewards.relabel import learned_rewards, training_rewards
from guerdon.training.off_policy import OffPolicyLoop
from guerdon.training.on_policy import OnPolicyLoop
from guerdon.training.online_reward import OnlineReward
from guerdon.training.rollouts import play_episodes
from guerdon.training.trainer import EmbodiedRunner
from tests.training.short_runs import SAC, lines, run_with, without_times

TASK = "guerdon/FixedCartPole-v0"
RUN = [
    f"env.train.id={TASK}",
    f"env.eval.id={TASK}",
    "env.train.num_envs=8",
    "env.eval.num_envs=20",
    "learner.eval_episodes=20",
    "learner.network.hidden=[64,64]",
    "learner.ppo.normalize_obs=false",
    "learner.ppo.reference_coef=0.0",
    "runner.logger.backends=[]",
]
SHORT = [
    *RUN,
    "learner.network.hidden=[16]",
    "learner.ppo.num_steps=50",
    "learner.ppo.minibatch_size=100",
    "learner.total_steps=1600",
    "learner.save_interval=800",
    "learner.eval_interval=1600",
]
GAIL = ["reward_model.type=gail", "reward_model.update_per_collect=2"]
RND = ["reward_model.type=rnd", "reward_model.hidden=[16]", "reward_model.update_per_collect=2"]
DQN = [
    "learner.algorithm=dqn",
    "learner.dqn.learning_starts=200",
    "learner.dqn.batch_size=32",
    "learner.dqn.updates_per_step=0.1",
    "learner.dqn.buffer_size=2000",
]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    path = tmp_path_factory.mktemp("demos") / "demos.safetensors"
    mode = gym.vector.AutoresetMode.SAME_STEP
    env = make_vector_env(EnvConfig(id=TASK, num_envs=10), autoreset_mode=mode, keep_final_frame=False)
    write_demonstrations(path, play_episodes(env, scripted_policy(TASK), 10, seed=0))
    env.close()
    return [f"reward_model.data_path={path}"]


def train(folder, *settings):
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [item for part in settings for item in part]
    return EmbodiedRunner(load_config("train", overrides), folder).run()


@pytest.mark.slow
def test_gail_alone_teaches_ppo_and_shuffled_rewards_do_not(demos, tmp_path, monkeypatch):
    long = [
        *RUN,
        "learner.total_steps=32000",
        "learner.ppo.num_steps=200",
        "learner.ppo.lr=1e-3",
        "learner.ppo.update_epochs=10",
        "learner.ppo.minibatch_size=200",
        "learner.ppo.gamma=0.98",
        "learner.ppo.gae_lambda=0.9",
        "reward_model.type=gail",
        "reward_model.reward_form=positive",
        "reward_model.lr=3e-3",
        "reward_model.update_per_collect=80",
    ]
    train(tmp_path / "learned", long, demos)
    assert lines(tmp_path / "learned")[-1]["eval/env_return"] >= 190
    assert "learned" in (tmp_path / "learned" / "report.html").read_text()
    scored, rng = OnlineReward.stream_rewards, np.random.default_rng(0)
    monkeypatch.setattr(
        OnlineReward,
        "stream_rewards",
        lambda *args: rng.permutation(scored(*args).ravel()).reshape(args[1].shape),
    )
    train(tmp_path / "shuffled", long, demos)
    assert lines(tmp_path / "shuffled")[-1]["eval/env_return"] < 150


def test_a_resumed_run_goes_on_with_the_same_digits(demos, tmp_path):
    train(tmp_path / "whole", SHORT, GAIL, demos)
    resume = [f"runner.resume_dir={tmp_path / 'whole' / 'checkpoints' / 'step_800'}"]
    train(tmp_path / "resumed", SHORT, GAIL, demos, resume)
    whole, resumed = (list(map(without_times, lines(tmp_path / name))) for name in ("whole", "resumed"))
    assert resumed == [row for row in whole if row["step"] > 800]
    assert all(row["reward_model/rewards"] for row in whole if "reward_model/rewards" in row)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("ngu", "synchronous"),
        ("rnd", "asynchronous"),
        pytest.param("ngu", "asynchronous", marks=pytest.mark.slow),
        pytest.param("rnd", "synchronous", marks=pytest.mark.slow),
    ],
)
def test_off_policy_runs_learn_from_it(tmp_path, kind, model):
    more = ["reward_model.type=ngu", "reward_model.hidden=[16]"] if model == "ngu" else RND
    pace = [f"asynchronous.enabled={kind == 'asynchronous'}"]
    summary = train(tmp_path / "run", SHORT, DQN, more, pace)
    rows = lines(tmp_path / "run")
    assert summary["reward"] == "learned (replace)" and summary["env_steps"] >= 1600
    assert any(name.startswith("reward_model/") for row in rows for name in row)
    learned = [row["rollout/learned_rewards"] for row in rows if "rollout/learned_rewards" in row]
    assert learned and all(np.isfinite(learned)) and any(learned)
    assert learned == [row["rollout/rewards"] for row in rows if "rollout/learned_rewards" in row]
    assert (tmp_path / "run" / "report.html").is_file()


def test_curiosity_joins_an_image_classifier(settings, tmp_path):
    """The training reward is the classifier's plus the weighted one of RND; the monitor watches as before."""
    mixed = [*settings, *RND, "reward_model.weight=0.5"]
    run_with(mixed, tmp_path)
    rows = [row for row in lines(tmp_path / "run") if "rollout/learned_rewards" in row]
    for row in rows:
        classifier = row["reward/fire_rate"]  # success_reward is 1, fail_reward 0
        assert row["rollout/learned_rewards"] == pytest.approx(
            classifier + row["reward_model/rewards"], abs=1e-5
        )
        assert row["rollout/rewards"] == pytest.approx(row["rollout/learned_rewards"], abs=1e-5)
        assert row["reward_model/rewards"] > 0
    assert rows and (tmp_path / "run" / "report.html").is_file()


def test_sampled_batches_hold_both_rewards(settings, tmp_path, monkeypatch):
    """SAC on a classifier and RND: what a batch trains on is the sum, as soon as the path was checked."""
    seen = []

    def noted(prob, env_rewards, done, cfg, threshold, scale=None, extra=0.0, env_steps=0):
        held = training_rewards(prob, env_rewards, done, cfg, threshold, scale, extra, env_steps)
        seen.append((held - learned_rewards(prob, done, cfg, threshold), np.broadcast_to(extra, held.shape)))
        return held

    monkeypatch.setattr("guerdon.training.off_policy.training_rewards", noted)
    run_with([*settings, *RND, "reward_model.weight=0.5"], tmp_path, SAC)
    sampled = [(added, extra) for added, extra in seen if extra.any()]
    assert len(sampled) > 20
    for added, extra in sampled:
        np.testing.assert_allclose(added, extra, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["reward_model.type=drex"], r"set reward_model\.data_path"),
        (["reward_model.type=her"], "adds transitions that no policy played"),
        (["reward_model.type=her", *DQN, "asynchronous.enabled=true"], "needs engine=local, synchronously"),
        (["reward_model.type=gial"], "did you mean 'gail'"),
        ([*RND, "reward_model.weight=0"], "no influence"),
        (["reward_model.weight=1"], "reward_model.type is missing"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, more, reason):
    with pytest.raises((ConfigError, RewardPathError), match=reason):
        train(tmp_path / "run", SHORT, more)


@pytest.mark.parametrize(("loop", "more"), [(OnPolicyLoop, []), (OffPolicyLoop, DQN)])
def test_a_reward_that_is_dropped_on_the_way_is_caught(tmp_path, monkeypatch, loop, more):
    monkeypatch.setattr(loop, "_hold", lambda *args: np.zeros_like(args[-1]))
    with pytest.raises(RewardPathError, match="dropped on the way"):
        train(tmp_path / "run", SHORT, RND, more)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="ppo"),
        pytest.param(DQN, id="dqn"),
        pytest.param([*DQN, "asynchronous.enabled=true"], id="async", marks=pytest.mark.slow),
    ],
)
def test_the_monitor_watches_its_rewards(tmp_path, monkeypatch, more):
    """Rewards that no longer differ raise an alarm; those of an untouched run do not."""
    brief = [
        *SHORT,
        "+env.train.init_params.horizon=20",
        "monitor.min_episodes=8",
        "learner.iteration_steps=200",
    ]
    summary = train(tmp_path / "sound", brief, RND, more)
    rows = [row for row in lines(tmp_path / "sound") if "monitor/reward_collapse" in row]
    assert len(rows) >= 2 and summary["alarms"] == []
    mapped = OnlineReward._mapped

    def collapsed(self, scores, steps):
        return mapped(self, scores, steps) * np.float32(self._iteration <= 1)

    monkeypatch.setattr(OnlineReward, "_mapped", collapsed)
    again = train(tmp_path / "collapsed", brief, RND, more, ["monitor.patience=1"])
    assert "reward_collapse" in again["alarms"]


def test_a_run_without_it_does_not_resume_one_with_it(tmp_path):
    train(tmp_path / "with", SHORT, RND)
    checkpoint = tmp_path / "with" / "checkpoints" / "step_800"
    with pytest.raises(ConfigError, match="reward_model"):
        train(tmp_path / "without", SHORT, [f"runner.resume_dir={checkpoint}"])
    assert json.loads((tmp_path / "with" / "summary.json").read_text())["reward"] == "learned (replace)"
