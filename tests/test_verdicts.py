"""One truth about a verdict: whoever is asked says the same of every frame of a calibrated checkpoint.

The truth is computed from the network's logits by formulas of the test. Ray is asked in
`tests/distributed/test_ray_verdicts.py`.
"""

import json

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

from guerdon.cli.main import main
from guerdon.cli.reward import card
from guerdon.config import ClusterConfig
from guerdon.data.store import EpisodeStore
from guerdon.datasets import RewardDataset
from guerdon.distributed import make_engine
from guerdon.monitoring import assess as judging
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.rewards.image.int8 import MIN_AGREEMENT
from guerdon.rewards.image.int8_file import quantize_checkpoint
from guerdon.rewards.relabel import fires
from guerdon.serve import ImageRewardWorker, RewardManager, RewardWorker
from guerdon.training.reward_workers import RewardWorkers
from guerdon.wrappers import LearnedRewardVecEnv, LearnedRewardVectorWrapper, LearnedRewardWrapper
from tests.verdicts import CAMERA, SIZE, make_case, makers, read_rows, vector


@pytest.fixture(scope="module", params=["temperature", "isotonic"])
def case(request, tmp_path_factory):
    return make_case(tmp_path_factory.mktemp(request.param), request.param)


def test_the_case_is_one_in_which_calibration_matters(case):
    wrong = (1 / (1 + np.exp(-case.logits)) > case.threshold) != case.fires
    assert wrong.mean() > 0.1 and 0.05 < case.fires.mean() < 0.95


def by_manager(case, tmp_path):
    manager = RewardManager(case.reward())
    return manager.score({CAMERA: case.frames}).prob_success, manager.compute_rewards(case.frames)


def by_worker(case, tmp_path):
    worker = ImageRewardWorker(case.reward())
    worker.init_worker()
    return worker.score({CAMERA: case.frames}).prob_success, worker.compute_batch_rewards(case.frames)


def by_reward_worker(case, tmp_path):
    said = []
    for kind in ("continuous", "binary"):
        worker = RewardWorker(case.reward(reward_type=kind))
        worker.init_worker()
        said.append(worker.compute_rewards(case.frames))
    return said


def by_local_group(case, tmp_path):
    engine = make_engine("local", ClusterConfig())
    try:
        group = RewardWorkers(engine, case.reward())
        prob = group.score({CAMERA: case.frames}).prob_success
        return prob, fires(prob, group.facts.threshold)
    finally:
        engine.close()


def image_success(case, kind, **more):
    shapes = {"obs_shape": (SIZE, SIZE, 3), "action_size": 1, "discrete_actions": False}
    section = {"type": "image_success", "checkpoint_path": str(case.checkpoint), "reward_type": kind}
    return create_reward_model({**section, **shapes, **more})


def by_image_success(case, tmp_path):
    count = len(case.frames)
    nothing = torch.zeros(count)
    batch = StepBatch(
        obs=torch.zeros(count, SIZE, SIZE, 3),
        actions=torch.zeros(count, 1),
        next_obs=torch.from_numpy(case.frames.astype(np.float32)),
        env_rewards=nothing,
        terminated=nothing.bool(),
        truncated=nothing.bool(),
    )
    kinds = ("continuous", "binary")
    return [image_success(case, kind).estimate(batch).env_rewards.numpy() for kind in kinds]


def by_wrapper(case, tmp_path):
    env = LearnedRewardWrapper(makers(case, 1)[0](), RewardManager(case.reward()))
    env.reset()
    steps = [env.step(np.zeros(1, np.float32)) for _ in case.frames]
    return [step[4]["prob_success"] for step in steps], [step[1] for step in steps]


