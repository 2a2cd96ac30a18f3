"""A scripted policy for the tabletop environment, as good or as bad as one wants it."""

from __future__ import annotations

import numpy as np

from guerdon.core.types import BoolArray, FloatArray
from guerdon.envs.experts import ScriptedPolicy
from guerdon.envs.tabletop import scene
from guerdon.envs.tabletop.scene import Rows

_HABIT_DRAWS = 16
_SEGMENT, _SEGMENT_START = 9, 7
"""For so many steps a place to hold the cube at, and whether to pause, stay as they were drawn; the first
change comes so early that the last one of 50 steps is over before the end."""
_MEMORY = 0.8
"""How much of the action noise lasts from one step to the next."""


class ScriptedExpert(ScriptedPolicy):
    """Picks the cube up, carries it to the goal and holds it there, from state vectors, for N environments.

    With `noise` 0 it practically never fails. More noise shakes the gripper on its way and makes more
    episodes go wrong in ways that teach a reward model something; each episode draws its own:

    - the cube is carried to places 3 to 7 cm off the goal and held still there, one after the other;
    - it reaches the goal only after such stops, or wanders about within the tolerance;
    - the gripper pauses on its way, or never comes to rest at all;
    - the fingers close beside the cube;
    - the gripper goes about as if it carried something, and rests at the goal, over the cube or before it,
      with the cube left behind;
    - the cube is dropped, or the gripper just stops, at some step.

    Args:
        noise: 0 (none) to about 1 (most episodes fail).
        seed: what environment i does in its n-th episode depends on (seed, i, n) and the states alone.
    """

    def act(self, state: FloatArray) -> FloatArray:
        """Actions float32 [N, 4] for states float32 [N, S]."""
        self._check_state(state, scene.STATE_SIZE)
        rows = state.T.astype(np.float64, order="C")
        step = self._steps.astype(np.float64)
        goal_bias, astray, pausing = self._segment(step)
        way, closing = self._plan(rows, goal_bias, astray)
        action = np.empty((4, len(state)))
        # Commands take the gripper 60% of the way within a step, as far as it is fast enough.
        velocity = rows[scene.VELOCITY]
        wanted = np.clip(0.6 * way / scene.STEP_SECONDS, -scene.MAX_SPEED, scene.MAX_SPEED)
        command = (velocity + (wanted - velocity) / scene.LAG) / scene.MAX_SPEED
        action[:3] = command + self._next_shake(way)
        action[:3] = np.where(pausing | (step >= self._stop_step), 0.0, action[:3])
        action[3] = np.where(closing & (step < self._drop_step), -1.0, 1.0)
        self._steps += np.uint64(1)
        return np.clip(action, -1.0, 1.0).T.astype(np.float32, order="C")

    def _allocate(self, num_envs: int) -> None:
        self._episodes = np.zeros(num_envs, np.uint64)
        self._steps = np.zeros(num_envs, np.uint64)
        self._shake: Rows = np.zeros((3, num_envs))

    def _draw_habits(self, mask: BoolArray) -> None:
        """Draw the habits of the present episodes; those that run on draw the same again."""
        self._steps[mask] = 0
        self._shake[:, mask] = 0.0
        numbers = np.arange(len(self._episodes), dtype=np.uint64)
        self._keys = scene.stream_keys(np.uint64(self.seed) + (numbers << np.uint64(32)), self._episodes)
        draw = scene.uniforms(self._keys, 0, _HABIT_DRAWS)
        noise, never = self.noise, 1e9
        self._misses = draw[0] < 0.8 * noise
        self._settle_step = np.where(draw[1] < 1.5 * noise, 12.0 + 24.0 * draw[2], 0.0)
        self._stop_step = np.where(draw[3] < 0.1 * noise, 2.0 + 45.0 * draw[4], never)
        self._drop_step = np.where(draw[5] < 0.1 * noise, 8.0 + 40.0 * draw[6], never)
        self._restless = draw[7] < 0.25 * noise
        self._loudness = noise * draw[8]
        grasp_bias: Rows = (2.0 * draw[10:12] - 1.0) * np.where(draw[9] < 0.12 * noise, 0.05, 0.0)
        self._grasp_bias = grasp_bias
        self._empty_handed = draw[12] < 0.4 * noise
        self._feigns = self._empty_handed & (draw[13] < 0.5)

    def _segment(self, step: Rows) -> tuple[Rows, Rows, BoolArray]:
        """How far off the goal to hold the cube, [3, N], and whether to pause, bool [N], at this step.

        Between them: where an empty hand goes, [N], from 0 (the goal) to 1 (the cube).
        """
        segment, into = np.divmod(self._steps + np.uint64(_SEGMENT - _SEGMENT_START), np.uint64(_SEGMENT))
        draw = scene.uniforms(scene.stream_keys(self._keys, segment + np.uint64(1 << 20)), 0, 6)
        direction = 2.0 * draw[0:3] - 1.0
        squares = direction * direction
        direction /= np.sqrt(squares[0] + squares[1] + squares[2]) + 1e-6
        off = self._misses | (step < self._settle_step)
        # Nothing is held at the edge of the tolerance on purpose: nobody could tell which side it is on.
        # An empty hand is no success anywhere, so it goes everywhere.
        distance = np.where(off, 0.033 + 0.035 * draw[3], 0.015 * min(2.0 * self.noise, 1.0) * draw[3])
        distance = np.where(self._empty_handed, 0.08 * draw[3], distance)
        pausing = (draw[4] < 0.4 * self.noise) & (into < np.uint64(4))
        return direction * distance * (self.noise > 0.0), np.maximum(2.0 * draw[5] - 1.0, 0.0), pausing

    def _plan(self, rows: Rows, goal_bias: Rows, astray: Rows) -> tuple[Rows, BoolArray]:
        """Where the gripper should go, as vectors [3, N] from where it is, and whether the fingers close."""
        # Towards the cube: from above, coming down as the fingers get into line.
        to_cube = rows[scene.CUBE] - rows[scene.GRIPPER]
        to_cube[:2] += self._grasp_bias
        sideways = np.abs(to_cube[:2]).max(axis=0)
        closing = (sideways < 0.01) & (np.abs(to_cube[2]) < 0.01)
        to_cube[2] += np.clip(4.0 * (sideways - 0.008), 0.0, 0.06)
        # Towards the goal: over the table, not along it.
        to_goal = rows[scene.CUBE_TO_GOAL] + goal_bias
        sideways = np.abs(to_goal[:2]).max(axis=0)
        height = np.maximum(rows[scene.GOAL][2] + goal_bias[2], scene.CUBE_HALF)
        to_goal[2] = height + np.clip(sideways - 0.01, 0.0, 0.03) - rows[scene.CUBE][2]
        grasped = rows[scene.GRASPED] > 0.5
        way = np.where(grasped, to_goal, to_cube)
        anywhere = rows[scene.GOAL] + goal_bias - astray * rows[scene.CUBE_TO_GOAL] - rows[scene.GRIPPER]
        way = np.where(self._empty_handed, anywhere, way)
        return way, np.where(self._empty_handed, self._feigns, grasped | closing)

    def _next_shake(self, way: Rows) -> Rows:
        """Action noise [3, N] that lasts over steps, and dies down near the target unless restless."""
        if self.noise == 0.0:
            return np.zeros_like(way)
        draw = scene.uniforms(scene.stream_keys(self._keys, self._steps), 0, 6)
        fresh = (draw[0:3] + draw[3:6] - 1.0) * np.sqrt(6.0)
        self._shake = _MEMORY * self._shake + np.sqrt(1.0 - _MEMORY**2) * fresh
        fade = np.clip(np.abs(way).max(axis=0) / 0.06, np.where(self._restless, 0.5, 0.0), 1.0)
        loudness = np.where(self._restless, np.maximum(self._loudness, 0.3), self._loudness)
        result: Rows = loudness * fade * self._shake
        return result
