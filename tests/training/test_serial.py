"""The serial pipelines: what a run leaves behind, how it goes on, and what it refuses."""

import json
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml

from guerdon.agents.ppo import PPO
from guerdon.core.errors import ConfigError, DataError
from guerdon.monitoring.reward_path import RewardPathError
from guerdon.rewards import REWARD_MODELS, StepBatch, ZooModel, create_reward_model, write_demonstrations
from guerdon.run import serial_pipeline_reward_model, serial_pipeline_reward_model_onpolicy
from guerdon.run import serial_pipeline_reward_model_offpolicy as offpolicy
from guerdon.training.checkpoints import load_policy
from guerdon.training.off_policy import OffPolicyLoop, ReplayLearning
from guerdon.training.on_policy import OnPolicyLoop
from guerdon.training.online_reward import OnlineReward
from guerdon.training.serial import shapes_of
from tests.rewards.zoo.zoo_tasks import FIXED_CARTPOLE, POINT_REACH, experts, play, task
from tests.training.serial_tools import small
from tests.training.short_runs import without_times


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demos")
    paths = {}
    for env_id in (FIXED_CARTPOLE, POINT_REACH):
        paths[env_id] = str(folder / f"{env_id.split('/')[1]}.safetensors")
        write_demonstrations(paths[env_id], experts(env_id, 3))
    return paths


def settings(demos, algorithm="ppo", **changes):
    tree = small(algorithm, **changes)
    tree["reward_model"] = {**tree["reward_model"], "data_path": demos[tree["env"]["train"]["id"]]}
    return tree


def only_folder(place):
    (folder,) = place.iterdir()
    return folder


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# What a run leaves behind