def by_vector_wrapper(case, tmp_path, judge=None):
    env = LearnedRewardVectorWrapper(vector(case, 10), judge or RewardManager(case.reward()))
    env.reset()
    steps = [env.step(np.zeros((10, 1), np.float32)) for _ in range(len(case.frames) // 10)]
    rewards = np.stack([step[1] for step in steps]).T.ravel()
    if judge is not None:
        return rewards
    return np.stack([step[4]["prob_success"] for step in steps]).T.ravel(), rewards


def by_image_success_in_a_wrapper(case, tmp_path):
    kinds = ("continuous", "binary")
    return [by_vector_wrapper(case, tmp_path, image_success(case, kind)) for kind in kinds]


def by_sb3(case, tmp_path):
    venv = LearnedRewardVecEnv(DummyVecEnv(makers(case, 10)), RewardManager(case.reward()))
    venv.reset()
    steps = [venv.step(np.zeros((10, 1), np.float32)) for _ in range(len(case.frames) // 10)]
    prob = np.array([[info["prob_success"] for info in step[3]] for step in steps])
    return prob.T.ravel(), np.stack([step[1] for step in steps]).T.ravel()


def by_score(case, tmp_path):
    out = tmp_path / "scores.json"
    assert (
        main(["reward", "score", str(case.data), "--checkpoint", str(case.checkpoint), "--out", str(out)])
        == 0
    )
    return read_rows(out)


def by_card(case, tmp_path, monkeypatch):
    shown = []
    write = judging.write_card
    monkeypatch.setattr(judging, "write_card", lambda out, inputs: shown.append(inputs) or write(out, inputs))
    reported = card(case.data, case.checkpoint, tmp_path / "card.html", precision="fp32")
    (inputs,) = shown
    assert inputs.calibration == case.calibration and reported["fires"] == case.fires.sum()
    return inputs.scores.prob_success, fires(inputs.scores.prob_success, inputs.threshold.threshold)


WAYS = {
    "RewardManager": by_manager,
    "ImageRewardWorker": by_worker,
    "RewardWorker": by_reward_worker,
    "RewardWorkers": by_local_group,
    "image_success": by_image_success,
    "LearnedRewardWrapper": by_wrapper,
    "LearnedRewardVectorWrapper": by_vector_wrapper,
    "image_success in a wrapper": by_image_success_in_a_wrapper,
    "LearnedRewardVecEnv": by_sb3,
    "reward score": by_score,
    "card": by_card,
}


@pytest.mark.parametrize("way", WAYS)
def test_all_agree_on_every_probability_and_decision(case, tmp_path, way, monkeypatch):
    ask = WAYS[way]
    prob, decided = ask(case, tmp_path, monkeypatch) if ask is by_card else ask(case, tmp_path)
    case.check(prob, decided)


@pytest.mark.parametrize("side", ["below", "above"])
def test_a_threshold_of_the_settings_wins_over_the_calibrated_one_everywhere(case, side):
    known = RewardManager(case.reward()).score({CAMERA: case.frames}).prob_success
    given = 0.02 if side == "below" else float(np.median(known[case.fires]))
    reward = case.reward(reward_threshold=given)
    manager = RewardManager(reward)
    prob = manager.score({CAMERA: case.frames}).prob_success
    wanted = prob > np.float32(given)
    assert (wanted != case.fires).any()
    worker, images = ImageRewardWorker(reward), image_success(case, "binary", reward_threshold=given)
    worker.init_worker()
    env = LearnedRewardVectorWrapper(vector(case, 10), manager)
    env.reset()
    steps = [env.step(np.zeros((10, 1), np.float32)) for _ in range(len(case.frames) // 10)]
    found = {
        "manager": manager.compute_rewards(case.frames),
        "worker": worker.compute_batch_rewards(case.frames),
        "wrapper": np.stack([step[1] for step in steps]).T.ravel(),
        "image_success in a wrapper": by_vector_wrapper(case, None, images),
    }
    for way, rewards in found.items():
        np.testing.assert_array_equal(rewards > 0.5, wanted, err_msg=way)
    engine = make_engine("local", ClusterConfig())  # what training asks
    try:
        group = RewardWorkers(engine, reward)
        assert group.facts.threshold == manager.facts.threshold == given
        assert group.facts.contract.threshold == case.threshold
    finally:
        engine.close()
    assert manager.use_checkpoint(case.checkpoint).threshold == given


def test_int8_decides_as_all_others_do(case, tmp_path):
    store = EpisodeStore(case.data)
    rows = np.arange(len(case.frames))
    quantize_checkpoint(case.checkpoint, RewardDataset(store, cameras=(CAMERA,)), rows, rows)
    manager = RewardManager(case.reward(model={"precision": "int8"}))
    verdict = manager.score({CAMERA: case.frames})
    assert (fires(verdict.prob_success, manager.threshold) == case.fires).mean() >= MIN_AGREEMENT
    assert (manager.compute_rewards(case.frames) > 0.5).tolist() == fires(
        verdict.prob_success, manager.threshold
    ).tolist()
    out = tmp_path / "scores.json"
    command = ["reward", "score", str(case.data), "--checkpoint", str(case.checkpoint), "--out", str(out)]
    assert main([*command, "--precision", "int8"]) == 0
    assert (read_rows(out)[1] == case.fires).mean() >= MIN_AGREEMENT


def test_the_card_prints_the_same_rates(case, tmp_path, capsys):
    page = tmp_path / "card.html"
    command = ["reward", "card", "--data", str(case.data), "--checkpoint", str(case.checkpoint)]
    assert main([*command, "--out", str(page), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    positive = EpisodeStore(case.data).labels >= 0.5
    rates = [case.fires[positive].mean(), case.fires[~positive].mean()]
    names = ("true_positive_rate", "false_positive_rate")
    assert [reported["metrics"][name] for name in names] == pytest.approx(rates)
    assert reported["threshold"] == case.threshold and page.stat().st_size > 10_000


def test_image_success_keeps_calibration_and_threshold_with_its_weights(case, tmp_path):
    """A saved run goes on with the classifier it had, also if another one lies at that path by then."""
    first = image_success(case, "binary")
    state = first.state_dict()
    other = make_case(tmp_path, {"temperature": "isotonic", "isotonic": "temperature"}[case.calibration.kind])
    resumed = image_success(other, "binary")
    assert resumed.threshold != case.threshold
    resumed.load_state_dict(state)
    assert resumed.threshold == case.threshold
    prob = resumed.network(torch.from_numpy(case.frames)).numpy()
    case.check(prob, fires(prob, resumed.threshold))


def test_a_probability_on_the_threshold_does_not_fire_whoever_compares():
    """0.3 as a Python number is less than 0.3 as float32: comparing lists and arrays gave two answers."""
    at = np.float32(0.3)
    assert at.item() > 0.3
    assert (
        not fires([at], 0.3)[0]
        and not fires(at.item(), 0.3)
        and not fires(np.array([at]), np.float64(0.3))[0]
    )
    assert fires(np.nextafter(at, np.float32(1)), 0.3) and not fires(np.nan, 0.3)
