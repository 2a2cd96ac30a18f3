"""Bytes that changed inside a checkpoint are noticed, resuming names the one before, and no code is run."""

import json
import logging
import struct
import sys
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import torch

from guerdon.agents.registry import make_agent
from guerdon.cli.train import evaluate_checkpoint, train
from guerdon.cli.zoo import collect_demos
from guerdon.config import EnvConfig, LearnerConfig, NetworkConfig, load_config
from guerdon.core.errors import ConfigError, DataError
from guerdon.training.checkpoints import (
    find_policy,
    find_sound_policy,
    load_policy,
    save_policy,
)
from guerdon.training.serial import serial_pipeline_reward_model_offpolicy as offpolicy
from tests.training.serial_tools import small
from tests.training.short_runs import lines

CFG = LearnerConfig(algorithm="ppo", network=NetworkConfig(hidden=(8,)))
SPACES = gym.spaces.Box(-1.0, 1.0, (3,), np.float32), gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def save(folder, step=1, env=None, **state):
    run = {"loop": {}, "alarms": [], **state}
    return save_policy(folder, make_agent(CFG, *SPACES, step), CFG, env or EnvConfig(), SPACES, step, run)


def flip(path, place=0.5):
    """Change one byte of the numbers in a file, where no format looks."""
    content = bytearray(path.read_bytes())
    start, size = 0, len(content)
    if zipfile.is_zipfile(path):  # between the members of an archive there is padding, which nobody reads
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda member: member.compress_size)
        lengths = struct.unpack("<HH", content[largest.header_offset + 26 : largest.header_offset + 30])
        start, size = largest.header_offset + 30 + sum(lengths), largest.compress_size
    content[start + int(size * place)] ^= 4
    path.write_bytes(content)


# Policies


def test_a_changed_byte_is_noticed_wherever_it_is(tmp_path):
    state = save(tmp_path / "policy") / "state.pt"
    whole, ours = state.read_bytes(), load_policy(tmp_path / "policy").learner.state_dict()["actor"]
    rng, refused = np.random.default_rng(0), 0
    for _ in range(60):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        state.write_bytes(content)
        try:
            theirs = load_policy(tmp_path / "policy").learner.state_dict()["actor"]
        except DataError as error:
            assert "state.pt" in str(error)
            refused += 1
        else:  # a byte that is not part of the content, such as the padding before the numbers
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert refused > 20


@pytest.mark.parametrize("damaged", [["step_30"], ["step_30", "step_20"]])
def test_the_checkpoint_before_a_damaged_one_is_offered(tmp_path, damaged):
    for step in (9, 10, 20, 30):
        save(tmp_path / "checkpoints" / f"step_{step}", step)
    for name in damaged:
        flip(tmp_path / "checkpoints" / name / "state.pt")
    assert find_policy(tmp_path).name == "step_30"
    sound = "step_20" if len(damaged) == 1 else "step_10"
    with pytest.raises(DataError, match=rf"step_30/state\.pt: is damaged.*runner\.resume_dir=\S*{sound}$"):
        find_sound_policy(tmp_path, "runner.resume_dir")
    assert find_sound_policy(tmp_path / "checkpoints" / sound, "runner.resume_dir").name == sound


def test_a_damaged_replay_buffer_counts_too(tmp_path):
    for step in (10, 20):
        folder = save(tmp_path / f"step_{step}", step)
        np.savez(folder / "replay.npz", obs=np.arange(1000))
    flip(tmp_path / "step_20" / "replay.npz")
    with pytest.raises(DataError, match=r"step_20/replay\.npz: is damaged.*resume_dir=\S*step_10"):
        find_sound_policy(tmp_path, "runner.resume_dir")


def test_older_checkpoints_load_with_a_notice(tmp_path, caplog):
    folder = save(tmp_path / "policy")
    content = torch.load(folder / "state.pt", weights_only=False)
    del content["description"]
    torch.save(content, folder / "state.pt", _use_new_zipfile_serialization=False)
    with caplog.at_level(logging.INFO, "guerdon"):
        assert load_policy(folder).step == 1
    assert "state.pt carries no checksums" in caplog.text
    assert "policy.json carries no checksum" in caplog.text


def test_an_altered_description_is_not_used(tmp_path, caplog):
    folder = save(tmp_path / "policy")
    about = json.loads((folder / "policy.json").read_text())
    about["env"]["id"] = "other/Env-v0"
    (folder / "policy.json").write_text(json.dumps(about))
    assert load_policy(folder).env.id == EnvConfig().id
    assert "differs from the description inside state.pt" in caplog.text


