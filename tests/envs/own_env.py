"""A small environment such as a user writes: states as observations, a picture from `render()` alone."""

import gymnasium as gym
import numpy as np

SIZE, STEPS, GOAL = 24, 12, 0.75


class Slider(gym.Env):
    """Move a bar to the right; success is that it is at the right side. The picture shows the bar."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode=None, discrete=False, key="is_success"):
        self.render_mode, self.key = render_mode, key
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = (
            gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        )
        self.place, self.count = 0.5, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.count = float(self.np_random.uniform(0.2, 0.6)), 0
        return self.observe(), {}

    def step(self, action):
        push = float(np.asarray(action).reshape(-1)[0])
        push = 2 * push - 1 if isinstance(self.action_space, gym.spaces.Discrete) else push
        self.place = float(np.clip(self.place + 0.2 * push, 0.0, 1.0))
        self.count += 1
        info = {self.key: self.place > GOAL, "place": self.place}
        return self.observe(), 0.0, False, self.count == STEPS, info

    def observe(self):
        return np.array([self.place], np.float32)

    def render(self):
        picture = np.full((SIZE, SIZE, 3), 40, np.uint8)
        column = round(self.place * (SIZE - 4))
        picture[:, column : column + 4] = (250, 200, 30)
        return picture


def succeeded(obs, info):
    """A label function."""
    return obs[0] > GOAL


def place_in(picture):
    """Where the bar is in a picture, 0 to 1."""
    return float(np.argmax(picture[0, :, 0] > 200)) / (SIZE - 4)


for name, settings in {
    "Slider-v0": {},
    "DiscreteSlider-v0": {"discrete": True},
    "SolvedSlider-v0": {"key": "solved"},
}.items():
    gym.register(name, "tests.envs.own_env:Slider", kwargs=settings)
