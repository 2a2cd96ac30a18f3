"""Find frames and state vectors in what environments return, whatever their dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from guerdon.config.schema_reward import GOAL_VIEW
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy, to_uint8_hwc
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array

GOAL_SHARE = 0.5
"""Side of the window around the goal, as a share of the shorter side of the picture."""
STATE_KEYS = ("state", "states")
FINAL_FRAME = "final_frame"
"""Where `KeepFinalFrame` leaves the rendered end of an episode: in the info, and as its attribute."""
AT_REST_INFO = "is_robot_static"
"""The info that tells whether the robot stands still."""

AnyEnv: TypeAlias = gym.Env[Any, Any] | VectorEnv[Any, Any, Any]


@runtime_checkable
class RendersOnDemand(Protocol):
    """An environment that shows any of its cameras when asked, also the end of an episode that is over."""

    def render_frames(
        self, camera: str, env_ids: IntArray | None = None, *, final: bool = False
    ) -> UInt8Array:
        """Frames of the environments `env_ids` -> uint8 [n, H, W, 3]."""

    def state(self) -> FloatArray:
        """Present states -> float32 [N, S]."""

    def final_state(self) -> FloatArray:
        """States that the last action led to -> float32 [N, S]."""


@runtime_checkable
class ShowsGoal(Protocol):
    """An environment that can say where the goal appears in a camera's picture."""

    def goal_in_picture(self, camera: str, env_ids: IntArray) -> FloatArray:
        """Row and column of the goal as shares of the picture's height and width -> float32 [n, 2].

        Of the environments `env_ids` in the episode that the last action belonged to; beyond 0 to 1 where the
        goal is out of the picture.
        """


@runtime_checkable
class ObservesFrames(Protocol):
    """An environment that tells whether the images in its observations are the frames it renders.

    Policies may observe smaller images than reward models score.
    """

    frames_in_obs: bool


def camera_behind(camera: str) -> str:
    """The camera that takes the picture which `camera` shows all or a part of."""
    return camera.removesuffix(GOAL_VIEW)


def window(images: UInt8Array, centres: FloatArray, share: float) -> UInt8Array:
    """Square windows of images, moved inwards where they would stand out.

    Args:
        images: uint8 [n, H, W, C].
        centres: float [n, 2], row and column as shares of the height and width.
        share: the windows' side as a share of the shorter side of the images.
    """
    count, height, width = images.shape[:3]
    side = max(round(share * min(height, width)), 1)
    corner = np.rint(np.asarray(centres) * [height, width] - side / 2).astype(np.int64)
    rows = np.clip(corner[:, 0], 0, height - side)[:, None] + np.arange(side)
    columns = np.clip(corner[:, 1], 0, width - side)[:, None] + np.arange(side)
    windows: UInt8Array = images[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return windows


def native_of(env: AnyEnv) -> RendersOnDemand | None:
    """The environment itself, or the batch of one inside a single one, if it renders on demand."""
    inner = env.unwrapped if isinstance(env, VectorEnv) else getattr(env.unwrapped, "vector", None)
    return inner if isinstance(inner, RendersOnDemand) else None


def find_image(obs: Any, camera: str, cameras: Sequence[str]) -> Any | None:
    """The image of `camera` in an observation, or None.

    Known places: `obs[camera]`, `obs["images"][camera]`, `obs["images/<camera>"]`,
    `obs["extra_view_images"][camera]`; for the first of `cameras` also `obs["main_images"]`, and
    `obs["images"]` if it is one array; with one camera the observation itself may be the image.
    """
    if not isinstance(obs, Mapping):
        is_image = hasattr(obs, "ndim") and obs.ndim >= 4
        return obs if is_image and len(cameras) == 1 else None
    for place in (obs, obs.get("images"), obs.get("extra_view_images")):
        if isinstance(place, Mapping):
            for key in (camera, f"images/{camera}", f"obs/images/{camera}"):
                if key in place:
                    return place[key]
    if camera == cameras[0]:
        if obs.get("main_images") is not None:
            return obs["main_images"]
        if not isinstance(obs.get("images"), Mapping) and len(cameras) == 1:
            return obs.get("images")
    return None


def images_from(obs: Any, cameras: Sequence[str]) -> dict[str, UInt8Array]:
    """All `cameras` in a batched observation -> uint8 [N, H, W, C] each; raises if one is missing."""
    found: dict[str, UInt8Array] = {}
    for camera in cameras:
        image = find_image(obs, camera, cameras)
        if image is None:
            there = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise DataError(f"the observation has no image of camera {camera!r}; it has {there}")
        found[camera] = to_uint8_hwc(image, name=f"camera {camera!r}")
    return found


def state_from(obs: Any) -> FloatArray | None:
    """The state vectors of a batched observation -> float32 [N, S], or None if it has none."""
    if isinstance(obs, Mapping):
        return next((state_from(obs[key]) for key in STATE_KEYS if key in obs), None)
    array = to_numpy(obs)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.number):
        return None
    return array.astype(np.float32)