HOSTILE = {
    "hidden": ("learner", "network", "hidden", [10**9, 10**9]),
    "shape": ("observation_space", "shape", [10**9, 10**9]),
    "choices": ("action_space", {"kind": "discrete", "n": 10**12, "start": 0}),
    "box": ("observation_space", "dtype", "O"),
    "nested": ("observation_space", {"kind": "dict", "spaces": {"a": {"kind": "dict", "spaces": {}}}}),
    "device": ("learner", "device", "warp:77"),
    "env": ("env", 7),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_made_up_descriptions_take_no_memory(tmp_path, change):
    folder = save(tmp_path / "policy")
    content = torch.load(folder / "state.pt", weights_only=False)
    about = json.loads(content["description"])
    *path, key, value = change
    part = about
    for name in path:
        part = part[name]
    part[key] = value
    torch.save({**content, "description": json.dumps(about)}, folder / "state.pt")
    with pytest.raises(DataError, match="policy"):
        load_policy(folder)


def test_a_state_that_refers_to_itself_does_not_hang(tmp_path):
    folder = save(tmp_path / "policy")
    content = torch.load(folder / "state.pt", weights_only=False)
    nested = (1,)
    for _ in range(60):
        nested = (nested, nested)
    torch.save({**content, "learner": nested}, folder / "state.pt")
    with pytest.raises(DataError, match="refers to itself"):
        load_policy(folder)


# No code of a stranger


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A policy for an environment of a module that lies in the working directory."""
    (tmp_path / "trap_module.py").write_text("raise SystemExit('code was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return save(tmp_path / "policy", env=EnvConfig(id="trap_module:Env-v0"))


def test_a_policy_does_not_decide_what_is_imported(trap, tmp_path):
    hint = r"import the module 'trap_module' and run its code.*--env trap_module:Env-v0"
    with pytest.raises(ConfigError, match=hint):
        evaluate_checkpoint(trap, 1, 0)
    with pytest.raises(ConfigError, match=hint):
        collect_demos(tmp_path / "demos.safetensors", policy=str(trap), episodes=1)
    assert "trap_module" not in sys.modules


def test_a_policy_names_no_function_to_label_with(trap, tmp_path, caplog):
    caplog.set_level(logging.INFO, "guerdon")
    env = EnvConfig(id="CartPole-v1", label_fn="trap_module:function")
    saved = load_policy(save(tmp_path / "labelled", env=env))
    assert saved.env.label_fn is None and saved.playable_env("CartPole-v1", "").label_fn is None
    assert "env.label_fn=trap_module:function is not used" in caplog.text
    assert "trap_module" not in sys.modules


def test_the_user_may_name_it(trap):
    with pytest.raises(SystemExit, match="code was run"):
        evaluate_checkpoint(trap, 1, 0, env_id="trap_module:Env-v0")


def test_the_id_may_not_hide_in_the_arguments(tmp_path):
    env = EnvConfig(env_type="maniskill", id="PickCube-v1", init_params={"id": "trap_module:Env-v0"})
    with pytest.raises(ConfigError, match="trap_module"):
        load_policy(save(tmp_path / "policy", env=env)).playable_env(None, "name it")


# Runs


def test_a_serial_run_keeps_the_checkpoint_before_the_last(tmp_path):
    tree = small("dqn", output_dir=str(tmp_path / "runs"), reward_model={"type": "rnd"})
    folder = offpolicy(tree, max_env_step=512).folder
    last, previous = (folder / "checkpoints" / f"step_{step}" for step in (512, 256))
    assert (load_policy(last).step, load_policy(previous).step) == (512, 256)
    flip(last / "state.pt")
    with pytest.raises(
        DataError, match=r"step_512/state\.pt: is damaged.* resume_dir=\S*checkpoints/step_256$"
    ):
        offpolicy(tree, resume_dir=str(folder), max_env_step=640)
    assert offpolicy(tree, resume_dir=str(previous), max_env_step=640).env_steps == 640


@pytest.fixture
def run_settings(tmp_path):
    return [
        "env.train.num_envs=4",
        "env.eval.num_envs=4",
        "+env.train.init_params.max_episode_steps=16",
        "+env.eval.init_params.max_episode_steps=16",
        "learner.ppo.num_steps=16",
        "learner.total_steps=128",
        "learner.save_interval=64",
        "learner.eval_interval=64",
        "learner.eval_episodes=4",
        f"runner.logger.log_path={tmp_path / 'run'}",
    ]


def test_a_resumed_run_does_not_repeat_its_last_evaluation(run_settings, tmp_path):
    folder, _ = train(load_config("train", run_settings))
    before = lines(folder)
    assert [entry["step"] for entry in before] == [64, 128, 128]
    again, _ = train(load_config("train", [*run_settings, f"runner.resume_dir={folder}"]))
    assert again == folder and lines(folder) == before
    newest, older = (folder / "checkpoints" / f"step_{step}" for step in (128, 64))
    flip(newest / "state.pt")
    with pytest.raises(DataError, match=r"step_128/state\.pt: is damaged.*runner\.resume_dir=\S*step_64$"):
        train(load_config("train", [*run_settings, f"runner.resume_dir={folder}"]))
    train(load_config("train", [*run_settings, f"runner.resume_dir={older}"]))
    assert [entry["step"] for entry in lines(folder)] == [64, 128, 128]
