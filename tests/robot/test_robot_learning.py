"""A robot and its reward model: it ends episodes, people are learned from, what it says can be watched."""

import io
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from guerdon.agents.networks import to_obs
from guerdon.cli.main import main
from guerdon.cli.robot import teleop
from guerdon.cli.teleop_page import LiveView, Shown, ViewServer
from guerdon.config import load_config
from guerdon.config.schema_robot import RobotSimConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.formats.realworld_pkl import read_recorded
from guerdon.data.store import EpisodeStore
from guerdon.envs.robot import ScriptedOperator
from guerdon.envs.robot.sim.server import SimServer
from guerdon.rewards.image.scorer import RewardManager
from guerdon.training.demonstrations import _until_success
from guerdon.training.trainer import EmbodiedRunner
from guerdon.web import TOKEN_HEADER
from tests.robot.conftest import HOLD, SCALE, SIZE, section

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = str(ROOT / "examples" / "embodiment" / "config")
NAME = "realworld_peginsertion_rlpd_cnn_async"


SMALL = {
    "collect_data.sh": [
        "seed=3", "runner.num_data_episodes=8", f"env.eval.override_cfg.success_hold_steps={HOLD}",
        f"env.eval.override_cfg.image_size=[{SIZE},{SIZE}]", "env.eval.override_cfg.max_episode_steps=40",
    ],
    "process_realworld_data.py": [],
    "run_reward_training.sh": [
        "runner.max_epochs=16", "reward.model.arch=resnet10", "reward.model.width=8", "fit.optim.lr=3e-3",
        f"reward.model.image_size=[3,{SIZE},{SIZE}]", "runner.logger.backends=[]",
    ],
}  # fmt: skip
"""What is added to the page's commands."""


def page_commands():
    """Script -> the command of the page that runs it."""
    text = (ROOT / "docs" / "tutorials" / "robot.md").read_text().replace("\\\n", " ")
    found = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in found for line in block.splitlines() if "examples/" in line]
    return {re.search(r"(\w+\.(?:sh|py))", line)[1]: line for line in lines}


def run_page_command(script, folder, server, more, code=0):
    """As it stands on the page, but for the address, the robot's time and what is added."""
    command = page_commands()[script].replace("127.0.0.1:5000", server.url.removeprefix("http://"))
    command = re.sub(r"time_scale=\d+", f"time_scale={SCALE:g}", command)
    command = " ".join([command, *(f"'{item}'" for item in more)])
    result = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=900)
    assert result.returncode == code, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quick_commands):
    """A recording and a small model that was fitted to it, by the commands of docs/tutorials/robot.md."""
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("robot")
    (work / "examples").symlink_to(ROOT / "examples")
    with SimServer(RobotSimConfig(port=0, time_scale=SCALE, image_size=(SIZE, SIZE))) as server:
        said = run_page_command("collect_data.sh", work, server, SMALL["collect_data.sh"]).stderr
        assert re.search(r"^success \d fail \d, 8/8 episodes$", said, re.M)
        for script in ("process_realworld_data.py", "run_reward_training.sh"):
            run_page_command(script, work, server, SMALL[script])
        (recording,) = work.glob("logs/*/data.pkl")
    reward = work / "logs" / "reward_model_realworld"
    assert json.loads((reward / "summary.json").read_text())["val"]["auc"] > 0.95
    (recording.parent / "reward").symlink_to(reward)
    return recording.parent


def overrides(server, fitted, folder, *more):
    """The training config of RLinf's real-world guide, made small."""
    robot = [
        setting
        for part in ("train", "eval")
        for setting in (
            f"env.{part}.override_cfg.url={server.url}",
            f"env.{part}.override_cfg.time_scale={SCALE}",
            f"env.{part}.override_cfg.image_size=[{SIZE},{SIZE}]",
            f"env.{part}.override_cfg.max_episode_steps=30",
        )
    ]
    return [
        *robot,
        f"env.eval.override_cfg.success_hold_steps={HOLD}",
        f"learner.sac.prior_data={fitted / 'data.pkl'}",
        f"reward.checkpoint_path={fitted / 'reward' / 'checkpoints' / 'best_model'}",
        f"runner.logger.log_path={folder}",
        "runner.logger.backends=[]",
        "learner.total_steps=500",
        "learner.eval_interval=500",
        "learner.eval_episodes=1",
        "learner.save_interval=500",
        "learner.network.hidden=[32]",
        "learner.network.image_features=16",
        "learner.sac.batch_size=16",
        "learner.sac.learning_starts=100",
        "learner.sac.updates_per_step=0.2",
        "learner.sac.num_critics=2",
        *more,
    ]


