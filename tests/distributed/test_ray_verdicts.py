"""Reward workers on Ray say what `tests/test_verdicts.py` asks of everybody else."""

import pytest

from guerdon.config import ClusterConfig
from guerdon.distributed import make_engine
from guerdon.rewards.relabel import fires
from guerdon.training.reward_workers import RewardWorkers
from tests.verdicts import CAMERA, make_case

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_ray_agrees_on_every_probability_and_decision(tmp_path, kind):
    case = make_case(tmp_path, kind)
    engine = make_engine("ray", ClusterConfig(component_placement={"reward": "0-1"}))
    try:
        group = RewardWorkers(engine, case.reward())
        prob = group.score({CAMERA: case.frames}).prob_success
        threshold = group.facts.threshold
    finally:
        engine.close()
    case.check(prob, fires(prob, threshold))