def test_a_run_leaves_everything_in_its_folder(demos, tmp_path):
    tree = settings(demos, output_dir=str(tmp_path), exp_name="mine", stop_value=1e9)
    result = serial_pipeline_reward_model_onpolicy(tree, seed=3)
    folder = only_folder(tmp_path / "mine")
    assert result.folder == folder
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert (written["seed"], written["learner"]["ppo"]["num_steps"]) == (3, 32)
    names = {name for line in lines(folder) for name in line}
    assert {"reward_model/loss", "train/policy_loss", "rollout/learned_rewards", "eval/env_return"} <= names
    assert [line["step"] for line in lines(folder)] == [*range(128, 1025, 128), 1024]  # the last: evaluated
    assert list(folder.glob("events.out.tfevents.*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["env_steps"] == 1024 and summary["seed"] == 3 and not summary["solved"]
    assert [each["env_steps"] for each in summary["evaluations"]] == [512, 1024]
    assert summary["best_return"] == max(each["env_return"] for each in summary["evaluations"])
    assert not result.solved and (folder / "report.html").is_file()
    last, best = (load_policy(folder / "checkpoints" / name) for name in ("step_1024", "best"))
    assert last.step == 1024 and best.step in (512, 1024)
    assert load_policy(folder).folder == folder / "checkpoints" / "step_1024"
    obs = np.zeros((2, 4), np.float32)
    assert (last.learner.act(obs, True) == result.policy.act(obs, True)).all()
    fresh = create_reward_model(result.reward_model.cfg)
    fresh.load(folder / "checkpoints" / "step_1024" / "reward_model.pt")
    shown = play(FIXED_CARTPOLE, lambda obs: np.zeros(len(obs), np.int64), 1)[0]
    assert torch.equal(fresh.rewards(shown), result.reward_model.rewards(shown))
    assert not torch.equal(create_reward_model(result.reward_model.cfg).rewards(shown), fresh.rewards(shown))


def test_scalars_are_in_tensorboard(demos, tmp_path):
    serial_pipeline_reward_model(settings(demos, "dqn", output_dir=str(tmp_path)), max_env_step=256)
    events = b"".join(file.read_bytes() for file in tmp_path.rglob("events.out.tfevents.*"))
    for name in (b"reward_model/loss", b"train/loss", b"rollout/learned_rewards", b"eval/env_return"):
        assert name in events


def test_without_an_output_dir_nothing_is_written(demos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = serial_pipeline_reward_model(settings(demos))
    assert result.folder is None and list(tmp_path.iterdir()) == []


def test_two_runs_of_the_same_second_have_two_folders(demos, tmp_path, monkeypatch):
    monkeypatch.setattr("guerdon.training.folders.time", SimpleNamespace(strftime=lambda form: "now"))
    for _ in range(2):
        serial_pipeline_reward_model(settings(demos, output_dir=str(tmp_path)), max_env_step=128)
    assert sorted(each.name for each in (tmp_path / "zoo").iterdir()) == ["now", "now-2"]


# Limits


def test_limits(demos):
    by_steps = offpolicy(settings(demos, "dqn"), max_env_step=300)
    assert by_steps.env_steps == 320  # whole rounds of 64
    by_updates = offpolicy(settings(demos, "dqn"), max_train_iter=20)
    assert 20 <= by_updates.train_iter < 40 and by_updates.env_steps < 1024
    assert len(by_updates.evaluations) >= 1
    solved = offpolicy(settings(demos, "dqn", stop_value=-1.0))
    assert solved.solved and solved.env_steps == 512


# Resume


class Cut(Exception):
    pass


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("dqn", marks=pytest.mark.slow), "sac"])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(demos, tmp_path, monkeypatch, algorithm):
    changes = {"mix": {"normalize": True, "combine_mode": "replace"}}
    whole = settings(demos, algorithm, output_dir=str(tmp_path / "whole"), **changes)
    uninterrupted = serial_pipeline_reward_model(whole, seed=1)
    halved = settings(demos, algorithm, output_dir=str(tmp_path / "interrupted"), **changes)
    loop = OnPolicyLoop if algorithm == "ppo" else OffPolicyLoop
    advance = loop.advance

    def interrupted(self, progress):
        if self.env_steps >= 640:  # two rounds after the checkpoint at 512
            raise Cut
        return advance(self, progress)

    monkeypatch.setattr(loop, "advance", interrupted)
    with pytest.raises(Cut):
        serial_pipeline_reward_model(halved, seed=1)
    monkeypatch.setattr(loop, "advance", advance)
    folder = only_folder(tmp_path / "interrupted" / "zoo")
    assert load_policy(folder).step == 512
    resumed = serial_pipeline_reward_model(halved, seed=1, resume_dir=str(folder))
    assert resumed.folder == folder
    first, second = lines(only_folder(tmp_path / "whole" / "zoo")), lines(folder)
    timeless = [[without_times(line) for line in each] for each in (first, second)]
    assert timeless[0] == timeless[1]
    assert len(first) == (9 if algorithm == "ppo" else 17)
    pairs = zip(uninterrupted.evaluations, resumed.evaluations, strict=True)
    assert all(one[0] == other[0] and one[2] == other[2] for one, other in pairs)
    ours, theirs = uninterrupted.reward_model.state_dict(), resumed.reward_model.state_dict()
    assert all(torch.equal(part, theirs["network"][name]) for name, part in ours["network"].items())


def test_what_cannot_be_resumed(demos, tmp_path):
    tree = settings(demos, "dqn", output_dir=str(tmp_path))
    folder = offpolicy(tree, max_env_step=256).folder
    with pytest.raises(ConfigError, match="trained with seed 0, not 5"):
        offpolicy(tree, seed=5, resume_dir=str(folder))
    with pytest.raises(ConfigError, match="a policy of DQN, the config asks for PPO"):
        serial_pipeline_reward_model(settings(demos), resume_dir=str(folder))
    wider = settings(demos, "dqn", output_dir=str(tmp_path))
    wider["reward_model"]["hidden"] = [8]
    with pytest.raises(DataError, match=r"reward_model\.hidden is \[16\], here \[8\]"):
        offpolicy(wider, resume_dir=str(folder))
    with pytest.raises(DataError, match="holds no saved policy"):
        offpolicy(tree, resume_dir=str(tmp_path / "elsewhere"))
    longer = offpolicy(tree, resume_dir=str(folder), max_env_step=384)
    assert longer.env_steps == 384  # that of the end of a run comes after its last checkpoint
    assert [each[0] for each in longer.evaluations] == [384]


# Teaching the reward model


def test_pretraining_teaches_before_the_first_update(demos, monkeypatch):
    order = []
    gail = REWARD_MODELS["gail"]
    for cls, name in ((gail, "pretrain"), (gail, "train"), (PPO, "update")):
        method = getattr(cls, name)

        def noted(self, *args, method=method, name=name):
            order.append((name, len(self.experience) if isinstance(self, ZooModel) else None))
            return method(self, *args)

        monkeypatch.setattr(cls, name, noted)
    serial_pipeline_reward_model(settings(demos), pretrain_reward=True, max_env_step=256)
    assert [name for name, _ in order] == ["pretrain", "train", "update"]
    assert order[0][1] == 128  # one batch of the untrained policy
    order.clear()
    only_before = settings(demos, pretrain_reward=True, cooptrain_reward=False)
    serial_pipeline_reward_model(only_before, max_env_step=256)
    assert [name for name, _ in order] == ["pretrain", "update"]


# The learned reward reaches the loss


class Constant(ZooModel):
    def rewards(self, batch: StepBatch) -> torch.Tensor:
        return torch.full(batch.shape, 3.0)


def run_constant(algorithm="ppo", **changes):
    env = task(small(algorithm)["env"]["train"]["id"], 4)
    model = Constant(shapes_of(env))
    return serial_pipeline_reward_model(
        small(algorithm, **changes), env_setting=env, model=model, max_env_step=256
    )


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "sac"])
def test_the_check_passes_and_changes_nothing(algorithm, monkeypatch):
    checked = run_constant(algorithm)
    monkeypatch.setattr(OnlineReward, "check_path", lambda *args: True)
    unchecked = run_constant(algorithm)
    one, other = checked.policy.state_dict(), unchecked.policy.state_dict()
    key = {"ppo": "actor", "dqn": "values", "sac": "critics"}[algorithm]
    assert str(one[key]) == str(other[key])


