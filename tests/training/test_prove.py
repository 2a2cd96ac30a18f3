"""`prove`: a run beside its controls, on tiny runs."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from guerdon.cli.main import main
from guerdon.config import load_config
from guerdon.core.errors import ConfigError, RunInterrupted
from guerdon.training.arms import make_arm, run_arm
from guerdon.training.checkpoints import load_policy
from guerdon.training.prove import _check_resumed, arms_of, load, prove
from guerdon.training.runs import _still_stopped
from guerdon.training.trainer import EmbodiedRunner
from tests.training.conftest import short_settings
from tests.training.short_runs import SAC, demonstrate, lines, make_runner

BRIEFLY = [
    "learner.total_steps=400",
    "learner.save_interval=200",
    "learner.eval_interval=200",
    "+env.train.init_params.reward=none",
]


@pytest.fixture(scope="module")
def proof(checkpoint, tmp_path_factory):
    """A proof of two seeds with all arms, one after another; tests read it and do not change it."""
    folder = tmp_path_factory.mktemp("prove") / "proof"
    settings = [*short_settings(checkpoint, folder), *BRIEFLY]
    return settings, prove("train", settings, seeds=2, workers=1)


def test_all_arms_of_all_seeds(proof):
    _, outcome = proof
    assert list(outcome["arms"]) == ["start", "learned", "off", "shuffled", "true"]
    for name, arm in outcome["arms"].items():
        assert [result["seed"] for result in arm["seeds"]] == [0, 1]
        assert arm["episodes"] == 10 and arm["env_steps"] == (0 if name == "start" else 400)
        assert 0 <= arm["low"] <= arm["mean"] <= arm["high"] <= 1
    assert set(outcome["differences"]) == {"start", "off", "shuffled", "true"}
    assert "2 seed(s)" in " ".join(text for _, text in outcome["reasons"])


def place_of(proof):
    return Path(proof[1]["folder"])


def test_what_is_left(proof):
    root, outcome = place_of(proof), proof[1]
    saved = json.loads((root / "prove.json").read_text())
    assert saved["verdict"] == outcome["verdict"] and saved["arms"] == outcome["arms"]
    page = (root / "prove.html").read_text()
    assert "arm-shuffled" in page and 'href="seed_1/off/report.html"' in page
    for arm in ("start", "learned"):  # the same episode before and after
        assert f'src="seed_0/{arm}/videos/eval_0.gif"' in page
        assert (root / "seed_0" / arm / "videos" / "eval_0.gif").is_file()
    controls = {name: "env" if name == "true" else name for name in ("off", "shuffled", "true")}
    for name, control in controls.items():
        summary = json.loads((root / "seed_0" / name / "summary.json").read_text())
        assert summary["reward"] == f"control ({control})" and summary["alarms"] == []


def test_every_arm_trains_on_its_own_reward_from_the_same_start(proof):
    root = place_of(proof)
    runs = {name: lines(root / "seed_0" / name) for name in ("learned", "off", "shuffled", "true")}
    first = {name: entries[0] for name, entries in runs.items()}
    assert first["learned"]["rollout/rewards"] == first["learned"]["rollout/learned_rewards"] > 0
    assert {entry["rollout/rewards"] for entry in runs["off"] if "rollout/rewards" in entry} == {0.0}
    assert {entry.get("reward/frames_rendered", 0) for entry in runs["off"]} == {0.0}
    # The same episodes and verdicts in the first rollout; only their places differ.
    assert first["shuffled"]["rollout/rewards"] == pytest.approx(first["learned"]["rollout/rewards"])
    assert first["shuffled"]["train/policy_loss"] != first["learned"]["train/policy_loss"]
    assert first["true"]["reward/agreement"] == 1.0
    episodes = {name: [entry.get("env/length") for entry in entries] for name, entries in runs.items()}
    assert episodes["off"] == episodes["learned"]
    start = load_policy(root / "seed_0" / "start")
    assert start.step == 0 and start.state["loop"]["version"] == 0


def test_finished_arms_are_not_run_again_and_more_seeds_are_added(proof, monkeypatch):
    settings, outcome = proof
    ran = []
    monkeypatch.setattr("guerdon.training.arms.run_arm", lambda *arm: ran.append(arm))
    assert prove("train", settings, seeds=2, workers=1)["arms"] == outcome["arms"]
    assert ran == []
    with pytest.raises(ConfigError, match="proof of other settings"):
        prove("train", [*settings, "learner.ppo.lr=1e-3"], seeds=2)


def test_an_interrupted_arm_goes_on_to_the_same_end(proof, tmp_path):
    settings, outcome = proof
    moved = [item for item in settings if not item.startswith("runner.logger.log_path")]
    root = tmp_path / "again"
    shutil.copytree(place_of(proof), root)
    arm = root / "seed_1" / "learned"
    last = sorted((arm / "checkpoints").iterdir())[-1]
    assert last.name == "step_400"
    shutil.rmtree(last)  # as after a kill between two checkpoints
    for name in ("summary.json", "report.html"):
        (arm / name).unlink()
    again = prove("train", [*moved, f"runner.logger.log_path={root}"], seeds=2, workers=1)

    def ends(found):
        return [
            [(each["success"], each["env_return"], each["curve"]) for each in arm["seeds"]]
            for arm in found["arms"].values()
        ]

    assert ends(again) == ends(outcome)


def test_a_proof_needs_a_learned_reward_and_known_arms(settings):
    with pytest.raises(ConfigError, match="no learned reward to prove"):
        prove("train", [])
    with pytest.raises(ConfigError, match="no arm 'zero'"):
        prove("train", settings, arms=["zero"])
    with pytest.raises(ConfigError, match="prove runs the controls itself"):
        prove("train", [*settings, "reward.control=shuffled"])
    with pytest.raises(ConfigError, match="at least one seed"):
        prove("train", settings, seeds=0)


def test_where_the_model_ends_episodes_there_is_no_true_arm(settings):
    config = load_config("train", settings)
    standalone = replace(config, reward=replace(config.reward, standalone=True))
    names, left_out = arms_of(standalone, ["true", "off"])
    assert names == ["start", "learned", "off"] and "ends episodes" in left_out["true"]


def test_success_as_the_reward_needs_an_environment_that_tells_it(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("guerdon.training.env_setup.success_of", lambda *args: None)
    with pytest.raises(ConfigError, match="does not tell"):
        make_runner(settings, tmp_path, ["reward.control=env"])


def test_a_config_of_the_zoo_is_found_by_its_name():
    config = load("point_reach_gail", ["output_dir=elsewhere", "stop_value=9"])
    assert config.reward_model["type"] == "gail" and config.runner.output_dir == "elsewhere"
    off = make_arm(config, Path("root"), "off", 3)
    assert off.config.reward.control == "off" and off.config.seed == 3
    assert off.config.learner.stop_return is None and config.learner.stop_return == 9


@pytest.mark.slow
def test_side_by_side_after_a_kill_and_for_a_failing_arm(settings, tmp_path, capfd):
    # the arm is killed after its first update, when the quicker one beside it cannot have ended yet
    more = [*BRIEFLY, "learner.total_steps=4000", "learner.eval_interval=1000"]
    command = [sys.executable, "-m", "guerdon.cli.main", "prove", *settings, *more, "--seeds", "1"]
    command += ["--workers", "2", "--arms", "learned,off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    arm = tmp_path / "run" / "seed_0" / "learned"
    until = time.monotonic() + 120
    while not list(arm.glob("checkpoints/step_*")) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[1].decode()  # on a busy machine the other arm may have ended already
    begun = {item.name for item in arm.glob("checkpoints/step_*")}
    assert begun and not (arm / "summary.json").exists()
    time.sleep(1.0)  # the arm ends with the command
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in (arm / "log.txt").read_text() and "off, seed 0:" in said + done.stderr
    assert "without it the same training gave" in done.stdout
    (tmp_path / "run" / "seed_0" / "off" / "summary.json").unlink()
    for broken in (tmp_path / "run" / "seed_0" / "off" / "checkpoints").iterdir():
        (broken / "state.pt").write_bytes(b"no")
    (tmp_path / "run" / "seed_0" / "learned" / "summary.json").unlink()
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and "the arm off, seed 0 failed: DataError" in failed.stderr


def rewards_of(root):
    """Arm -> mean training rewards of the iterations with updates."""
    return {
        arm: [
            entry["rollout/rewards"] for entry in lines(root / "seed_0" / arm) if "rollout/rewards" in entry
        ]
        for arm in ("learned", "off", "shuffled", "true")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sac", "asynchronous", "rlpd", "td3"])
def test_off_policy_learners_have_the_same_arms(kind, settings, tmp_path):
    more = [*settings, *BRIEFLY, *SAC, "learner.total_steps=1024"]
    if kind == "asynchronous":
        more.append("asynchronous.enabled=true")
    if kind == "rlpd":
        more.append(f"learner.sac.prior_data={demonstrate(tmp_path / 'demos', 4)}")
    if kind == "td3":
        more += ["learner.algorithm=td3", "learner.td3.learning_starts=200", "learner.td3.batch_size=32"]
    outcome = prove("train", more, seeds=1, workers=1)
    assert list(outcome["arms"]) == ["start", "learned", "off", "shuffled", "true"]
    rewards = rewards_of(tmp_path / "run")
    assert any(rewards["learned"]) and any(rewards["shuffled"]) and not any(rewards["off"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed_cartpole_gail", "bit_flip_her"])
def test_models_of_the_zoo_have_the_same_arms(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["learner.total_steps=4800", "learner.eval_interval=2400"]
    if name == "fixed_cartpole_gail":
        arguments = ["--env", "guerdon/FixedCartPole-v0", "--episodes", "3", "--out", "demos.safetensors"]
        assert main(["collect-demos", *arguments]) == 0
        more.append("+reward_model.data_path=demos.safetensors")
    outcome = prove(name, more, seeds=1, workers=1)
    assert list(outcome["arms"]) == ["start", "learned", "off", "shuffled", "true"]
    rewards = rewards_of(Path(outcome["folder"]))
    assert any(rewards["learned"]) and any(rewards["shuffled"]) and not any(rewards["off"])
    same = rewards["true"] == rewards["learned"]
    assert same == (name == "bit_flip_her")  # hindsight gives the environment's own rewards, for other goals


def test_an_alarms_stop_outlives_ctrl_c_in_the_last_evaluation(proof, tmp_path, monkeypatch):
    settings, _ = proof
    config = load_config("train", [*settings, "monitor.action=stop"])
    arm = make_arm(config, tmp_path, "learned", 0)
    start = place_of(proof) / "seed_0" / "start"
    with monkeypatch.context() as patch:
        patch.setattr(EmbodiedRunner, "_watch", lambda *_: "alarm: success_gap")
        patch.setattr(EmbodiedRunner, "_last_evaluation", raises(KeyboardInterrupt))
        with pytest.raises(RunInterrupted):
            run_arm(arm, start)
    assert not arm.finished
    summary = run_arm(arm, start)
    assert (summary["stopped"], summary["env_steps"]) == ("alarm: success_gap", 200)
    assert arm.result().stopped == "alarm: success_gap"
    # Who resumes a run that did end wants it to go on; so does who no longer asks for the stop.
    saved = load_policy(arm.folder)
    assert saved.state["stopped"] == "alarm: success_gap"
    assert _still_stopped(config, saved.state["stopped"], saved.folder) is None
    (arm.folder / "summary.json").unlink()
    assert _still_stopped(config, saved.state["stopped"], saved.folder) == "alarm: success_gap"
    warns = replace(config, monitor=replace(config.monitor, action="warn"))
    assert _still_stopped(warns, saved.state["stopped"], saved.folder) is None


def raises(error):
    def function(*_):
        raise error

    return function


def test_the_true_arm_does_not_learn_from_scores_of_an_older_run(finished, checkpoint, tmp_path, monkeypatch):
    older, _ = finished("sac")
    ran = []
    monkeypatch.setattr("guerdon.training.prove.run_arms", lambda *arms: ran.append(arms))
    settings = [*short_settings(checkpoint, tmp_path / "proof"), *SAC, f"runner.resume_dir={older}"]
    with pytest.raises(ConfigError, match=r"the arm `true` cannot run: .*buffer with the scores of a reward"):
        prove("train", settings, seeds=1)
    assert ran == []
    _check_resumed(load_config("train", settings), ["start", "learned", "off", "shuffled"])
    runner = make_runner(settings, tmp_path, ["reward.control=env"])
    try:
        with pytest.raises(ConfigError, match=r"reward\.control=env needs the environment's success"):
            runner.start_or_resume()
    finally:
        runner.close()
