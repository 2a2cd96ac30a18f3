"""The image success classifier as a model of the zoo."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from guerdon.errors import ConfigError, DataError
from guerdon.models import Contract, ResNetRewardModel, save_checkpoint
from guerdon.rewards import Transitions, create_reward_model
from guerdon.wrappers import LearnedRewardWrapper

SHAPE = (16, 16, 3)


def fitted(folder, **settings):
    """A classifier with weights that tell images apart."""
    torch.manual_seed(0)
    model = ResNetRewardModel(arch="resnet10", width=8, image_size=(3, 16, 16), **settings)
    torch.nn.init.normal_(model.classifiers[0][-1].weight, std=2.0)
    save_checkpoint(folder / "fitted", model, Contract.of(model, threshold=0.5))
    return model.eval(), str(folder / "fitted")


def images(count=12):
    return np.random.default_rng(0).integers(0, 256, (count, *SHAPE)).astype(np.uint8)


def rows(frames):
    count = len(frames)
    return Transitions(
        obs=torch.zeros(count, *SHAPE),
        actions=torch.zeros(count, 2),
        next_obs=torch.from_numpy(frames.astype(np.float32)),
        env_rewards=torch.zeros(count),
        terminated=torch.zeros(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


def made(path, **settings):
    section = {"type": "image_success", "checkpoint_path": path, "obs_shape": SHAPE, "action_size": 2}
    return create_reward_model({**section, "discrete_actions": False, **settings})


def test_the_reward_is_the_classifiers_verdict_on_the_reached_frame(tmp_path):
    model, path = fitted(tmp_path)
    wanted = model.predict(images()).prob_success
    zoo = made(path)
    assert torch.allclose(zoo.estimate(rows(images())).env_rewards, wanted, atol=1e-6)
    assert wanted.std() > 0.01  # it does tell them apart
    middle = float(wanted.median())
    binary = made(path, reward_type="binary", reward_threshold=middle, success_reward=5.0, fail_reward=-1.0)
    said = binary.estimate(rows(images())).env_rewards
    assert torch.equal(said, torch.where(wanted > middle, 5.0, -1.0))
    assert made(path).threshold == 0.5 and zoo.train() == {}


class Pictures(gym.Env):
    """Shows one image after the other."""

    action_space = gym.spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, camera: str | None) -> None:
        self.camera, self.number = camera, 0
        space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
        self.observation_space = space if camera is None else gym.spaces.Dict({camera: space})

    def reset(self, *, seed=None, options=None):
        self.number = 0
        return self.shown(), {}

    def step(self, action):
        self.number += 1
        return self.shown(), 0.0, False, self.number == 5, {}

    def shown(self):
        frame = images()[self.number]
        return frame if self.camera is None else {self.camera: frame, "state": np.zeros(2)}


@pytest.mark.parametrize("camera", [None, "base_camera"])
def test_through_the_wrapper(tmp_path, camera):
    model, path = fitted(tmp_path)
    env = LearnedRewardWrapper(Pictures(camera), made(path))
    env.reset()
    rewards = [env.step(np.zeros(2, np.float32))[1] for _ in range(5)]
    assert rewards == pytest.approx(model.predict(images()[1:6]).prob_success.tolist(), abs=1e-6)


def test_what_is_refused(tmp_path):
    _, path = fitted(tmp_path)
    with pytest.raises(ConfigError, match="checkpoint_path is missing"):
        made(None)
    with pytest.raises(DataError, match="no such checkpoint"):
        made(str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"0 to 255, these have 0 to 1"):
        made(path).estimate(rows(images() // 200))
    flat = rows(images())
    flat = Transitions(**{**flat.parts(), "obs": torch.zeros(12, 4), "next_obs": torch.zeros(12, 4)})
    with pytest.raises(DataError, match=r"takes images \[H, W, C\], not observations of shape \[4\]"):
        made(path).estimate(flat)
    _, stacked = fitted(tmp_path / "stacked", num_frames=2)
    with pytest.raises(ConfigError, match="single frames of one camera"):
        made(stacked)
