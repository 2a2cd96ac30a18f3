"""`guerdon/Tabletop-v0`: pick a cube up and hold it still at a goal; in NumPy, many environments in lockstep.

An action is float32 [4] in [-1, 1]: the gripper's velocity along x (away from the camera), y (left) and z
(up), and its fingers (+1 opens, -1 closes). An episode has 50 steps. Success, on any step, means that the
cube's centre is within 2.5 cm of the goal and that the gripper is still; both can be seen in one image, as
the goal is a green ball of just that radius and a lamp on the gripper is blue while it is still and amber
while it moves. `STATE_NAMES` in `scene.py` gives the layout of the state vector.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from guerdon.config.tabletop import TABLETOP_CAMERAS, TabletopConfig
from guerdon.core.errors import ConfigError, DataError, unknown_name
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.envs.tabletop import scene
from guerdon.envs.tabletop.camera import base_camera, wrist_camera
from guerdon.envs.tabletop.render import TabletopRenderer
from guerdon.envs.tabletop.scene import GOAL, NUM_ROWS, STATE_SIZE, STILL, Rows
from guerdon.envs.vector import (
    EnvIds,
    EpisodeVectorEnv,
    Info,
    Observation,
    check_image_size,
    check_steps_back,
)

ACTION_SIZE = 4


class TabletopVectorEnv(EpisodeVectorEnv):
    """N tabletop environments in one process; no Python loop over environments anywhere.

    Environment i, seeded with s + i, does exactly what a single one seeded with s + i does, in all episodes.

    Args:
        num_envs: N.
        config: settings; `settings` given by keyword go on top of it.
        autoreset_mode: `NextStep`, `SameStep` or `Disabled`, or the enum; see `EpisodeVectorEnv`.
        render_mode: None or `rgb_array`.
        **settings: any field of `TabletopConfig`.
    """

    config: TabletopConfig

    def __init__(
        self,
        num_envs: int = 1,
        *,
        config: TabletopConfig | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        config = TabletopConfig.from_settings(settings, config)
        super().__init__(num_envs, config, autoreset_mode, render_mode)
        self.max_episode_steps = config.max_episode_steps
        self._obs_size = config.obs_image_size or config.image_size
        self.frames_in_obs = self._obs_size == config.image_size
        """Whether observed images are those of `render_frames`, not of another size."""
        self._set_spaces(_observation_space(config), spaces.Box(-1.0, 1.0, (ACTION_SIZE,), np.float32))
        self.renderer = TabletopRenderer(self.num_envs)
        self._rows: Rows = np.zeros((NUM_ROWS, self.num_envs))
        self._final_rows = np.zeros_like(self._rows)  # meaningful where `_restarted`
        self._flags: dict[str, BoolArray] = {}
        self._past: deque[Rows] = deque(maxlen=0)  # worlds before the latest steps, the latest one last

    def render_frames(
        self,
        camera: str = "base_camera",
        env_ids: EnvIds | None = None,
        *,
        size: tuple[int, int] | None = None,
        out: UInt8Array | None = None,
        final: bool = False,
    ) -> UInt8Array:
        """Images of some environments, rendered now and only for them; see `EpisodeVectorEnv.render_frames`.

        They are written to `out`, uint8 [n, H, W, 3], if that is given; its first axis may have any stride.
        """
        if camera not in TABLETOP_CAMERAS:
            raise ConfigError(unknown_name("camera", camera, TABLETOP_CAMERAS))
        self._check_reset()
        ids = self._check_env_ids(env_ids)
        shape = self.config.image_size if size is None else check_image_size(size)
        return self._render(self._worlds(ids, final), ids, camera, shape, out)

    def goal_in_picture(self, camera: str, env_ids: EnvIds) -> FloatArray:
        """Where the goal of the last action's episode appears: row and column as shares, float32 [n, 2]."""
        ids, (height, width) = self._check_env_ids(env_ids), self.config.image_size
        rows = self._worlds(ids, final=True)
        make = base_camera if camera == "base_camera" else wrist_camera
        u, v, _ = make(rows, (height, width)).project(rows[GOAL])
        return np.stack([v / height, u / width], axis=1).astype(np.float32)

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what the last `num_steps` steps before the latest one led to."""
        self._past = deque(self._past, maxlen=num_steps)

    def render_past(self, camera: str, env_ids: EnvIds, steps_back: EnvIds) -> UInt8Array:
        """Images uint8 [n, H, W, 3] of what earlier actions led to.

        `steps_back`, int [n] from 1, is counted from the last action, within its episode.
        """
        ids, back = self._check_env_ids(env_ids), check_steps_back(steps_back, len(self._past))
        rows: Rows = np.zeros((NUM_ROWS, len(ids)))
        for number in np.unique(back).tolist():
            rows[:, back == number] = self._past[-number][:, ids[back == number]]
        return self._render(rows, ids, camera, self.config.image_size, None)

    def state(self) -> FloatArray:
        """The present state vectors, float32 [N, S], in every observation mode."""
        return _states(self._rows)

    def final_state(self) -> FloatArray:
        """The states that the last action led to, float32 [N, S]; see `render_frames(final=True)`."""
        return _states(self._worlds(np.arange(self.num_envs), final=True))

    # The simulation

    def _check_actions(self, actions: Any) -> NDArray[np.float64]:
        """Actions [N, 4] -> float64 [4, N] in [-1, 1]."""
        array = np.asarray(actions)
        if array.shape != (self.num_envs, ACTION_SIZE):
            raise DataError(
                f"actions must have shape [{self.num_envs}, {ACTION_SIZE}], not {list(array.shape)}"
            )
        if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
            raise DataError(f"actions must be real numbers, not {array.dtype}")
        action = array.T.astype(np.float64, order="C")
        finite = np.isfinite(action)
        if not finite.all():
            first = int(np.flatnonzero(~finite.all(axis=0))[0])
            raise DataError(f"the action of environment {first} is not finite: {array[first].tolist()}")
        np.maximum(action, -1.0, out=action)
        return np.minimum(action, 1.0, out=action)

    def _advance(self, actions: NDArray[np.float64]) -> None:
        if self._past.maxlen:
            self._past.append(self._rows.copy())
        scene.advance(self._rows, actions)

    def _evaluate(self) -> tuple[FloatArray, BoolArray]:
        self._flags = scene.evaluate(self._rows)
        env_reward = scene.compute_env_reward(self._rows, self._flags, self.config.reward)
        return env_reward, self._flags["success"] & self.config.terminate_on_success

    def _start_worlds(self, ids: IntArray, *, keep_final: bool) -> None:
        if keep_final:
            self._final_rows[:, ids] = self._rows[:, ids]
        self._rows[:, ids] = scene.initial_rows(self._env_seeds[ids], self._episodes[ids], self.config)
        self._flags = scene.evaluate(self._rows)

    def _observe(self, ids: IntArray | None = None) -> Observation:
        if self.config.obs_mode == "state":
            return self.state()
        obs: dict[str, Any] = {"state": self.state()} if self.config.obs_mode == "state+rgb" else {}
        for camera in self.config.cameras:
            if ids is None:
                obs[camera] = self.render_frames(camera, size=self._obs_size)
            else:
                obs[camera] = np.zeros((self.num_envs, *self._obs_size, 3), np.uint8)
                obs[camera][ids] = self.render_frames(camera, ids, size=self._obs_size)
        return obs

    def _task_infos(self) -> dict[str, NDArray[Any]]:
        return {name: flags.copy() for name, flags in self._flags.items()}

    def _worlds(self, ids: IntArray, final: bool) -> Rows:
        """A copy of the worlds `ids` as they are, or as the last action left them."""
        rows: Rows = self._rows[:, ids]
        if final and self._restarted.any():
            ended = self._restarted[ids]
            rows[:, ended] = self._final_rows[:, ids[ended]]
        return rows

    def _render(
        self, rows: Rows, ids: IntArray, camera: str, size: tuple[int, int], out: UInt8Array | None
    ) -> UInt8Array:
        if not self.config.status_lamp:
            rows[STILL] = 0.0
        return self.renderer.render(rows, ids, camera, size, out)


def _states(rows: Rows) -> FloatArray:
    """The state vectors, float32 [N, STATE_SIZE]; a new array."""
    return rows[:STATE_SIZE].T.astype(np.float32, order="C")


def _observation_space(config: TabletopConfig) -> spaces.Space[Any]:
    """The space of one environment's observations."""
    state = spaces.Box(-1.0, 1.0, (STATE_SIZE,), np.float32)
    if config.obs_mode == "state":
        return state
    image = (*(config.obs_image_size or config.image_size), 3)
    members: dict[str, spaces.Space[Any]] = {"state": state} if config.obs_mode == "state+rgb" else {}
    members.update({camera: spaces.Box(0, 255, image, np.uint8) for camera in config.cameras})
    return spaces.Dict(members)