def with_final(obs: Any, final_obs: Any, done: BoolArray) -> Any:
    """`obs` with the rows of ended episodes taken from `final_obs`, so that nothing of the next one leaks in.

    Args:
        obs: batched observation, an array or a mapping of arrays, [N, ...].
        final_obs: the same structure, or an object array [N] with one observation per ended episode.
        done: bool [N].
    """
    if final_obs is None or not done.any():
        return obs
    if isinstance(obs, Mapping):
        per_env = not isinstance(final_obs, Mapping)
        return {
            key: with_final(value, _column(final_obs, key) if per_env else final_obs.get(key), done)
            for key, value in obs.items()
        }
    if isinstance(final_obs, Mapping):
        raise DataError("final_obs is a mapping, but the observation is an array")
    merged = np.array(to_numpy(obs))
    source = (
        final_obs if isinstance(final_obs, np.ndarray) and final_obs.dtype == object else to_numpy(final_obs)
    )
    for env in np.flatnonzero(done).tolist():
        merged[env] = to_numpy(source[env])
    return merged


def take_row(obs: Any, env: int) -> Any:
    """The observation of one environment out of a batched one."""
    return {key: take_row(part, env) for key, part in obs.items()} if isinstance(obs, Mapping) else obs[env]


def _column(final_obs: Any, key: str) -> NDArray[Any]:
    """One key of an object array of per-environment mappings."""
    column = np.empty(len(final_obs), object)
    for env, item in enumerate(final_obs):
        column[env] = None if item is None else item[key]
    return column


def per_env(info: Mapping[str, Any], key: str, num_envs: int, done: BoolArray) -> NDArray[Any] | None:
    """An info value as an array [N], that of the ended episode where one ended; None if it is not there."""
    value = info.get(key)
    final = info.get("final_info")
    if value is None and not (isinstance(final, Mapping) and key in final):
        return None
    result = np.zeros(num_envs) if value is None else to_numpy(value).reshape(-1)
    if result.shape != (num_envs,):
        raise DataError(f"info[{key!r}] has shape {list(result.shape)}; expected [{num_envs}]")
    if isinstance(final, Mapping) and key in final:
        finals = np.asarray(to_numpy(final[key])).reshape(-1)
        result = np.where(done, finals, result)
    return result


