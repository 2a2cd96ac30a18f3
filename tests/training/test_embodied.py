"""Stage 3: the learned reward on its way into the policy, what is left behind, and what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.agents.ppo import PPO
from guerdon.cli.main import main
from guerdon.cli.train import evaluate_checkpoint, train
from guerdon.config import load_config
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.datasets.media import video_frames
from guerdon.data.summary import inspect
from guerdon.monitoring.reward_path import RewardPathError
from guerdon.rewards.relabel import training_rewards
from guerdon.training.off_policy import OffPolicyLoop
from guerdon.training.on_policy import OnPolicyLoop
from guerdon.training.trainer import EmbodiedRunner
from tests.training.short_runs import SAC, lines, make_runner, run_with, without_times


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_run_leaves_everything_behind(finished, algorithm):
    folder, summary = finished(algorithm)
    assert summary["episodes"] == 5 and summary["reward"] == "learned (replace)"
    entries = lines(folder)
    names = set().union(*entries)
    assert {
        "env/success_once",
        "env/success_at_end",
        "env/return",
        "rollout/rewards",
        "rollout/env_rewards",
        "rollout/learned_rewards",
        "time/compute_model_rewards",
        "reward/prob_mean",
        "reward/fire_rate",
        "reward/agreement",
        "eval/success_once",
    } <= names
    for entry in entries:
        if "rollout/rewards" in entry:
            assert entry["rollout/rewards"] == entry["rollout/learned_rewards"]  # replaced
            assert entry["rollout/rewards"] == pytest.approx(entry["reward/fire_rate"], abs=1e-6)
    assert any(0 < entry.get("reward/fire_rate", 0) < 1 for entry in entries)
    for name in ("config.yaml", "summary.json", "report.html", "videos/eval_0.gif"):
        assert (folder / name).stat().st_size > 0
    again = evaluate_checkpoint(folder, 10, seed=3)
    assert again["episodes"] == 10 and 0 <= again["success_once"] <= 1
    assert again == evaluate_checkpoint(folder, 10, seed=3)


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_resumed_run_gives_the_same_curve(settings, finished, algorithm):
    more = SAC if algorithm == "sac" else []
    folder, _ = finished(algorithm)
    steps = sorted(int(item.name[5:]) for item in (folder / "checkpoints").iterdir())
    assert len(steps) == 2
    resumed = load_config(
        "train",
        [
            *settings,
            *more,
            f"runner.resume_dir={folder / 'checkpoints' / f'step_{steps[0]}'}",
        ],
    )
    other, _ = train(resumed)
    expected = [without_times(entry) for entry in lines(folder) if entry["step"] > steps[0]]
    assert [without_times(entry) for entry in lines(other)] == expected and len(expected) >= 2


def test_sac_relabels_at_insertion_and_at_sampling_alike(settings, finished):
    sampling = load_config("train", [*settings, *SAC, "reward.relabel_at=sampling"])
    assert load_config("train", [*settings, *SAC]).reward.relabel_at == "insertion"
    curves = [
        [without_times(entry) for entry in lines(folder)] for folder, _ in (finished("sac"), train(sampling))
    ]
    for one, other in zip(*curves, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


def test_terminal_mode_renders_one_frame_for_each_episode(settings, tmp_path):
    config = load_config("train", [*settings, "reward.reward_mode=terminal"])
    (tmp_path / "run").mkdir()
    runner = EmbodiedRunner(config, tmp_path / "run")
    runner.loop.reset(0)
    runner.loop.advance(0.0)
    rollout = runner.loop.rollout
    done = (rollout.terminated | rollout.truncated).numpy()
    assert runner.env_worker.reward_frames.num_rendered == done.sum() == 8
    assert not rollout.training_rewards.numpy()[~done].any()
    runner.env_worker.close()


def test_env_rewards_stay_beside_the_training_rewards(settings, tmp_path):
    weights = ["reward.combine_mode=weighted", "reward.reward_weight=10", "reward.env_reward_weight=0.5"]
    (tmp_path / "run").mkdir()
    runner = EmbodiedRunner(load_config("train", [*settings, *weights]), tmp_path / "run")
    runner.loop.reset(0)
    watched = runner.loop.advance(0.0).for_monitor
    rollout = runner.loop.rollout
    manager = runner.reward_worker
    fired = watched.prob_success > manager.threshold
    env_rewards = rollout.env_rewards.numpy()
    assert env_rewards.any() and 0 < fired.mean() < 1
    np.testing.assert_allclose(rollout.training_rewards.numpy(), 0.5 * env_rewards + 10 * fired, rtol=1e-5)
    rows, frames = runner.env_worker.reward_frames.gathered()
    scored = manager.score({name: images[:5] for name, images in frames.items()}).prob_success
    np.testing.assert_allclose(scored, watched.prob_success.reshape(-1)[rows[:5]], atol=1e-5)
    runner.env_worker.close()


# The check that the reward reaches the loss


def test_advantages_from_before_relabelling_are_caught(settings, tmp_path, monkeypatch):
    """The fault where others have it: advantages are made as the rollout arrives, and used for the update."""
    receive, advantages, updated = OnPolicyLoop._receive, PPO.advantages, []

    def too_early(self):
        receive(self)
        self.learner.cached = advantages(self.learner, self.rollout)

    monkeypatch.setattr(OnPolicyLoop, "_receive", too_early)
    monkeypatch.setattr(PPO, "advantages", lambda self, rollout: self.cached)
    monkeypatch.setattr(PPO, "update", lambda self, rollout, progress=0.0: updated.append(progress))
    with pytest.raises(RewardPathError, match="what the policy is trained on does not"):
        run_with(settings, tmp_path)
    assert updated == []  # refused before the first update


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_dropped_verdict_is_caught(settings, tmp_path, monkeypatch, algorithm):
    if algorithm == "ppo":

        def dropped(self, prob_success):
            return self.rollout.training_rewards.numpy()

        monkeypatch.setattr(OnPolicyLoop, "_relabel", dropped)
    else:
        monkeypatch.setattr(OffPolicyLoop, "_relabel", lambda self, batch, prob: batch.env_rewards.numpy())
    with pytest.raises(RewardPathError, match="the scores are dropped on the way"):
        run_with(settings, tmp_path, SAC if algorithm == "sac" else ())


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_the_path_is_checked_again_when_a_run_is_resumed(
    settings, finished, tmp_path, monkeypatch, algorithm
):
    more = SAC if algorithm == "sac" else []
    folder, _ = finished(algorithm)
    steps = sorted(int(item.name[5:]) for item in (folder / "checkpoints").iterdir())
    more = [*more, f"runner.resume_dir={folder / 'checkpoints' / f'step_{steps[0]}'}"]
    for loop in (OnPolicyLoop, OffPolicyLoop):
        monkeypatch.setattr(loop, "_relabel", lambda *args: np.zeros_like(args[-1]))
    with pytest.raises(RewardPathError, match="the scores are dropped on the way"):
        run_with(settings, tmp_path, more)


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_another_threshold_is_caught(settings, tmp_path, monkeypatch, algorithm):
    module = "on_policy" if algorithm == "ppo" else "off_policy"

    def wrong(prob, env_rewards, done, cfg, threshold, *rest):
        return training_rewards(prob, env_rewards, done, cfg, 0.9, *rest)

    monkeypatch.setattr(f"guerdon.training.{module}.training_rewards", wrong)
    with pytest.raises(RewardPathError, match="another threshold is used"):
        run_with(settings, tmp_path, SAC if algorithm == "sac" else ())


def test_targets_from_another_reward_are_caught(settings, tmp_path, monkeypatch):
    real = OffPolicyLoop._make_replay

    def make(self, *args):
        replay = real(self, *args)
        sample = replay.sample

        def stale(*a, **k):
            batch = sample(*a, **k)
            object.__setattr__(
                batch, "train_batch", lambda _: type(batch).train_batch(batch, batch.env_rewards)
            )
            return batch

        replay.sample = stale
        return replay

    monkeypatch.setattr(OffPolicyLoop, "_make_replay", make)
    with pytest.raises(RewardPathError, match="what the policy is trained on does not"):
        run_with(settings, tmp_path, SAC)


def test_a_reward_without_influence_is_refused(settings, tmp_path):
    with pytest.raises(RewardPathError, match="no influence"):
        run_with(settings, tmp_path, ["reward.success_reward=0"])


# Collecting while training


def test_learning_may_start_with_the_first_step(settings, tmp_path):
    """It has no successor yet: the first update waits for the second step, and none is lost."""
    more = [*SAC, "learner.total_steps=48", "learner.sac.learning_starts=0", "learner.sac.updates_per_step=1"]
    runner = make_runner(settings, tmp_path, more)
    assert runner.run()["env_steps"] == 48
    assert runner.learner.num_updates == 48


def test_fewer_steps_than_an_iteration_of_sac(settings, tmp_path):
    more = [*SAC, "learner.total_steps=48", "learner.iteration_steps=512", "learner.sac.learning_starts=16"]
    assert run_with(settings, tmp_path, more)["env_steps"] == 48


def test_collecting_while_training(settings, tmp_path):
    sections = [
        "reward.use_reward_model=false",
        "reward.collect_data=true",
        f"reward.data_collection.positive_dir={tmp_path / 'positive'}",
        f"reward.data_collection.negative_dir={tmp_path / 'negative'}",
        "collect.enabled=true",
        f"collect.save_dir={tmp_path / 'data'}",
        "collect.format=pkl-episode",
    ]
    _, summary = train(load_config("train", [*settings, *sections]))
    assert summary["reward"] == "env"
    # 100 steps of 8 environments, new episodes at the checkpoint after 50: two whole ones before and after it
    assert (
        len(list((tmp_path / "negative").glob("*.npy"))) + len(list((tmp_path / "positive").glob("*.npy")))
        == 32
    )
    counted = inspect(tmp_path / "data")
    assert counted.num_success_episodes + counted.num_failure_episodes == 32
    assert counted.num_frames >= 32 * 20


# Bad input


def test_a_missing_checkpoint(settings, tmp_path, capsys):
    assert main(["train", *settings, f"reward.model.checkpoint_path={tmp_path / 'none'}"]) == 1
    assert "there is no such checkpoint" in capsys.readouterr().err
    assert main(["train", *settings, "reward.model.checkpoint_path=null"]) == 2
    assert "which reward model should be used" in capsys.readouterr().err


def test_frames_of_another_size_are_refused_before_the_first_rollout(settings, tmp_path):
    with pytest.raises(DataError, match=r"frames are \[32, 32, 3\].*trained on \[24, 24, 3\]"):
        run_with(settings, tmp_path, ["env.train.init_params.image_size=[32,32]"])


def test_a_verdict_that_is_no_number_stops_and_saves(settings, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    runner = EmbodiedRunner(load_config("train", settings), tmp_path / "run")
    judge, calls = runner.reward_worker, []
    real = judge._scorer

    def broken(frames):
        logits, spread = real(frames)
        calls.append(len(logits))
        if len(calls) > 2:
            logits[3] = np.nan
        return logits, spread

    judge._scorer = broken
    with pytest.raises(DataError, match=r"score of frame 3 of .* is not finite.*last good state is"):
        runner.run()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert evaluate_checkpoint(saved, 5, seed=0)["episodes"] == 5


def test_what_the_environment_does_not_tell(tmp_path):
    config = load_config(
        "train",
        [
            "env.train.id=CartPole-v1",
            "env.eval.id=CartPole-v1",
            "env.train.num_envs=4",
            "env.eval.num_envs=4",
            "learner.total_steps=800",
            "learner.eval_episodes=4",
            "runner.logger.backends=[]",
            f"runner.logger.log_path={tmp_path}",
        ],
    )
    _, summary = train(config)
    assert summary["success_once"] is None and summary["env_return"] > 5
    with pytest.raises(ConfigError, match="does not tell success"):
        train(replace(config, reward=replace(config.reward, collect_data=True)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["learner.algorithm=dqn"], "DQN needs discrete actions"),
        (["runner.task_type=text"], "text tasks have no environment"),
        (["reward.standalone=true"], "standalone"),
    ],
)
def test_settings_that_do_not_fit(settings, more, message):
    with pytest.raises(ConfigError, match=message):
        train(load_config("train", [*settings, *more]))


def test_a_resume_from_another_algorithm_is_refused(settings, finished):
    folder, _ = finished("ppo")
    with pytest.raises(ConfigError, match="holds a policy of PPO, the config asks for SAC"):
        train(load_config("train", [*settings, *SAC, f"runner.resume_dir={folder}"]))


def test_ppo_goes_on_with_another_number_of_environments(settings, finished):
    folder, _ = finished("ppo")
    more = ["env.train.num_envs=4", "learner.total_steps=900", f"runner.resume_dir={folder}"]
    _, summary = train(load_config("train", [*settings, *more]))
    assert summary["env_steps"] == 800 + 25 * 4


def test_a_damaged_policy_is_named(finished, tmp_path):
    step = tmp_path / "step_800"
    shutil.copytree(finished("ppo")[0] / "checkpoints" / "step_800", step)
    (step / "state.pt").write_bytes((step / "state.pt").read_bytes()[:500])
    with pytest.raises(DataError, match=r"state\.pt"):
        evaluate_checkpoint(step, 5, seed=0)
    with pytest.raises(DataError, match="holds no saved policy"):
        evaluate_checkpoint(tmp_path / "nowhere", 5, seed=0)


def test_an_alarm_stops_the_run(settings, tmp_path):
    more = ["monitor.action=stop", "monitor.patience=1", "monitor.min_episodes=8", "learner.total_steps=4000"]
    summary = run_with(settings, tmp_path, more)
    assert summary["stopped"].startswith("alarm: ") and summary["env_steps"] < 4000
    assert (tmp_path / "run" / "alarms.jsonl").stat().st_size > 0


def test_exact_seeding(settings, finished):
    first, _ = finished("ppo")
    torch.manual_seed(1)  # the global generator has no part in it
    second, _ = train(load_config("train", settings))
    curves = [[without_times(entry) for entry in lines(folder)] for folder in (first, second)]
    assert curves[0] == curves[1] and len(curves[0]) > 2


def test_films_are_written_in_the_format_that_is_asked_for(settings, tmp_path, capsys):
    short = ["learner.total_steps=200", "learner.eval_interval=100000", "runner.video_format=mp4"]
    run_with(settings, tmp_path, short)
    videos = tmp_path / "run" / "videos"
    assert sorted(path.name for path in videos.iterdir()) == ["eval_0.json", "eval_0.mp4"]
    about = json.loads((videos / "eval_0.json").read_text())
    frames = [picture for _, picture in video_frames(videos / "eval_0.mp4")]
    assert len(frames) == len(about["prob_success"]) == len(about["env_reward"]) == len(about["actions"])
    assert all(0 <= prob <= 1 for prob in about["prob_success"])
    assert "data:video/mp4" in (tmp_path / "run" / "report.html").read_text()
    assert main(["data", "view", str(tmp_path / "run"), "--out", str(tmp_path / "a.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_frames"] == len(frames)
