"""An environment that counts its own steps, so that a test can tell whether each arrived, and once."""

import json
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

LENGTH = 7
PERSON = 0.625
"""What the person in `Helped` always does; a policy hits it with probability zero."""


class Counting(gym.Env):
    """Observes (episode, step in the episode, steps since it was seeded); odd episodes terminate.

    Args:
        seconds: that a step takes, asleep.
        fail_at: fail at this step.
        die_file: kill the process, once and for as long as this file is there, at step `die_at`.
        die_at: see `die_file`.
        journal: a file that gets a line for every episode that ends.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, seconds=0.0, fail_at=None, die_file=None, die_at=0, journal=None):
        self._seconds, self._fail_at = seconds, fail_at
        self._die_file, self._die_at, self._journal = die_file, die_at, journal
        self._count = np.zeros(3, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._count[:] = 0
        else:
            self._count[0] += 1
        self._count[1] = 0
        return self._count.copy(), {}

    def step(self, action):
        if self._seconds:
            time.sleep(self._seconds)
        self._count[1:] += 1
        total = int(self._count[2])
        if total == self._fail_at:
            raise ValueError("the gripper is stuck\nand more")
        if self._die_file is not None and total == self._die_at and Path(self._die_file).exists():
            Path(self._die_file).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        ended = self._count[1] >= LENGTH
        if ended and self._journal is not None:
            with Path(self._journal).open("a") as file:
                file.write(json.dumps({"pid": os.getpid(), "steps": total}) + "\n")
        odd = bool(self._count[0] % 2)
        return self._count.copy(), float(total), bool(ended and odd), bool(ended and not odd), {}


class CountingButtons(Counting):
    """The same with discrete actions."""

    action_space = gym.spaces.Discrete(3)


class Helped(Counting):
    """A person takes over in every fifth step of all, and in the last one of each episode."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        helped = bool(obs[2] % 5 == 0 or terminated or truncated)
        taken = np.full(1, PERSON, np.float32) if helped else np.full(1, 7.0, np.float32)  # 7: not to be used
        return obs, reward, terminated, truncated, {"intervened": helped, "action_taken": taken}


gym.register("Counting-v0", Counting)
gym.register("CountingButtons-v0", CountingButtons)
gym.register("Helped-v0", Helped)
