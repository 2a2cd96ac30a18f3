"""A small environment that renders: a dot on a line has to come to the middle."""

import gymnasium as gym
import numpy as np
import torch

from guerdon.config import RewardModelConfig
from guerdon.models import Contract, build_model, save_checkpoint

SIZE = 24


class Dot(gym.Env):
    """Observes its place [1]; its info tells success; images come from render() alone."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode="rgb_array", steps=8, discrete=False):
        self.render_mode, self._limit = render_mode, steps
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = (
            gym.spaces.Discrete(3) if discrete else gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        )
        self.closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._elapsed = float(self.np_random.uniform(-1, 1)), 0
        return self._obs(), {"success": False}

    def step(self, action):
        push = (action - 1) if isinstance(self.action_space, gym.spaces.Discrete) else float(action[0])
        self._place = float(np.clip(self._place + 0.4 * push, -1, 1))
        self._elapsed += 1
        success = abs(self._place) < 0.3
        return self._obs(), float(success), False, self._elapsed >= self._limit, {"success": success}

    def _obs(self):
        return np.array([self._place], np.float32)

    def render(self):
        return draw(self._place)

    def close(self):
        self.closed = True


def draw(place):
    image = np.full((SIZE, SIZE, 3), 60, np.uint8)
    column = round((place + 1) / 2 * (SIZE - 8))
    image[8:16, column : column + 8] = (220, 60, 40)
    return image


def frames(count, seed=0):
    return np.stack([draw(place) for place in np.random.default_rng(seed).uniform(-1, 1, count)])


def save_untrained(path, num_frames=1, cameras=("base_camera",)):
    """A checkpoint whose threshold is the median of what it says of random places."""
    torch.manual_seed(0)
    config = RewardModelConfig(
        arch="resnet10",
        width=8,
        image_size=(3, SIZE, SIZE),
        hidden_dim=8,
        num_frames=num_frames,
        image_keys=cameras,
    )
    model = build_model(config).eval()
    images = frames(16)
    stacks = np.repeat(images[:, None], num_frames, axis=1) if num_frames > 1 else images
    with torch.no_grad():
        shown = dict.fromkeys(cameras, stacks)
        prob = torch.sigmoid(model(shown)).numpy()
        features = model.encode(model.preprocess(shown))
    pooled = features.flatten(2).mean(-1) if features.dim() > 2 else features
    contract = Contract.of(
        model,
        frame_sizes=dict.fromkeys(cameras, (SIZE, SIZE, 3)),
        threshold=float(np.median(prob)),
        feature_mean=tuple(pooled.mean(0).tolist()),
        feature_std=tuple(pooled.std(0).tolist()),
        data_hash="test",
    )
    return save_checkpoint(path, model, contract)