class FrameSource:
    """Gets the frames that the last action led to: from the observation, or by rendering on demand.

    The camera `NAME@goal` is the part of what NAME shows around the goal, if the environment tells its place.
    """

    def __init__(self, env: AnyEnv, cameras: Sequence[str]) -> None:
        self.cameras = tuple(cameras)
        self._whole = tuple(dict.fromkeys(camera_behind(camera) for camera in cameras))
        self._env = env
        self._native = native_of(env)
        inner: Any = env.unwrapped if self._native is None else self._native
        self._shows_goal = inner if isinstance(inner, ShowsGoal) else None
        if self._shows_goal is None and any(camera.endswith(GOAL_VIEW) for camera in cameras):
            raise ConfigError(
                f"{type(inner).__name__} cannot say where the goal is in its pictures, which {list(cameras)} "
                "needs: give a region instead, reward.model.crop=[top,left,height,width]"
            )
        self.observed = not isinstance(inner, ObservesFrames) or inner.frames_in_obs
        """Whether images in observations are what the reward model is to see."""
        mode = env.metadata.get("autoreset_mode") if isinstance(env, VectorEnv) else None
        self._same_step = mode == AutoresetMode.SAME_STEP

    def frames(self, obs: Any, done: BoolArray, env_ids: IntArray) -> dict[str, UInt8Array]:
        """Frames of the environments `env_ids` (int [n]) -> camera -> uint8 [n, H, W, C].

        `obs` is batched and already has the final observations of ended episodes (`with_final`).
        """
        whole = self._frames(obs, done, env_ids)
        return {name: self.view(name, whole[camera_behind(name)], env_ids) for name in self.cameras}

    def are_in(self, obs: Any) -> bool:
        """Whether an observation shows all cameras itself, as the reward model is to see them."""
        found = (find_image(obs, camera, self._whole) for camera in self._whole)
        return self.observed and all(image is not None for image in found)

    def view(self, camera: str, images: UInt8Array, env_ids: IntArray) -> UInt8Array:
        """What `camera` shows of pictures [n, H, W, C] that the camera behind it took in these episodes."""
        if not camera.endswith(GOAL_VIEW):
            return images
        assert self._shows_goal is not None
        return window(images, self._shows_goal.goal_in_picture(camera_behind(camera), env_ids), GOAL_SHARE)

    def _frames(self, obs: Any, done: BoolArray, env_ids: IntArray) -> dict[str, UInt8Array]:
        if self.are_in(obs):
            found = images_from(obs, self._whole)
            if len(env_ids) == len(done):  # all of them, in order: no copy
                return found
            return {name: images[env_ids] for name, images in found.items()}
        if self._native is not None:
            return {name: self._native.render_frames(name, env_ids, final=True) for name in self._whole}
        return self._rendered(done, env_ids)

    def _rendered(self, done: BoolArray, env_ids: IntArray) -> dict[str, UInt8Array]:
        if len(self._whole) != 1 or getattr(self._env, "render_mode", None) != "rgb_array":
            raise DataError(
                f"the environment shows no images of {list(self.cameras)}: they are not in its observations, "
                "and it can render one camera at the most, made with render_mode='rgb_array'"
            )
        rendered: Any = self._env.render()
        if isinstance(rendered, tuple | list):
            rendered = np.stack([to_numpy(item) for item in rendered])
        images = to_uint8_hwc(rendered, name="what render() returned")
        if images.ndim == 3:
            images = images[None]
        shown: UInt8Array = images[env_ids]
        if self._same_step and done[env_ids].any():
            ends = self._final_frames()
            for row in np.flatnonzero(done[env_ids]).tolist():
                shown[row] = to_uint8_hwc(ends[env_ids[row]], name="what render() returned")
        return {self._whole[0]: shown}

    def _final_frames(self) -> Sequence[Any]:
        """The end of each environment's last episode, as `KeepFinalFrame` around each has kept it."""
        inner: Any = self._env.unwrapped
        if not self._env.metadata.get(FINAL_FRAME):
            raise DataError(
                "with auto-reset in the same step the final frame is gone before it can be rendered: put "
                "each environment into guerdon.wrappers.KeepFinalFrame, make the vector environment with "
                "autoreset_mode=NEXT_STEP, or put images into the observation"
            )
        frames: Sequence[Any] = inner.call(FINAL_FRAME)
        return frames


# What a step led to

INTERVENED_INFO, ACTION_INFO = "intervened", "action_taken"
"""The infos that tell whether a person chose the action, and which one it was."""


def taken_actions(info: Mapping[str, Any], chosen: NDArray[Any], done: BoolArray) -> dict[str, Any]:
    """The actions [n, ...] that were taken, and where by a person, if the environments tell.

    An action of the policy that the robot's safety cut short stays the policy's own: that it is cut short is
    how the world answers to it, and a critic has to learn that.
    """
    reported = per_env(info, INTERVENED_INFO, len(done), done)
    if reported is None:
        return {"actions": chosen}
    intervened: BoolArray = reported >= 0.5
    actions = np.array(chosen)
    final = info.get("final_info")
    for env in np.flatnonzero(intervened).tolist():
        place = final if done[env] and isinstance(final, Mapping) and ACTION_INFO in final else info
        actions[env] = to_numpy(place[ACTION_INFO])[env]
    return {"actions": actions, "intervened": intervened}


def next_observations(obs: Any, info: Mapping[str, Any], done: BoolArray) -> Any:
    """What the last actions led to: the final observation where an episode ended."""
    if not done.any():
        return obs
    if info.get("final_obs") is None:
        raise DataError("an episode ended, but the environment's info has no final_obs")
    return with_final(obs, info["final_obs"], done)


def obs_parts(observation: Any) -> dict[str, NDArray[Any]]:
    """Name -> array [N, ...], with a state vector under `state`."""
    if isinstance(observation, Mapping):
        return {name: to_numpy(part) for name, part in observation.items()}
    return {"state": to_numpy(observation)}


def copy_obs(obs: Any) -> Any:
    """A copy: environments may reuse their arrays."""
    return {name: np.array(part) for name, part in obs.items()} if isinstance(obs, dict) else np.array(obs)


def stack_obs(obs: Sequence[Any]) -> Any:
    """Observations of several steps, [T, N, ...]."""
    if isinstance(obs[0], dict):
        return {name: np.stack([each[name] for each in obs]) for name in obs[0]}
    return np.stack(obs)
