"""A reward model that fires now and then, for tests of the way its verdict takes; it has learned nothing."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.cli.train import train
from guerdon.config import RewardModelConfig, load_config
from guerdon.envs import TabletopVectorEnv
from guerdon.envs.tabletop.scene import CUBE, GOAL, GRIPPER
from guerdon.models import Contract, build_model, save_checkpoint
from tests.training.short_runs import SAC

SIZE = (24, 24)
DRAWING = "guerdon.envs.tabletop.render._draw_base_view"


def views(count, seed=0):
    """Frames of random play, uint8 [count, 24, 24, 3]."""
    env = TabletopVectorEnv(count, image_size=SIZE, autoreset_mode="Disabled")
    env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        env.step(rng.uniform(-1, 1, (count, 4)).astype(np.float32))
    return env.render_frames()


def draw_plainly(canvas, rows, camera):
    """Three stripes whose colours are the places of gripper, cube and goal: shapes take half of a run."""
    third = canvas.frames.shape[1] // 3
    for number, part in enumerate((GRIPPER, CUBE, GOAL)):
        colours = np.clip(128.0 + 400.0 * rows[part], 0, 255).astype(np.uint8).T
        canvas.frames[:, number * third : (number + 1) * third] = colours[:, None, None]


@pytest.fixture(autouse=True, scope="module")
def short_work(request):
    """A run ends with one small film, not four; its pictures are plain, unless the file has REAL_PICTURES."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("guerdon.training.trainer.NUM_FILMS", 1)
        patch.setattr("guerdon.monitoring.video.MIN_SIDE", 24)  # enlarging takes a sixth of a run
        if not getattr(request.module, "REAL_PICTURES", False):
            patch.setattr(DRAWING, draw_plainly)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DRAWING, draw_plainly)
        return save_untrained(tmp_path_factory.mktemp("reward") / "model")


def save_untrained(path):
    """A checkpoint whose threshold is the median of what it says of random play."""
    torch.manual_seed(0)
    model = build_model(
        RewardModelConfig(arch="resnet10", width=8, image_size=(3, 24, 24), hidden_dim=8)
    ).eval()
    frames = views(64)
    with torch.no_grad():
        prob = torch.sigmoid(model(frames)).numpy()
        features = model.encode(model.preprocess(frames))
    pooled = features.flatten(2).mean(-1) if features.dim() > 2 else features
    contract = replace(
        Contract.of(model, frame_sizes={"base_camera": (*SIZE, 3)}),
        threshold=float(np.median(prob)),
        feature_mean=tuple(pooled.mean(0).tolist()),
        feature_std=tuple(pooled.std(0).tolist()),
        data_hash="test",
    )
    return save_checkpoint(path, model, contract)


@pytest.fixture
def settings(checkpoint, tmp_path):
    """Overrides for a short run on small images."""
    return short_settings(checkpoint, tmp_path / "run")


@pytest.fixture(scope="session")
def finished(checkpoint, tmp_path_factory):
    """Algorithm -> (folder, summary) of one run with `settings`, which tests read and do not change."""

    @functools.cache
    def run(algorithm):
        settings = short_settings(checkpoint, tmp_path_factory.mktemp("finished") / algorithm)
        return train(load_config("train", [*settings, *(SAC if algorithm == "sac" else [])]))

    return run


def short_settings(checkpoint, folder):
    return [
        "env.train.num_envs=8",
        "env.eval.num_envs=5",
        "+env.train.init_params.image_size=[24,24]",
        "+env.eval.init_params.image_size=[24,24]",
        "+env.train.init_params.max_episode_steps=20",
        "+env.eval.init_params.max_episode_steps=20",
        "reward.use_reward_model=true",
        f"reward.model.checkpoint_path={checkpoint}",
        "learner.eval_episodes=5",
        "learner.network.hidden=[16]",
        "learner.ppo.num_steps=25",
        "learner.ppo.minibatch_size=50",
        "learner.total_steps=800",
        "learner.save_interval=400",
        "learner.eval_interval=400",
        f"runner.logger.log_path={folder}",
        "runner.logger.backends=[]",
    ]
