"""`RewardWorker.fit`, `init_workers` and `_apply_reward_model`, used as RLinf's pages describe them."""

import numpy as np
import pytest
from omegaconf import OmegaConf

from guerdon.config import load_tree
from guerdon.core.errors import ConfigError
from guerdon.data.summary import convert
from guerdon.serve import RewardManager, RewardWorker
from tests.fit.synthetic import episode, write_store
from tests.training.short_runs import SAC, lines, make_runner, without_times


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    convert(write_store(folder / "store"), folder / "reward_data", "npy-trajectory")
    return folder / "reward_data"


def page_config(data, folder):
    """The default config file of the first page, with its own keys, and smaller."""
    return {
        "defaults": [{"override hydra/job_logging": "stdout"}],
        "cluster": {"num_nodes": 1, "component_placement": {"reward": "all"}},
        "runner": {"task_type": "embodied", "output_dir": str(folder), "experiment_name": "fitted"},
        "reward": {
            "group_name": "RewardGroup",
            "training_backend": "simple",
            "gpu_id": 0,
            "global_batch_size": 32,
            "num_epochs": 2,
            "log_interval": 100,
            "save_interval": 5,
            "save_dir": "${runner.output_dir}/${runner.experiment_name}/checkpoints",
            "model": {
                "model_type": "binary_classifier",
                "image_keys": ["base_camera"],
                "image_size": [3, 32, 32],
                "hidden_dim": 16,
                "num_spatial_blocks": 8,
                "pretrained_encoder_path": None,
                "freeze_encoder": True,
                "width": 8,
            },
            "optim": {"optimizer": "adam", "lr": 1e-4, "clip_grad": 1.0},
            "data": {
                "positive_dir": str(data / "positive"),
                "negative_dir": str(data / "negative"),
                "image_key": "base_camera",
                "num_workers": 4,
            },
        },
    }


@pytest.mark.parametrize("kind", [dict, OmegaConf.create, load_tree], ids=["dict", "DictConfig", "dataclass"])
def test_a_reward_worker_fits_and_then_scores(kind, trajectories, tmp_path):
    worker = RewardWorker(kind(page_config(trajectories, tmp_path)))
    worker.init_worker()
    frames = episode(0, True).frames["base_camera"]
    with pytest.raises(ConfigError, match="no model yet"):
        worker.compute_batch_rewards({"main_images": frames})
    result = worker.fit()
    place = tmp_path / "fitted" / "checkpoints"
    assert (place / "step_5" / "checkpoint.pt").is_file()
    assert worker.task_type == "embodied" and result.checkpoint == place / "best_model"
    rewards = worker.compute_batch_rewards({"main_images": frames})
    np.testing.assert_array_equal(rewards, RewardManager(result.checkpoint).compute_rewards(frames))


def test_the_task_type_is_detected(checkpoint):
    rules = {"text": {"name": "exact_match"}}
    assert RewardWorker({"reward": rules}).task_type == "text"
    assert RewardWorker({"reward": {**rules, "model": {"checkpoint_path": str(checkpoint)}}}).task_type == (
        "embodied"
    )
    worker = RewardWorker({"runner": {"task_type": "text"}, "reward": rules})
    worker.init_worker()
    assert worker.compute_rewards(["4", "5"], ["4", "4"]).tolist() == [1.0, 0.0]
    with pytest.raises(ConfigError, match="a text task has no image reward worker"):
        worker.fit()
    with pytest.raises(ConfigError, match="checkpoint_path is not set"):
        RewardWorker({"reward": {}}).init_worker()  # and nothing to fit it on


def test_init_workers_before_a_run_changes_nothing(settings, finished, tmp_path):
    runner = make_runner(settings, tmp_path)
    runner.init_workers()
    runner.run()
    expected, _ = finished("ppo")
    curves = [[without_times(entry) for entry in lines(folder)] for folder in (runner.folder, expected)]
    assert curves[0] == curves[1] and len(curves[0]) >= 4


def test_apply_reward_model_gives_the_rollout_its_rewards(settings, tmp_path):
    runner = make_runner(settings, tmp_path)
    try:
        runner.init_workers()
        with pytest.raises(ConfigError, match="no rollout to give rewards to yet"):
            runner._apply_reward_model()
        runner.loop.advance(0.0)
        rollout = runner.loop.rollout
        given = rollout.training_rewards.clone()
        assert 0 < given.mean() < 1  # the model fires now and then
        rollout.update_rewards(np.zeros_like(given))
        runner._apply_reward_model()
        assert rollout.training_rewards.equal(given)
    finally:
        runner.close()
    runner = make_runner(settings, tmp_path, SAC)
    try:
        with pytest.raises(ConfigError, match="sac has no rollout"):
            runner._apply_reward_model()
    finally:
        runner.close()
