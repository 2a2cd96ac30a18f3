"""An environment in which nothing moves for most of the time."""

import gymnasium as gym
import numpy as np

from guerdon.envs import TabletopVectorEnv


class LazyTabletop(TabletopVectorEnv):
    """Tabletop in which nothing moves for most of the time, whatever the policy does."""

    def __init__(self, num_envs=1, **settings):
        super().__init__(num_envs, **settings)
        self._moment = 0

    def reset(self, **options):
        self._moment = 0
        return super().reset(**options)

    def step(self, actions):
        self._moment += 1
        awake = (self._moment + np.arange(self.num_envs)) % 8 < 2
        before = self._rows.copy()
        _, env_reward, terminated, truncated, info = super().step(actions)
        frozen = np.flatnonzero(~(awake | terminated | truncated))
        self._rows[:, frozen] = before[:, frozen]
        return self._observe(), env_reward, terminated, truncated, info


gym.register("guerdon/Lazy-v0", vector_entry_point=LazyTabletop)
