"""`guerdon/Tabletop-v0`: pick a cube up and hold it still at a goal; in NumPy, many environments in lockstep.

An action is float32 [4] in [-1, 1]: the gripper's velocity along x (away from the camera), y (left) and z
(up), and its fingers (+1 opens, -1 closes). An episode has 50 steps. Success, on any step, means that the
cube's centre is within 2.5 cm of the goal and that the gripper is still; both can be seen in one image, as
the goal is a green ball of just that radius and a lamp on the gripper is blue while it is still and amber
while it moves. `STATE_NAMES` in `tabletop_scene` gives the layout of the state vector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from guerdon.config.tabletop import TABLETOP_CAMERAS, TabletopConfig, check_image_size, unknown_name
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.envs.inputs import (
    ACTION_SIZE,
    check_actions,
    check_autoreset_mode,
    check_env_ids,
    check_going_on,
    check_num_envs,
    check_reset_mask,
    give_seeds,
)
from guerdon.envs.tabletop.camera import base_camera, wrist_camera
from guerdon.envs.tabletop.physics import Outcome, advance, compute_env_reward, judge
from guerdon.envs.tabletop.render import TabletopRenderer
from guerdon.envs.tabletop.scene import GOAL, STATE_SIZE, STILL, Scene, begin_episodes

__all__ = ["ACTION_SIZE", "TabletopEnv", "TabletopVectorEnv", "observation_space"]

Observation: TypeAlias = Any
"""float32 state vectors, or a dict of camera images (uint8) and perhaps the state under `state`."""
Info: TypeAlias = dict[str, Any]


def observation_space(config: TabletopConfig) -> spaces.Space[Any]:
    """The space of one environment's observations."""
    state = spaces.Box(-1.0, 1.0, (STATE_SIZE,), np.float32)
    if config.obs_mode == "state":
        return state
    image = (*config.image_size, 3)
    members: dict[str, spaces.Space[Any]] = {"state": state} if config.obs_mode == "state+rgb" else {}
    members.update({camera: spaces.Box(0, 255, image, np.uint8) for camera in config.cameras})
    return spaces.Dict(members)