class TabletopEnv(gym.Env[Observation, FloatArray]):
    """One tabletop environment: a `TabletopVectorEnv` of size 1 without its batch axis.

    `max_episode_steps` given to `gymnasium.make` only adds a `TimeLimit` around it, which can shorten but
    not lengthen episodes; give `config=TabletopConfig(max_episode_steps=...)` for longer ones.

    Args:
        config: settings; `settings` given by keyword go on top of it.
        render_mode: None or `rgb_array`.
        **settings: any field of `TabletopConfig`.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self, *, config: TabletopConfig | None = None, render_mode: str | None = None, **settings: Any
    ) -> None:
        self.vector = TabletopVectorEnv(
            1, config=config, autoreset_mode=AutoresetMode.DISABLED, render_mode=render_mode, **settings
        )
        self.config = self.vector.config
        self.render_mode = render_mode
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start a new episode; `seed` restarts the stream of episodes."""
        super().reset(seed=seed)
        obs, infos = self.vector.reset(seed=seed, options=options)
        return _first(obs), _first_info(infos)

    def step(self, action: FloatArray) -> tuple[Observation, float, bool, bool, Info]:
        """Take one action, float [4]."""
        array = np.asarray(action)
        if array.shape != (ACTION_SIZE,):
            raise DataError(f"an action must have shape [{ACTION_SIZE}], not {list(array.shape)}")
        obs, env_reward, terminated, truncated, infos = self.vector.step(array[None])
        return _first(obs), float(env_reward[0]), bool(terminated[0]), bool(truncated[0]), _first_info(infos)

    def render(self) -> Any:
        """The view of `base_camera`, uint8 [H, W, 3]; None without a render mode."""
        frames = self.vector.render()
        return None if frames is None else frames[0]

    def render_frames(
        self, camera: str = "base_camera", *, size: tuple[int, int] | None = None
    ) -> UInt8Array:
        """The view of one camera, uint8 [1, H, W, 3]; as the vector environment's method."""
        return self.vector.render_frames(camera, size=size)

    def state(self) -> FloatArray:
        """The present state vector, float32 [S], in every observation mode."""
        first: FloatArray = self.vector.state()[0]
        return first


def _first(obs: Observation) -> Observation:
    """The observation of the first environment."""
    return {key: value[0] for key, value in obs.items()} if isinstance(obs, dict) else obs[0]


def _first_info(infos: Info) -> Info:
    """The infos of the first environment as plain numbers, without masks."""
    return {key: value[0].item() for key, value in infos.items() if not key.startswith("_")}