def config(*arguments):
    return load_config(NAME, overrides(*arguments), EXAMPLES)


def rows(buffer):
    """What a replay buffer of one environment holds, [rows, ...]."""
    count = len(buffer)
    return {name: ring[:count, 0] for name, ring in {**buffer._steps, **buffer._obs}.items()}


@torch.no_grad()
def critics_values(learner, steps):
    """What the critics expect of the actions that were taken, [N]."""
    obs = {name: torch.as_tensor(steps[name]) for name in ("state", "front_camera", "wrist_camera")}
    features = learner.encoder(to_obs({name: part.numpy() for name, part in obs.items()}))
    actions = learner._unit(torch.as_tensor(steps["actions"]))
    return learner.critics(torch.cat([features, actions], 1)).squeeze(-1).mean(0).numpy()


def until_success(reward, episode):
    """Steps of a demonstration up to the first that the model calls a success, and whether there is one."""
    manager = RewardManager(reward)
    fires = manager.score({name: episode.frames[name] for name in manager.image_keys}).prob_success
    fires = fires[1:] > manager.threshold  # the first picture is where the first step begins
    return (int(np.argmax(fires)) + 1, True) if fires.any() else (len(fires), False)


def test_a_demonstration_in_which_the_model_sees_no_success_does_not_end(caplog):
    """In a run the model's success is the only end; a recording ends once the target was held."""
    count, ends = _until_success(np.zeros(5, np.bool_))
    assert count == 5 and not ends.any() and "sees no success" in caplog.text
    count, ends = _until_success(np.array([False, False, True, False, True]))
    assert count == 3 and ends.tolist() == [False, False, True, False, False]


