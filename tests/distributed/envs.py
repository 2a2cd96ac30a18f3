"""Environments for tests of the engines: they die, fail, or write down every episode they finish."""

import json
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

from guerdon.envs import TabletopVectorEnv


class FragileTabletop(TabletopVectorEnv):
    """Tabletop whose process kills itself, as `kill -9` would, once and at a certain step.

    Args:
        num_envs: N.
        die_file: its presence arms the environment; it is removed by the one that dies.
        die_at: the step of this process at which to die, or to fail.
        journal: a file that gets a line for every episode that ends.
        fail: raise a ValueError instead of dying.
        always: every process dies at that step.
        **settings: of Tabletop.
    """

    def __init__(
        self, num_envs=1, *, die_file=None, die_at=0, journal=None, fail=False, always=False, **settings
    ):
        super().__init__(num_envs, **settings)
        self._die_file, self._die_at, self._fail = die_file, die_at, fail
        self._journal, self._steps, self._always = journal, 0, always

    def reset(self, **kwargs):
        self._steps = 0
        return super().reset(**kwargs)

    def step(self, actions):
        self._steps += 1
        if self._die_file is not None and self._steps == self._die_at:
            self._die()
        answer = super().step(actions)
        ended = np.flatnonzero(answer[2] | answer[3])
        if self._journal is not None and len(ended):
            about = answer[4]["final_info"]
            keys = [[int(about["env_seed"][i]), int(about["episode_index"][i])] for i in ended]
            with Path(self._journal).open("a") as file:
                file.writelines(
                    json.dumps({"pid": os.getpid(), "step": self._steps, "key": key}) + "\n" for key in keys
                )
        return answer

    def _die(self):
        if self._fail:
            raise ValueError("the gripper fell off")
        try:
            if not self._always:
                Path(self._die_file).unlink()  # only one process gets to do it
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Slow(gym.Env):
    """Steps that take `step_seconds`; the observation is a counter, an episode has 50 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, step_seconds=0.003):
        self._seconds, self._count = step_seconds, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self._seconds)
        self._count += 1
        obs = np.full(4, self._count / 50, np.float32)
        return obs, float(action[0]), False, self._count >= 50, {}


gym.register("guerdon/Fragile-v0", vector_entry_point=FragileTabletop)
gym.register("parallel/Slow-v0", entry_point=Slow)
