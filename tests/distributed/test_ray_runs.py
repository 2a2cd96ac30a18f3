"""Runs on Ray: the same numbers as in one process, and what becomes of them when workers are killed."""

import json
import os
import signal
import time

import numpy as np
import pytest

from guerdon.cli.train import train
from guerdon.config import ClusterConfig, RewardConfig, RewardModelConfig, load_config
from guerdon.core.errors import ClusterError, ConfigError, DataError, WorkerError
from guerdon.data.summary import inspect
from guerdon.distributed import WorkerSpec, make_engine
from guerdon.rewards.image.worker import ImageRewardWorker
from guerdon.training.reward_workers import FramesLostError, RewardWorkers
from guerdon.training.trainer import EmbodiedRunner
from tests.distributed.ranks import Warns
from tests.training.conftest import views
from tests.training.test_embodied import SAC, lines, without_times
from tests.training.test_online_reward import DQN, RND, SHORT

pytestmark = pytest.mark.usefixtures("cluster")

TWO_ENVS = "+cluster.component_placement.env=0-1"
NO_REWARD = "reward.use_reward_model=false"
FRAGILE = "env.train.id=tests.distributed.envs:guerdon/Fragile-v0"


def curve(settings, folder, more=()):
    folder, summary = train(load_config("train", [*settings, *more, f"runner.logger.log_path={folder}"]))
    return [without_times(entry) for entry in lines(folder)], summary


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_one_env_worker_gives_the_numbers_of_one_process(settings, tmp_path, algorithm):
    more = [*SAC, "learner.total_steps=1600"] if algorithm == "sac" else []
    local, _ = curve(settings, tmp_path / "local", more)
    remote, summary = curve(settings, tmp_path / "ray", [*more, "engine=ray"])
    assert remote == local and len(local) >= 4
    assert summary["restarts"] == 0


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(settings, tmp_path):
    for name, more in {
        "several": [TWO_ENVS, "+cluster.component_placement.reward=2-3"],
        "apart": [TWO_ENVS, "+cluster.component_placement.rollout=2", NO_REWARD],
    }.items():
        local, _ = curve(settings, tmp_path / f"{name}_local", more)
        remote, _ = curve(settings, tmp_path / name, [*more, "engine=ray"])
        assert [entry.keys() for entry in remote] == [entry.keys() for entry in local]
        for entry, expected in zip(remote, local, strict=True):
            assert entry == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_several_workers_collect_into_one_data_set(settings, tmp_path):
    more = [
        NO_REWARD,
        "reward.collect_data=true",
        f"reward.data_collection.positive_dir={tmp_path / 'positive'}",
        f"reward.data_collection.negative_dir={tmp_path / 'negative'}",
        "collect.enabled=true",
        f"collect.save_dir={tmp_path / 'data'}",
        "collect.target_failure=20",
    ]
    curve(settings, tmp_path / "run", [*more, "engine=ray", TWO_ENVS])
    # 100 steps of 8 environments, new episodes at the checkpoint after 50: two whole ones before and after it
    assert sum(1 for place in ("positive", "negative") for _ in (tmp_path / place).glob("*.npy")) == 32
    assert inspect(tmp_path / "data").num_failure_episodes == 20  # the workers share the limit