@pytest.mark.outcome
@pytest.mark.slow
def test_the_models_success_ends_episodes_and_people_are_learned_from(robot, fitted, tmp_path, monkeypatch):
    helped = ["env.train.operator=scripted", "env.train.operator_params.intervene_rate=0.8"]
    (tmp_path / "run").mkdir()
    runner = EmbodiedRunner(config(robot, fitted, tmp_path / "run", *helped), tmp_path / "run")
    arm = runner.env_worker.env.unwrapped.arm
    robot.world.set_box(*arm.config.box)
    held_by = []
    measure = runner.evaluate
    monkeypatch.setattr(runner, "evaluate", lambda *more: held_by.append(arm._closed) or measure(*more))
    summary = runner.run()
    assert held_by == [True]  # the arm was let go of before somebody else took it
    assert summary["env"] == "robot serl_http"
    loop = runner.loop
    held, threshold = rows(loop.replay.parts[0]), runner.rewards.facts.threshold
    fires = held["prob_success"] > threshold
    assert fires.sum() >= 5  # the operator does most of it
    np.testing.assert_array_equal(held["terminated"], fires)
    people = rows(loop.interventions)
    assert 0.6 < len(loop.interventions) / len(fires) < 0.95
    assert (people["prob_success"] > threshold).any()
    assert set(map(bytes, people["actions"])) <= set(map(bytes, held["actions"]))
    shown = rows(loop.prior)
    ends = shown["terminated"]
    np.testing.assert_array_equal(ends, shown["prob_success"] > threshold)
    recorded = [item.episode for item in read_recorded(fitted / "data.pkl")]
    lasting = [until_success(runner.config.reward, episode) for episode in recorded if episode.success]
    assert len(lasting) == EpisodeStore(fitted / "collected_data").success.sum() >= 3
    assert (len(loop.prior), ends.sum()) == (sum(n for n, _ in lasting), sum(fires for _, fires in lasting))
    assert ends.sum() >= 2
    assert {"state", "front_camera", "wrist_camera"} <= shown.keys()
    assert summary["env_steps"] >= 500
    assert robot.world.record.outside == 0

    for steps in (held, shown):  # the reward reached the critics: they tell the steps that it pays
        values, pays = critics_values(runner.learner, steps), steps["prob_success"] > threshold
        paid, others = float(values[pays].mean()), float(values[~pays].mean())
        print(f"the critics' values where the model sees success {paid:.2f}, elsewhere {others:.2f}")
        assert paid > others + 0.3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["env/intervened"] == pytest.approx(0.8, abs=0.15)

    place = f"runner.resume_dir={summary['checkpoint']}"  # after a stop
    (tmp_path / "on").mkdir()
    again = EmbodiedRunner(config(robot, fitted, tmp_path / "on", *helped, place), tmp_path / "on")
    try:
        again.start_or_resume()
        assert again.loop.env_steps == summary["env_steps"]
        assert len(again.loop.interventions) == len(loop.interventions)
        assert again.learner.num_updates == runner.learner.num_updates > 50
    finally:
        again.envs.close()
        again.engine.close()


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (["env.train.override_cfg.axes=[x,y,z]"], DataError, "move the robot differently"),
        (["learner.eval_interval=100"], ConfigError, "the one arm is in use"),
        (["reward.use_reward_model=false"], ConfigError, "standalone needs a reward model"),
        (["env.train.num_envs=2"], ConfigError, "a robot is one environment"),
        (["env.train.override_cfg.cameras=[{name: side_camera}]"], ConfigError, "looks at front_camera"),
        (["learner.sac.prior_data=nowhere.pkl"], DataError, "no demonstrations at nowhere"),
    ],
)
@pytest.mark.slow
def test_what_cannot_work_is_refused(robot, fitted, tmp_path, more, error, message):
    (tmp_path / "run").mkdir()
    with pytest.raises(error, match=message):
        EmbodiedRunner(config(robot, fitted, tmp_path / "run", *more), tmp_path / "run")
    assert robot.world.record.commands == 0  # before anything moves


@pytest.mark.slow
def test_the_pages_training_command_trains_and_goes_on_after_a_stop(robot, fitted):
    work = fitted.parent.parent
    small = [item for item in overrides(robot, fitted, "logs/first") if ".url=" not in item]
    said = run_page_command("run_realworld_async.sh", work, robot, small).stdout
    assert "reward       learned (replace)" in said
    more = [item for item in small if "log_path" not in item]
    more += ["runner.logger.log_path=logs/more", "runner.resume_dir=logs/first", "learner.total_steps=600"]
    reported = run_page_command("run_realworld_async.sh", work, robot, [*more, "learner.eval_interval=600"])
    assert "resumed from logs/first at step 500" in reported.stderr
    summary = json.loads((work / "logs" / "more" / "summary.json").read_text())
    assert summary["env_steps"] == 1024 and summary["env"] == "robot serl_http"  # the end of an iteration

    result = run_page_command("run_realworld_async.sh", work, robot, ["learner.eval_interval=7"], code=2)
    assert "the one arm is in use" in result.stderr


@pytest.mark.slow
def test_standalone_is_for_robots(tmp_path, fitted):
    with pytest.raises(ConfigError, match="on a robot"):
        EmbodiedRunner(load_config("train", ["reward.standalone=true"]), tmp_path)


# Teleoperation


