"""A scripted policy for ManiSkill's PickCube under `pd_ee_delta_pos`, as good or as bad as one wants it."""

from __future__ import annotations

import numpy as np

from guerdon.core.types import BoolArray, FloatArray
from guerdon.envs.experts import ScriptedPolicy

TASK, CONTROL_MODE = "PickCube-v1", "pd_ee_delta_pos"
STATE_SIZE = 42
GRASPED, TCP, GOAL, CUBE = 18, slice(19, 22), slice(26, 29), slice(29, 32)
"""Where things stand in ManiSkill's state vector, in metres."""
REACH = 0.1
"""Metres that an action of 1 moves the gripper's target."""
LOUDEST = 0.25
"""Deviation of the shaking, in actions, beyond which the cube is hardly ever grasped."""
_MEMORY = 0.8
"""How much of the action noise lasts from one step to the next."""
_NEVER = 10**6
_ON_GOAL: FloatArray = np.zeros((1, 3), np.float32)


class PickCubeExpert(ScriptedPolicy):
    """Picks the cube up, carries it to the goal and holds it there, from state vectors, for N environments.

    With `noise` 0 it rarely fails. A little (0.2) shakes the gripper on its way, for demonstrations that
    have seen more than one path (`intended` is what it would have done there undisturbed); more makes
    episodes go wrong in ways that teach a reward model something, of which each episode draws its own:

    - the cube is held still 3 to 7 cm off the goal, for a while or to the end;
    - the gripper never comes to rest at the goal;
    - it goes to the goal without the cube;
    - the cube is dropped, or the gripper just stops, at some step.

    Args:
        noise: 0 (none) to about 1 (most episodes fail); also the deviation of the shaking, up to `LOUDEST`.
        seed: what environment i does in its n-th episode depends on (seed, i, n) and the states alone.
    """

    def act(self, state: FloatArray) -> FloatArray:
        """Actions float32 [N, 4] for states float32 [N, 42]."""
        self._check_state(state, STATE_SIZE)
        self.intended = _command(*self._plan(state, _ON_GOAL))
        off = self._offset * (self._misses | (self._steps < self._settle_step))[:, None]
        way, closing = self._plan(state, off)
        way = np.where(self._empty_handed[:, None], state[:, GOAL] + off - state[:, TCP], way)
        closing = np.where(self._empty_handed, self._feigns, closing)
        # The shaking dies down where precision counts, at the cube and at the goal.
        fade = np.clip(np.abs(way).max(axis=1) / 0.06, np.where(self._restless, 0.5, 0.0), 1.0)
        shake = fade[:, None] * self._next_shake()
        action = _command(way, closing & (self._steps < self._drop_step), shake)
        action[self._steps >= self._stop_step, :3] = 0.0
        self._steps += 1
        return action

    def _plan(self, state: FloatArray, off: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Where the gripper should go, as vectors [N, 3] from where it is, and whether the fingers close.

        Args:
            state: float32 [N, 42].
            off: [N, 3] or [1, 3], where the cube is carried to, seen from the goal.
        """
        tcp, goal, cube = state[:, TCP], state[:, GOAL], state[:, CUBE]
        grasped = state[:, GRASPED] > 0.5
        # Towards the cube: from above, coming down as the fingers get into line.
        to_cube = cube - tcp
        sideways = np.abs(to_cube[:, :2]).max(axis=1)
        closing = (sideways < 0.015) & (np.abs(to_cube[:, 2]) < 0.012)
        to_cube[:, 2] += np.clip(3.0 * (sideways - 0.01), 0.0, 0.08)
        # Towards the goal: over the table, not along it.
        to_goal = goal + off - cube
        floor = np.maximum(goal[:, 2] + off[:, 2], 0.02)
        across = np.abs(to_goal[:, :2]).max(axis=1)
        to_goal[:, 2] = floor + np.clip(across - 0.02, 0.0, 0.02) - cube[:, 2]
        return np.where(grasped[:, None], to_goal, to_cube), grasped | closing

    def _allocate(self, num_envs: int) -> None:
        self._episodes = np.zeros(num_envs, np.int64)
        self._steps = np.zeros(num_envs, np.int64)
        self._shake = np.zeros((num_envs, 3))
        self._offset = np.zeros((num_envs, 3), np.float32)
        self._settle_step, self._stop_step, self._drop_step = np.zeros((3, num_envs), np.int64)
        self._misses, self._restless, self._empty_handed, self._feigns = np.zeros((4, num_envs), np.bool_)
        self._rngs: list[np.random.Generator] = [np.random.default_rng(0)] * num_envs

    def _draw_habits(self, mask: BoolArray) -> None:
        for env in np.flatnonzero(mask).tolist():
            self._draw_habits_of(env)

    def _draw_habits_of(self, env: int) -> None:
        rng = self._rngs[env] = np.random.default_rng([self.seed, env, int(self._episodes[env])])
        draw, often = rng.random(8), self.noise**2
        self._steps[env] = 0
        self._shake[env] = 0.0
        direction = rng.standard_normal(3)
        self._offset[env] = direction / np.linalg.norm(direction) * (0.033 + 0.037 * draw[0])
        self._misses[env] = draw[1] < 0.45 * often
        self._settle_step[env] = 25 + 10 * draw[0] if draw[2] < 0.4 * often else 0
        self._stop_step[env] = 5 + 40 * draw[4] if draw[3] < 0.1 * often else _NEVER
        self._drop_step[env] = 20 + 28 * draw[4] if draw[5] < 0.12 * often else _NEVER
        self._restless[env] = draw[6] < 0.2 * often
        self._empty_handed[env] = draw[7] < 0.15 * often
        self._feigns[env] = draw[0] < 0.5

    def _next_shake(self) -> FloatArray:
        """Action noise [N, 3] that lasts over steps."""
        fresh = np.stack([rng.standard_normal(3) for rng in self._rngs])
        self._shake = _MEMORY * self._shake + np.sqrt(1.0 - _MEMORY**2) * fresh
        return (min(self.noise, LOUDEST) * self._shake).astype(np.float32)


def _command(way: FloatArray, closing: BoolArray, shake: FloatArray | float = 0.0) -> FloatArray:
    """Actions float32 [N, 4] that go most of the `way` [N, 3] in a step, as far as the arm is fast enough."""
    action = np.empty((len(way), 4), np.float32)
    action[:, :3] = np.clip(0.8 * way / REACH + shake, -1.0, 1.0)
    action[:, 3] = np.where(closing, -1.0, 1.0)
    return action
