"""An operator made of rules, for simulated robots: it sees the arm's state and knows the target."""

from __future__ import annotations

import numpy as np

from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.envs.robot.driver import RobotState
from guerdon.envs.robot.poses import Vector, pose6, wrap
from guerdon.envs.robot.teleop import FAILURE_KEY, SUCCESS_KEY, Intervention, fill_action


class ScriptedOperator:
    """Moves over the target, then down, and holds there; some episodes fail on purpose.

    Args:
        config: settings of the environment.
        noise: deviation of the noise on its actions.
        failure_rate: share of the episodes in which it puts the peg down beside the hole, or waits above it.
        intervene_rate: share of the steps at which it takes over; the others are left to the policy.
        press_keys: press `c` or `a` at the end, instead of leaving that to `success_hold_steps`.
        approach_height: metres above the target below which it moves straight down only.
        seed: of all that is drawn.
    """

    def __init__(
        self,
        config: RobotEnvConfig,
        *,
        noise: float = 0.15,
        failure_rate: float = 0.0,
        intervene_rate: float = 1.0,
        press_keys: bool = False,
        approach_height: float = 0.04,
        seed: int = 0,
    ) -> None:
        self._config, self._noise, self._failure_rate = config, noise, failure_rate
        self._intervene_rate, self._press_keys, self._height = intervene_rate, press_keys, approach_height
        self._rng = np.random.default_rng(seed)
        self._plans = np.random.default_rng([seed, 1])  # apart: the clock decides on steps
        self._target: Vector = np.asarray(config.target_ee_pose, np.float64)
        self._keys: list[str] = []
        self.begin_episode()

    def begin_episode(self) -> None:
        """Decide how this one shall go."""
        self.will_fail = bool(self._plans.random() < self._failure_rate)
        self._goal = self._target.copy()
        self._steps = self._held = 0
        self._keys = []
        if self.will_fail:
            angle, away = self._plans.uniform(0.0, 2.0 * np.pi), self._plans.uniform(0.01, 0.03)
            self._goal[:2] += away * np.array([np.cos(angle), np.sin(angle)])
            if self._plans.random() < 0.3:
                self._goal[2] += self._height + self._plans.uniform(0.0, 0.02)

    def read(self, state: RobotState) -> Intervention | None:
        """The next bit of the way."""
        here = pose6(state.pose)
        away = self._goal - here
        away[3:] = wrap(away[3:])
        aside = float(np.linalg.norm(away[:2]))
        if aside > 0.0025 and here[2] > self._target[2] + 0.8 * self._height:  # first sideways
            away[2] = max(away[2], self._target[2] + self._height - here[2])
        self._steps += 1
        limits = np.asarray(self._config.reward_threshold)
        real = self._target - here
        real[3:] = wrap(real[3:])
        self._held = self._held + 1 if (np.abs(real) <= limits).all() else 0
        self._press()
        if self._rng.random() >= self._intervene_rate:
            return None
        scale = np.repeat(self._config.action_scale, 3)
        wanted = away / scale + self._rng.normal(0.0, self._noise, 6) * self._loose(aside)
        moves = dict(zip(("x", "y", "z", "rx", "ry", "rz"), wanted.tolist(), strict=True))
        if self._config.use_gripper:
            moves["gripper"] = -1.0
        return Intervention(action=fill_action(self._config, moves))

    def _loose(self, aside: float) -> float:
        """Less noise where the hole is near, as people do."""
        return 1.0 if aside > 0.005 else 0.5

    def _press(self) -> None:
        if not self._press_keys:
            return
        if self._held >= self._config.success_hold_steps:
            self._keys.append(SUCCESS_KEY)
        elif self.will_fail and self._steps >= min(30, self._config.max_episode_steps - 1):
            self._keys.append(FAILURE_KEY)

    def keys(self) -> list[str]:
        """What it pressed."""
        pressed, self._keys = self._keys, []
        return pressed

    def close(self) -> None:
        """Nothing to do."""