def get(url, data=None, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as answer:
        return answer.read()


def token(server):
    return {TOKEN_HEADER: server.token}


@pytest.mark.slow
def test_the_page_shows_the_verdict_and_saves_wrong_calls_for_the_next_fit(
    robot, fitted, tmp_path, monkeypatch
):
    seen, views, servers = [], [], []
    make = ViewServer.__init__

    def noted(self, view, port):
        make(self, view, port)
        servers.append(self)

    class Driver(ScriptedOperator):
        """Looks at the page now and then, and presses keys."""

        def keys(self):
            keys, (server,) = super().keys(), servers
            state = json.loads(get(f"{server.url}/state.json"))
            if state["step"] in (3, 20) and state["step"] not in [item[0]["step"] for item in seen]:
                picture = Image.open(io.BytesIO(get(f"{server.url}/frame/wrist_camera?{state['step']}")))
                views.append(np.asarray(Image.open(io.BytesIO(get(f"{server.url}/frame/front_camera")))))
                words = get(f"{server.url}/wrong", b"", **token(server)) if state["step"] == 3 else b""
                seen.append((state, np.asarray(picture), words.decode()))
                return [*keys, "w"]
            return keys

    monkeypatch.setattr(ViewServer, "__init__", noted)
    monkeypatch.setattr("guerdon.cli.robot.make_operator", lambda cfg, config, seed: Driver(config, seed=1))
    checkpoint = fitted / "reward" / "checkpoints" / "best_model"
    model = load_config(None, [f"reward.model.checkpoint_path={checkpoint}"]).reward
    cfg = section(robot, success_hold_steps=100, axes=["x", "y", "z", "rz"])
    result = teleop(cfg, model, port=0, save_dir=tmp_path / "wrong", max_steps=26, seed=1)
    assert (result["steps"], result["wrong_calls"]) == (26, 2)  # the second time at step 3 was one too many
    (early, picture, words), (late, _, _) = seen
    assert picture.shape == (SIZE, SIZE, 3)
    assert early["cameras"] == ["front_camera", "wrist_camera"]
    assert len(late["curve"]) == 20
    manager = RewardManager(model)
    for state, front in ((early, views[0]), (late, views[1])):
        prob = float(manager.score({"front_camera": front[None]}).prob_success[0])
        assert state["curve"][-1] == pytest.approx(prob, abs=1e-3)  # of what is shown
        assert state["threshold"] == manager.threshold
    assert late["curve"][-1] > early["curve"][-1]  # in the hole, and on its way
    called = [state["curve"][-1] > state["threshold"] for state in (early, late)]
    kind = "failure" if called[0] else "success"
    assert words.startswith(f"step 3 saved as {kind} (the model said 0.")
    store = EpisodeStore(tmp_path / "wrong")
    assert store.labels.tolist() == [0.0 if call else 1.0 for call in called]  # what the model did not say
    np.testing.assert_array_equal(store.read_episode(0).frames["wrist_camera"][0], picture)
    together = tmp_path / "collected_data"
    shutil.copytree(fitted / "collected_data", together)
    assert main(["data", "convert", str(tmp_path / "wrong"), str(together), "--to", "native"]) == 0
    splits = EpisodeStore(together).episode_column("split")
    assert [str(item) for item in splits[-2:]] == ["train", "train"]
    assert len(splits) == 10


def test_other_pages_cannot_press_the_key(tmp_path):
    view = LiveView(0.5, tmp_path / "wrong", "test")
    server = ViewServer(view, 0)
    key = f"{server.url}/wrong"
    try:
        assert get(key, b"", **token(server)) == b"there is nothing to save yet"
        frames = {"front camera": np.zeros((8, 8, 3), np.uint8)}
        scored = {"front_camera": np.zeros((1, 8, 8, 3), np.uint8)}
        view.show(Shown(step=1, frames=frames, scored=scored, prob_success=0.7))
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(key, b"", **token(server), Origin="http://elsewhere.example")
        assert view.num_wrong == 0
        view.show(Shown(step=2, frames=frames, scored=scored, prob_success=0.3))
        assert b"step 2 saved as success" in get(key, b"", **token(server))
        view.show(Shown(step=3, frames=frames, scored=scored, prob_success=0.7))
        assert b"saved as failure" in get(key, b"", **token(server), Origin=server.url)
        assert b"probability of success" in get(server.url)
        assert get(server.url + "/frame/front%20camera").startswith(b"\x89PNG")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.url + "/frame/no_camera")
    finally:
        server.stop()
