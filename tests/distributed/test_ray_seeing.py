"""On Ray too: stacks of frames, reused verdicts, and a reward model that is swapped during a run."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.config import ClusterConfig, RewardConfig, RewardModelConfig
from guerdon.distributed import make_engine
from guerdon.models import load_checkpoint, save_checkpoint
from guerdon.serve import RewardManager
from guerdon.training.reward_workers import RewardWorkers
from tests.distributed.test_ray_runs import curve
from tests.training.conftest import views
from tests.training.short_runs import SAC
from tests.training.test_refits import naive, refitting  # noqa: F401 - a fixture
from tests.training.test_seeing import LAZY, two_frames  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize("kind", ["ppo terminal", "ppo reused", "sac"])
def test_stacks_give_the_numbers_of_one_process(settings, tmp_path, two_frames, kind):  # noqa: F811
    more = [f"reward.model.checkpoint_path={two_frames}"]
    if kind == "ppo terminal":
        more.append("reward.reward_mode=terminal")
    elif kind == "ppo reused":
        more += [*LAZY, "reward.cache_verdicts=true"]
    else:
        more += [*SAC, "learner.total_steps=1600"]
    local, _ = curve(settings, tmp_path / "local", more)
    remote, _ = curve(settings, tmp_path / "ray", [*more, "engine=ray"])
    assert [entry.keys() for entry in remote] == [entry.keys() for entry in local] and len(local) >= 4
    for entry, expected in zip(remote, local, strict=True):
        assert entry == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_run_with_refits_gives_the_numbers_of_one_process(settings, tmp_path, naive):  # noqa: F811
    more = [*refitting(naive), "learner.total_steps=1000"]
    local, _ = curve(settings, tmp_path / "local", more)
    remote, summary = curve(settings, tmp_path / "ray", [*more, "engine=ray"])
    assert summary["refits"] >= 1
    for entry, expected in zip(remote, local, strict=True):
        assert entry == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_reward_worker_that_is_replaced_judges_with_the_latest_model(checkpoint, tmp_path):
    model, contract, _ = load_checkpoint(checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    other = save_checkpoint(tmp_path / "other", model, replace(contract, threshold=0.123))
    cfg = RewardConfig(model=replace(RewardModelConfig(), checkpoint_path=str(checkpoint)))
    frames = {"base_camera": views(20)}
    expected = RewardManager(replace(cfg, model=replace(cfg.model, checkpoint_path=str(other)))).score(frames)
    engine = make_engine("ray", ClusterConfig(component_placement={"reward": "1-2"}))
    try:
        rewards = RewardWorkers(engine, cfg)
        assert not np.allclose(rewards.score(frames).prob_success, expected.prob_success, atol=1e-3)
        rewards.use_checkpoint(other)
        assert rewards.facts.threshold == 0.123
        for pid in list(rewards.group.pids):
            os.kill(pid, signal.SIGKILL)
        for _ in range(4):
            np.testing.assert_allclose(rewards.score(frames).prob_success, expected.prob_success, atol=1e-6)
        assert rewards.facts.threshold == 0.123
    finally:
        engine.close()