def test_a_dropped_reward_is_noticed(monkeypatch):
    monkeypatch.setattr(OnPolicyLoop, "_hold", lambda self, learned: self.rollout.training_rewards.numpy())
    monkeypatch.setattr(ReplayLearning, "_hold", lambda self, batch, learned: batch.env_rewards.numpy())
    with pytest.raises(RewardPathError, match="dropped on the way"):
        run_constant("ppo")
    with pytest.raises(RewardPathError, match="dropped on the way"):
        run_constant("dqn")


def test_advantages_from_another_reward_are_noticed(monkeypatch):
    advantages = PPO.advantages

    def early(self, rollout):
        rollout.training_rewards = rollout.env_rewards
        return advantages(self, rollout)

    monkeypatch.setattr(PPO, "advantages", early)
    with pytest.raises(RewardPathError, match="computed before relabelling"):
        run_constant("ppo")


def test_a_turned_reward_is_noticed(monkeypatch):
    hold = OnPolicyLoop._hold
    monkeypatch.setattr(OnPolicyLoop, "_hold", lambda self, learned: hold(self, -learned))
    with pytest.raises(RewardPathError, match="do not follow"):
        run_constant("ppo")


def test_a_reward_without_weight_is_noticed():
    with pytest.raises(RewardPathError, match="no influence"):
        run_constant(mix={"combine_mode": "weighted", "reward_weight": 0.0, "env_reward_weight": 1.0})
    later = {"combine_mode": "weighted", "reward_weight": 0.0, "reward_weight_end": 1.0}
    assert run_constant(mix=later).env_steps == 256  # it gets a weight on the way


# What is refused


def test_the_other_pipeline_is_named(demos):
    with pytest.raises(ConfigError, match="use the off-policy pipeline"):
        serial_pipeline_reward_model_onpolicy(settings(demos, "dqn"))
    with pytest.raises(ConfigError, match="use the on-policy pipeline"):
        offpolicy(settings(demos))


def test_a_model_without_demonstrations_says_so():
    with pytest.raises(ConfigError, match=r"set reward_model\.data_path"):
        serial_pipeline_reward_model(small())


class Broken(Constant):
    def rewards(self, batch: StepBatch) -> torch.Tensor:
        return torch.full(batch.shape, float("nan"))


def test_rewards_that_are_no_numbers_are_refused():
    env = gym.make_vec(FIXED_CARTPOLE, 4, vectorization_mode="vector_entry_point")
    with pytest.raises(DataError, match="Broken gave rewards that are not finite"):
        serial_pipeline_reward_model(small(), env_setting=env, model=Broken(shapes_of(env)))


def test_the_pipelines_are_imported_on_first_use():
    code = "import sys, guerdon.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
