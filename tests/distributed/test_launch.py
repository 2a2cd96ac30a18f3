"""Ranks of torch.distributed, started by Ray."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from guerdon.config import ClusterConfig, load_config
from guerdon.core.errors import ClusterError, DataError, GuerdonError
from guerdon.distributed import WorkerSpec, make_engine
from guerdon.distributed.launch import Rank, _all_or_none, _placed, launch_ranks
from guerdon.distributed.local_engine import LocalGroup, Ready
from guerdon.distributed.placement import Node, make_plan
from guerdon.fit.process_group import PeerLostError
from guerdon.training.fit_run import train_reward
from tests.distributed.ranks import one_fails, total
from tests.fit.synthetic import write_store

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.slow
def test_ranks_compute_together(caplog):
    answers = launch_ranks(total, 2, 10, threads=1)
    assert [item[:3] for item in answers] == [(21.0, 2, "0"), (21.0, 2, "1")]
    assert len({item[3] for item in answers}) == 2
    assert caplog.messages == ["reward worker: the sum is 21"]  # of both, told once


@pytest.mark.slow  # `tests/fit/test_meeting.py` has the same of ranks without Ray
def test_nobody_can_take_the_port_before_the_ranks_meet():
    engine = make_engine("ray", ClusterConfig(component_placement={"reward": 0}))
    try:
        own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        group = engine.group("reward", [WorkerSpec(cls=Rank, args=(own,), threads=1)])
        place = group.submit(0, "open").result()
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind(("", place[1]))
        group.call("meet", *place)
        for start in (5, 6):  # torch takes up what is open, also a second time
            assert group.submit(0, "run", total, start).result()[:2] == (float(start), 1)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_stops_the_others(monkeypatch):
    monkeypatch.setattr("guerdon.distributed.launch.WAKE_SECONDS", 100.0)  # that it died may be noticed late
    with pytest.raises(ClusterError, match="rank 1 of 2 was lost: its process has gone"):
        launch_ranks(one_fails, 2, "killed", threads=1)


@pytest.mark.slow
def test_a_rank_that_fails_stops_the_others():
    with pytest.raises(GuerdonError, match=r"reward worker \d failed: "):
        launch_ranks(one_fails, 2, "raises", threads=1)


@pytest.mark.slow
def test_the_cause_is_told_and_not_its_echo():
    echo, cause = Ready(None, PeerLostError("rank 0 lost contact")), Ready(None, DataError("the loss is NaN"))
    for pending in ([echo, cause], [cause, echo]):
        with pytest.raises(DataError, match="the loss is NaN"):
            _all_or_none(LocalGroup("reward", [None, None]), pending, None)
    with pytest.raises(PeerLostError):
        _all_or_none(LocalGroup("reward", [None, None]), [echo, echo], None)


def test_too_many_ranks_are_refused():
    with pytest.raises(ClusterError, match=r"asks for slot 63 of the cluster, which has 4"):
        launch_ranks(total, 64, 0)
    placed = ClusterConfig(component_placement={"reward": "0-2"})
    with pytest.raises(ClusterError, match="2 ranks are asked for, reward has 3 slots"):
        launch_ranks(total, 2, 0, cluster=placed)


@pytest.mark.parametrize(
    ("placement", "slots"),
    [
        ({}, [0, 1]),
        ({"actor": 0, "env": 0}, [0, 1]),  # of a config for training: they are not there
        ({"actor,reward": "0-1"}, [0, 1]),
        ({"actor,env": 0, "reward": "1-2"}, [1, 2]),
    ],
)
def test_ranks_take_the_place_of_their_component_or_the_first_slots(placement, slots):
    cfg = _placed(ClusterConfig(component_placement=placement), "reward", 2)
    plan = make_plan(cfg, [Node(id="a", name="a", num_cpus=4)])
    assert [slot.index for slot in plan["reward"]] == slots


FIT = [
    "fit.data.path=data",
    "fit.epochs=1",
    "fit.global_batch_size=32",
    "fit.log_interval=1",
    "reward.model.width=8",
    "reward.model.hidden_dim=16",
    "reward.model.image_size=[3,32,32]",
]


def fit_losses(name, *overrides):
    folder, result = train_reward(
        load_config("train_reward", [*FIT, f"runner.logger.log_path={name}", *overrides])
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (result.checkpoint / "contract.json").is_file()
    assert json.loads((folder / "summary.json").read_text())["num_steps"] == result.num_steps
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow
def test_a_fit_in_two_actors_has_the_losses_of_one_process(tmp_path, monkeypatch):
    write_store(tmp_path / "data")
    monkeypatch.chdir(tmp_path)  # actors are started elsewhere: relative paths must still be ours
    alone = fit_losses("alone")
    pair = fit_losses("pair", "engine=ray", "fit.distributed.num_processes=2")
    assert len(alone) > 3
    assert pair[0] == pytest.approx(alone[0], rel=1e-5)  # the same weights
    # Adam's first steps are signs of gradients, also of those that are rounding; see tests/fit/float64.py.
    np.testing.assert_allclose(pair, alone, rtol=0.01)
    assert "RANK" not in os.environ


@pytest.mark.slow
def test_ctrl_c_in_a_fit_on_ray_keeps_the_step(tmp_path):
    write_store(tmp_path / "data")
    settings = [*FIT, "fit.epochs=100000", "runner.logger.log_path=run", "engine=ray"]
    command = [sys.executable, "-m", "guerdon.cli.main", "train-reward", *settings]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        metrics, limit = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        printed = process.communicate(timeout=300)[1]
    assert process.returncode == 1, printed
    step = int(re.search(r"interrupted at step (\d+), which is saved", printed)[1])
    assert step >= 3 and (tmp_path / "run" / "checkpoints" / f"step_{step}" / "checkpoint.pt").is_file()
    assert not (tmp_path / "run" / ".stop").exists()