class TabletopVectorEnv(VectorEnv[Observation, FloatArray, NDArray[Any]]):
    """N tabletop environments in one process; no Python loop over environments anywhere.

    Environment i, seeded with s + i, does exactly what a single one seeded with s + i does, in all episodes.

    Args:
        num_envs: N.
        config: settings; `settings` given by keyword go on top of it.
        autoreset_mode: `NextStep`, `SameStep` or `Disabled`, or the enum. With `SameStep` the infos of a
            step that ended an episode hold `final_obs` and `final_info`, batched, with the masks
            `_final_obs` and `_final_info`; rows where the mask is False mean nothing.
        render_mode: None or `rgb_array`.
        **settings: any field of `TabletopConfig`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  (Gymnasium's convention)
        "render_modes": ["rgb_array"],
        "render_fps": 20,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        *,
        config: TabletopConfig | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(unknown_name("render_mode", render_mode, ["rgb_array"]))
        self.config = TabletopConfig.from_settings(settings, config)
        self.num_envs = check_num_envs(num_envs)
        self.render_mode = render_mode
        self.autoreset_mode = check_autoreset_mode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        self.single_action_space = spaces.Box(-1.0, 1.0, (ACTION_SIZE,), np.float32)
        self.single_observation_space = observation_space(self.config)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.renderer = TabletopRenderer(self.num_envs)
        self._scene = Scene.empty(self.num_envs)
        self._final_scene = Scene.empty(self.num_envs)  # meaningful where `_restarted`
        self._restarted: BoolArray = np.zeros(self.num_envs, np.bool_)
        self._env_seeds = np.zeros(self.num_envs, np.uint64)
        self._episodes = np.full(self.num_envs, -1, np.int64)  # -1: never seeded
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._done: BoolArray = np.zeros(self.num_envs, np.bool_)
        self._past: deque[Scene] = deque(maxlen=0)  # worlds before the latest steps, the latest one last

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, Info]:
        """Begin new episodes.

        Args:
            seed: s seeds environment i with s + i; a list gives each its own. None goes on with the stream
                of each environment, and takes a random seed where there is none yet.
            options: `reset_mask`, bool [N]: reset only these; the infos then carry masks.
        """
        mask = check_reset_mask(options, self.num_envs)
        if isinstance(seed, (int, np.integer)):
            super().reset(seed=int(seed))
        self._env_seeds = give_seeds(self._env_seeds, self._episodes, seed, mask)
        self._begin(np.flatnonzero(mask))
        self._restarted[mask] = False
        return self._observe(), self._infos(judge(self._scene.rows), mask)

    def step(self, actions: FloatArray) -> tuple[Observation, FloatArray, BoolArray, BoolArray, Info]:
        """Take one action in each environment.

        Args:
            actions: float [N, 4]; values beyond [-1, 1] are clipped.

        Returns:
            Observations, env rewards float32 [N], terminated bool [N], truncated bool [N], infos.
        """
        self._check_begun()
        check_going_on(self._done, self.autoreset_mode)
        action = check_actions(actions, self.num_envs)
        self._restarted = np.zeros(self.num_envs, np.bool_)
        if self._past.maxlen:
            self._past.append(self._scene.take(np.arange(self.num_envs)))
        rows, steps = self._scene.rows, self.config.max_episode_steps
        advance(rows, action)
        self._elapsed += 1
        begun = self._done.copy()  # only NEXT_STEP comes here with finished episodes
        if begun.any():
            self._begin(np.flatnonzero(begun))
        outcome = judge(rows)
        env_reward = compute_env_reward(rows, outcome, self.config.reward)
        env_reward[begun] = 0.0
        terminated = outcome.success & self.config.terminate_on_success
        truncated = self._elapsed >= steps
        self._done = terminated | truncated
        final: Info = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._done.any():
            final = self._restart(outcome)
            outcome = judge(rows)
        everyone = np.ones(self.num_envs, np.bool_)
        return self._observe(), env_reward, terminated, truncated, {**final, **self._infos(outcome, everyone)}

    def render(self) -> tuple[Any, ...] | None:
        """One uint8 image [H, W, 3] of `base_camera` for each environment; None without a render mode."""
        if self.render_mode is None:
            return None
        return tuple(self.render_frames("base_camera", size=self.config.render_size))

    def render_frames(
        self,
        camera: str = "base_camera",
        env_ids: IntArray | Sequence[int] | None = None,
        *,
        size: tuple[int, int] | None = None,
        out: UInt8Array | None = None,
        final: bool = False,
    ) -> UInt8Array:
        """Images of some environments, rendered now and only for them.

        Args:
            camera: `base_camera` or `wrist_camera`.
            env_ids: int [n], which environments; all by default.
            size: (H, W); `image_size` by default.
            out: uint8 [n, H, W, 3] to write to, instead of a new array; the first axis may have any stride.
            final: show what the last action led to: where `SameStep` has begun a new episode since, the end
                of the old one; elsewhere, as always, the present.

        Returns:
            uint8 [n, H, W, 3]; `out` if that was given.
        """
        if camera not in TABLETOP_CAMERAS:
            raise ConfigError(unknown_name("camera", camera, TABLETOP_CAMERAS))
        self._check_begun()
        ids = check_env_ids(env_ids, self.num_envs)
        shape = self.config.image_size if size is None else check_image_size("size", size)
        return self.renderer.render(self._lit(self._scenes(ids, final)), ids, camera, shape, out)

    def goal_in_picture(self, camera: str, env_ids: IntArray | Sequence[int]) -> FloatArray:
        """Where the goal of the last action's episode appears: row and column as shares, float32 [n, 2]."""
        ids, (height, width) = check_env_ids(env_ids, self.num_envs), self.config.image_size
        rows = self._scenes(ids, final=True).rows
        make = base_camera if camera == "base_camera" else wrist_camera
        u, v, _ = make(rows, (height, width)).project(rows[GOAL])
        return np.stack([v / height, u / width], axis=1).astype(np.float32)

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what the last `num_steps` steps before the latest one led to."""
        self._past = deque(self._past, maxlen=num_steps)

    def render_past(
        self, camera: str, env_ids: IntArray | Sequence[int], steps_back: IntArray | Sequence[int]
    ) -> UInt8Array:
        """Images of what earlier actions led to.

        Args:
            camera: `base_camera` or `wrist_camera`.
            env_ids: int [n], which environments.
            steps_back: int [n] from 1, counted from the last action; within its episode.

        Returns:
            uint8 [n, H, W, 3].
        """
        ids, back = check_env_ids(env_ids, self.num_envs), np.asarray(steps_back, np.int64)
        if len(back) and not 1 <= int(back.min()) <= int(back.max()) <= len(self._past):
            raise DataError(f"steps_back must lie in 1..{len(self._past)}, the steps that are remembered")
        scene = Scene.empty(len(ids))
        for number in np.unique(back).tolist():
            places = np.flatnonzero(back == number)
            scene.put(places, self._past[-number].take(ids[places]))
        return self.renderer.render(self._lit(scene), ids, camera, self.config.image_size, None)

    def _lit(self, scene: Scene) -> Scene:
        """A copy of worlds as they are drawn."""
        if not self.config.status_lamp:
            scene.rows[STILL] = 0.0
        return scene

    def state(self) -> FloatArray:
        """The present state vectors, float32 [N, S], in every observation mode."""
        return self._scene.state()

    def final_state(self) -> FloatArray:
        """The states that the last action led to, float32 [N, S]; see `render_frames(final=True)`."""
        if not self._restarted.any():
            return self._scene.state()
        return self._scenes(np.arange(self.num_envs), final=True).state()

    # Episodes

    def _begin(self, ids: IntArray) -> None:
        """Start the next episode in the environments `ids`."""
        self._episodes[ids] += 1
        self._scene.put(ids, begin_episodes(self._env_seeds[ids], self._episodes[ids], self.config))
        self._elapsed[ids] = 0
        self._done[ids] = False

    def _restart(self, outcome: Outcome) -> Info:
        """Keep the ends of finished episodes, begin new ones, and return the infos about the old ones."""
        finished = self._done
        ids = np.flatnonzero(finished)
        self._restarted = finished.copy()
        self._final_scene.put(ids, self._scene.take(ids))
        final = {
            "final_obs": self._observe(ids),
            "_final_obs": finished.copy(),
            "final_info": self._infos(outcome, finished),
            "_final_info": finished.copy(),
        }
        self._begin(ids)
        return final

    def _scenes(self, ids: IntArray, final: bool) -> Scene:
        """The worlds `ids` as they are, or as the last action left them."""
        scene = self._scene.take(ids)
        if final and self._restarted.any():
            places = np.flatnonzero(self._restarted[ids])
            scene.put(places, self._final_scene.take(ids[places]))
        return scene

    def _check_begun(self) -> None:
        if self._episodes.min() < 0:
            raise DataError("the environment has not been reset yet: call reset() first")

    # What goes out

    def _observe(self, ids: IntArray | None = None) -> Observation:
        """New observations of all environments; images only of `ids`, where these are given, else zeros."""
        if self.config.obs_mode == "state":
            return self.state()
        obs: dict[str, Any] = {"state": self.state()} if self.config.obs_mode == "state+rgb" else {}
        for camera in self.config.cameras:
            if ids is None:
                obs[camera] = self.render_frames(camera)
            else:
                obs[camera] = np.zeros((self.num_envs, *self.config.image_size, 3), np.uint8)
                obs[camera][ids] = self.render_frames(camera, ids)
        return obs

    def _infos(self, outcome: Outcome, mask: BoolArray) -> Info:
        """New arrays [N], each with a mask that says for which environments it holds."""
        values = {
            "success": outcome.success.copy(),
            "is_grasped": outcome.is_grasped.copy(),
            "is_obj_placed": outcome.is_obj_placed.copy(),
            "is_robot_static": outcome.is_robot_static.copy(),
            "elapsed_steps": self._elapsed.copy(),
            "env_seed": self._env_seeds.astype(np.int64),
            "episode_index": self._episodes.copy(),
        }
        return values | {f"_{key}": mask.copy() for key in values}


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
        """Begin a new episode; `seed` restarts the stream of episodes."""
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