@pytest.mark.slow
def test_relative_paths_mean_the_same_in_workers(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the cluster was started elsewhere
    more = [NO_REWARD, "reward.collect_data=true", "engine=ray", "learner.total_steps=400"]
    more += [f"reward.data_collection.{kind}_dir=reward_data/{kind}" for kind in ("positive", "negative")]
    curve(settings, tmp_path / "run", more)
    assert sum(1 for _ in (tmp_path / "reward_data").glob("*tive/*.npy")) == 16


# Workers that are killed


def make_runner(settings, tmp_path, more):
    (tmp_path / "run").mkdir(exist_ok=True)
    return EmbodiedRunner(load_config("train", [*settings, *more]), tmp_path / "run")


def fragile(tmp_path, die_at):
    (tmp_path / "armed").touch()
    return [
        "engine=ray",
        TWO_ENVS,
        FRAGILE,
        f"+env.train.init_params.die_file={tmp_path / 'armed'}",
        f"+env.train.init_params.die_at={die_at}",
        f"+env.train.init_params.journal={tmp_path / 'journal'}",
    ]


def counted(folder):
    return round(sum(entry.get("env/episodes", 0) for entry in lines(folder)))


def journal(tmp_path):
    return [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_env_worker_plays_its_rollout_again(settings, tmp_path, capfd):
    # 25 steps a rollout, episodes of 20: it dies in the second rollout, after its second episodes have ended
    _, summary = curve(settings, tmp_path / "run", fragile(tmp_path, die_at=45))
    assert summary["restarts"] == 1 and summary["env_steps"] == 800
    entries = lines(tmp_path / "run")
    assert [entry["fault/restarts"] for entry in entries if "fault/restarts" in entry] == [1.0, 1.0, 1.0]
    assert entries[1]["fault/rollouts_lost"] == entries[1]["fault/env_restarts"] == 1.0
    played = journal(tmp_path)
    dead = played[0]["pid"], played[4]["pid"]
    undelivered = [
        line for line in played if line["step"] == 40 and line["pid"] not in {e["pid"] for e in played[-8:]}
    ]
    assert len(undelivered) == 4 and undelivered[0]["pid"] in dead
    assert counted(tmp_path / "run") == len(played) - 4
    keys = [tuple(line["key"]) for line in played if line not in undelivered]
    assert capfd.readouterr().out == ""  # Ray has much to say about it, but not where results go
    assert len(set(keys)) == len(keys)  # every episode that counts is another one


@pytest.mark.slow
def test_no_episode_is_lost_with_an_env_worker_of_sac(settings, tmp_path):
    _, summary = curve(
        settings,
        tmp_path / "run",
        [*SAC, "learner.total_steps=1600", *fragile(tmp_path, die_at=45), NO_REWARD],
    )
    assert summary["restarts"] == 1 and summary["env_steps"] >= 1600
    played = journal(tmp_path)
    assert counted(tmp_path / "run") == len(played) == len({tuple(line["key"]) for line in played})


@pytest.mark.slow
def test_a_killed_rollout_worker_is_replaced_and_so_are_lost_frames(settings, tmp_path, monkeypatch):
    more = ["engine=ray", TWO_ENVS, "+cluster.component_placement.rollout=2"]
    runner = make_runner(settings, tmp_path, more)
    try:
        runner.loop.reset(0)
        runner.loop.advance(0.0)
        os.kill(runner.envs.rollout_group.pids[0], signal.SIGKILL)
        metrics = runner.loop.advance(0.0).metrics
        assert metrics["fault/rollout_restarts"] == 1.0 and np.isfinite(metrics["train/policy_loss"])

        real, parts = runner.rewards.score_parts, []

        def lose_once(frames, counts):
            parts.append(frames)
            if len(parts) == 1:
                raise FramesLostError(1)
            return real(frames, counts)

        monkeypatch.setattr(runner.rewards, "score_parts", lose_once)
        metrics = runner.loop.advance(0.0).metrics
        assert metrics["fault/env_restarts"] == 1.0 and metrics["fault/restarts"] == 2.0
        assert parts[0][0] is parts[1][0] and parts[0][1] is not parts[1][1]  # only those were made again
        assert runner.loop.rollout.policy_version == 2 and runner.loop.version == 3
        assert runner.loop.rollout.reward_version == runner.rewards.facts.version
    finally:
        runner.engine.close()


@pytest.mark.slow
def test_an_env_worker_that_dies_again_and_again_ends_the_run(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("guerdon.distributed.ray_actors.MAX_RESTARTS_IN_A_ROW", 1)
    more = [*fragile(tmp_path, die_at=3), "+env.train.init_params.always=true", NO_REWARD]
    runner = make_runner(settings, tmp_path, more)
    with pytest.raises(
        ClusterError, match=r"env worker \d was lost 2 times in a row.*the last good state is"
    ):
        runner.run()
    assert (tmp_path / "run" / "checkpoints" / "step_0" / "state.pt").is_file()


@pytest.mark.slow
def test_a_rollout_worker_that_dies_again_and_again_is_named(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("guerdon.distributed.ray_actors.MAX_RESTARTS_IN_A_ROW", 0)
    runner = make_runner(
        settings, tmp_path, ["engine=ray", NO_REWARD, "+cluster.component_placement.rollout=1"]
    )
    try:
        runner.loop.reset(0)
        os.kill(runner.envs.rollout_group.pids[0], signal.SIGKILL)
        with pytest.raises(ClusterError, match="rollout worker 0 was lost 1 times in a row"):
            runner.loop.advance(0.0)
    finally:
        runner.engine.close()


# Reward workers


@pytest.fixture
def reward_cfg(checkpoint):
    return RewardConfig(model=RewardModelConfig(checkpoint_path=str(checkpoint)), timeout_seconds=200.0)


@pytest.fixture
def rewards(reward_cfg):
    engine = make_engine("ray", ClusterConfig(component_placement={"reward": "1-2"}))
    try:
        yield RewardWorkers(engine, reward_cfg)
    finally:
        engine.close()


def refuse_poison(rewards):
    before = list(rewards.group.pids)
    here = os.getpriority(os.PRIO_PROCESS, 0)  # Ray's own choice would leave them nothing beside a learner
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in before} == {here}
    for frames, message in [
        (np.full((3, 24, 24, 3), np.nan, np.float32), "NaN"),
        (
            np.zeros((3, 20, 24, 3), np.uint8),
            r"frames are \[20, 24, 3\], the checkpoint was trained on \[24, 24, 3\]",
        ),
        (np.zeros((3, 5), np.uint8), r"shape \[3, 5\]"),
    ]:
        with pytest.raises(DataError, match=message):
            rewards.score({"base_camera": frames})
        assert len(rewards.score({"base_camera": views(5)}).prob_success) == 5
    assert rewards.group.pids == before


def test_reward_workers_share_the_load_refuse_poison_and_survive(rewards, reward_cfg):
    frames = {"base_camera": np.concatenate([views(100, seed) for seed in range(30)])}
    worker = ImageRewardWorker(reward_cfg, device="cpu")
    worker.init_worker()
    expected = worker.score(frames).prob_success
    np.testing.assert_array_equal(rewards.score(frames).prob_success, expected)
    first = list(rewards.group.pids)
    assert len(set(first)) == 2
    refuse_poison(rewards)

    os.kill(first[0], signal.SIGKILL)
    np.testing.assert_array_equal(rewards.score(frames).prob_success, expected)
    second = list(rewards.group.pids)
    assert second[0] != first[0] and second[1] == first[1]

    rewards._timeout = 5.0  # a worker that is merely slow is replaced then too, which does no harm here
    os.kill(second[1], signal.SIGSTOP)  # it stalls
    np.testing.assert_array_equal(rewards.score(frames).prob_success, expected)
    assert rewards.group.pids[1] != second[1]
    until = time.monotonic() + 100
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(second[1], 0)
            time.sleep(0.1)


# What is refused, and what is told


def test_a_placement_that_cannot_be_satisfied_is_refused_at_once(settings, tmp_path):
    with pytest.raises(ClusterError, match=r"env asks for slot 9 of the cluster, which has 4 \(4 CPU\)"):
        make_runner(settings, tmp_path, ["engine=ray", "+cluster.component_placement.env=0-9"])
    with pytest.raises(ClusterError, match=r"num_nodes asks for 3 machines, 1 machine is there"):
        make_runner(settings, tmp_path, ["engine=ray", "cluster.num_nodes=3"])
    with pytest.raises(ConfigError, match=r"4 env workers cannot share env.train.num_envs=3"):
        make_runner(
            settings, tmp_path, ["engine=ray", "env.train.num_envs=3", "+cluster.component_placement.env=all"]
        )


def test_a_slot_that_others_hold_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("guerdon.distributed.ray_engine.SLOT_SECONDS", 1.0)
    holder = make_engine("ray", ClusterConfig(component_placement={"env": "all"}))
    from guerdon.distributed import WorkerSpec

    holder.group("env", [WorkerSpec(cls=dict)] * 4)
    try:
        with pytest.raises(ClusterError, match=r"slot 0 \(CPU\) was not given to us in 1 s.*0 CPU"):
            make_runner(settings, tmp_path, ["engine=ray"])
    finally:
        holder.close()


def test_an_error_in_a_worker_is_one_readable_line(settings, tmp_path):
    more = [*fragile(tmp_path, die_at=30), "+env.train.init_params.fail=true", NO_REWARD]
    runner = make_runner(settings, tmp_path, more)
    message = "env worker 0 failed: ValueError: the gripper fell off"
    with pytest.raises(WorkerError, match=f"^{message} .*last good state") as caught:
        runner.run()
    assert "\n" not in str(caught.value)
    remote = str(caught.value.__cause__.__cause__)
    assert "in _die" in remote and "envs.py" in remote  # what --debug shows
    assert (tmp_path / "run" / "checkpoints" / "step_200" / "state.pt").is_file()


def test_what_a_busy_worker_warns_of_is_told_later(tmp_path, caplog):
    engine = make_engine("ray", ClusterConfig())
    try:
        group = engine.group("env", [WorkerSpec(cls=Warns)])
        busy = group.submit(0, "warn", tmp_path / "done")
        engine.log_notices(wait=False)
        assert "dirty" not in caplog.text
        (tmp_path / "done").touch()
        busy.result(100)
        engine.log_notices()
        engine.log_notices()
        assert caplog.messages.count("env worker: the lens is dirty") == 1
    finally:
        engine.close()


@pytest.mark.slow
def test_a_reward_model_of_the_zoo_sees_the_same_steps(tmp_path):
    """The model is with the learner, the environments are elsewhere; also with workers at their own pace."""
    ppo, _ = curve([*SHORT, *RND], tmp_path / "local")
    remote, summary = curve([*SHORT, *RND], tmp_path / "ray", ["engine=ray"])
    assert remote == ppo and summary["reward"] == "learned (replace)"
    assert any("reward_model/rewards" in row for row in remote)
    asynchronous = ["engine=ray", "asynchronous.enabled=true", TWO_ENVS]
    rows, summary = curve([*SHORT, *DQN, *RND], tmp_path / "asynchronous", asynchronous)
    assert summary["env_steps"] >= 1600 and (tmp_path / "asynchronous" / "report.html").is_file()
    assert any(row.get("rollout/learned_rewards") for row in rows)
