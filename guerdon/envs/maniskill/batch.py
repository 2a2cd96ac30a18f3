"""One ManiSkill simulation: one environment on a CPU, or a batch of them on a GPU; tensors in and out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray, IntArray
from guerdon.envs.maniskill.task import make_task


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What others need to know of a task."""

    state_size: int
    own_state: IntArray
    """int [P]; which numbers of the state a robot knows without looking (ManiSkill's state beside images)."""
    action_low: FloatArray
    action_high: FloatArray
    info_names: tuple[str, ...]
    """Infos with one number for each environment ..."""
    flags: frozenset[str]
    """... and which of them are true or false."""
    max_episode_steps: int | None
    control_mode: str


class ManiSkillBatch:
    """A simulation of n environments, with the methods of `SimulatorPool`; none of them is ever lost.

    Episodes end and start on request alone. After every `reset` and `step`, `values` holds what is, [n, ...]
    each: `state`, `env_reward`, `goal_in_picture` (row and column as shares of the picture, NaN where none is
    known) and, as `info/NAME`, the infos.
    """

    def __init__(self, cfg: ManiSkillConfig, num_envs: int, backend: str) -> None:
        self.cfg, self.num_envs = cfg, num_envs
        self.lost: BoolArray = np.zeros(num_envs, np.bool_)
        self.env = make_task(cfg, num_envs, backend)
        self.device: torch.device = self.env.device
        self._one_by_one = backend == "cpu"
        # A task that builds a new scene for each episode cannot go back to one that is over.
        self._rebuilds = self.env.reconfiguration_freq != 0
        self._cameras: dict[tuple[int, int], Any] = {}
        self._final: Any = None
        """The end of the last episode: a state to go back to, or frames [n, H, W, 3]."""
        self._past: deque[Any] = deque(maxlen=0)
        """The same of what was before each of the last steps, the latest last; see `keep_past`."""
        self.values: dict[str, Tensor] = {"env_reward": torch.zeros(num_envs, device=self.device)}
        self._take(*self.env.reset(seed=list(range(num_envs))))
        self.values["goal_in_picture"] = self._project_goal()
        self.facts = self._describe()

    @torch.no_grad()
    def reset(self, env_ids: Sequence[int] | IntArray, seeds: Sequence[int], *, keep_final: bool) -> None:
        """Start new episodes in `env_ids`; with `keep_final`, what is there now can be shown afterwards.

        A batch on a GPU is seeded as a whole only; a reset of some of its environments goes on with the
        random numbers of the batch.
        """
        self._final = self._memory() if keep_final and self.cfg.shows_images else None
        if self._rebuilds:
            self._cameras = {}
        if len(env_ids) == self.num_envs:
            self._take(*self.env.reset(seed=[int(seed) for seed in seeds]))
        else:
            some = torch.as_tensor(np.asarray(env_ids), device=self.device)
            self._take(*self.env.reset(options={"env_idx": some}))
        self.values["goal_in_picture"] = self._project_goal()

    @torch.no_grad()
    def step(self, actions: FloatArray | Tensor) -> None:
        """Take one action in each environment, float32 [n, A]."""
        if self._past.maxlen:
            self._past.append(self._memory())
        obs, env_reward, _, _, info = self.env.step(torch.as_tensor(actions, device=self.device))
        self.values["env_reward"] = env_reward
        self._take(obs, info)

    def read(self, name: str) -> FloatArray:
        """A copy of one of `values`, float32 [n, ...]."""
        array: FloatArray = self.values[name].detach().to("cpu", torch.float32, copy=True).numpy()
        return array

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what was before each of the last `num_steps` steps, over resets too."""
        self._past = deque(self._past, maxlen=num_steps)

    def render_envs(
        self, env_ids: IntArray, final: BoolArray, size: tuple[int, int] | None, steps_back: IntArray
    ) -> Tensor:
        """Frames uint8 [m, H, W, 3] on the device; arguments as for `SimulatorPool.render_envs`."""
        height, width = size or self.cfg.image_size
        frames = torch.empty((len(env_ids), height, width, 3), dtype=torch.uint8, device=self.device)
        moments = np.where(final, -1, steps_back)
        for moment in np.unique(moments).tolist():
            places = np.flatnonzero(moments == moment)
            shown = self.render(size, final=moment < 0, steps_back=max(moment, 0))
            frames[torch.as_tensor(places)] = shown[torch.as_tensor(env_ids[places])]
        return frames

    @torch.no_grad()
    def render(
        self, size: tuple[int, int] | None = None, *, final: bool = False, steps_back: int = 0
    ) -> Tensor:
        """Frames uint8 [n, H, W, 3] of what is, or with `final` of what was before the last `reset`.

        `steps_back` from 1 shows what was so many steps before the last one's outcome, if that is remembered.
        """
        shown = self._final if final else None
        if 1 <= steps_back <= len(self._past):
            shown = self._past[-steps_back]
        if shown is None:
            return self._picture(size)
        if isinstance(shown, Tensor):
            return _resized(shown, size)
        now = self.env.get_state_dict()
        self.env.set_state_dict(shown)
        try:
            return self._picture(size)
        finally:
            self.env.set_state_dict(now)

    def close(self) -> None:
        """Free the simulation."""
        self._cameras, self._final = {}, None
        self._past.clear()
        self.env.close()

    def _memory(self) -> Any:
        """What is now, to be shown later: a state to go back to, or frames where there is no way back."""
        eager = self._rebuilds or not self._one_by_one
        return self.render().clone() if eager else self.env.get_state_dict()

    def _picture(self, size: tuple[int, int] | None) -> Tensor:
        if size is None or size == self.cfg.image_size:
            frames: Tensor = self.env.render_rgb_array(next(iter(self.env._human_render_cameras)))
            return frames
        if not self._one_by_one:
            return _resized(self._picture(None), size)
        if size not in self._cameras:  # cameras can be added to a scene at any time, but only on a CPU
            from mani_skill.sensors.camera import Camera

            config = next(iter(self.env._human_render_cameras.values())).config
            height, width = size
            named = dataclasses.replace(config, uid=f"view_{height}x{width}", width=width, height=height)
            self._cameras[size] = Camera(named, self.env.scene)
        for hidden in self.env._hidden_objects:
            hidden.show_visual()
        self.env.scene.update_render(update_sensors=False, update_human_render_cameras=True)
        camera = self._cameras[size]
        camera.capture()
        shown: Tensor = camera.get_obs(rgb=True, depth=False, segmentation=False, position=False)["rgb"]
        return shown

    def _project_goal(self) -> Tensor:
        """Goals stay where they are for an episode, and so does the camera, unless it is mounted."""
        places = [getattr(self.env, name, None) for name in ("goal_site", "goal_region")]
        poses = [place.pose for place in places if place is not None]
        poses += [pose for pose in (getattr(self.env, "goal_pose", None),) if pose is not None]
        cameras = [camera for camera in self.env._human_render_cameras.values() if self.cfg.shows_images]
        if not poses or not cameras or cameras[0].config.mount is not None:
            return torch.full((self.num_envs, 2), torch.nan, device=self.device)
        seen = cameras[0].get_params()
        point = torch.cat([poses[0].p, torch.ones_like(poses[0].p[:, :1])], 1).unsqueeze(2)
        column, row, depth = (seen["intrinsic_cv"] @ seen["extrinsic_cv"] @ point).squeeze(2).unbind(1)
        height, width = self.cfg.image_size
        return torch.stack([row / depth / height, column / depth / width], 1).float()

    def _take(self, obs: Tensor, info: Mapping[str, Any]) -> None:
        infos = {name: value for name, value in info.items() if isinstance(value, Tensor) and value.ndim == 1}
        infos.pop("elapsed_steps", None)
        grasped = [name for name in infos if name.startswith("is_") and name.endswith("_grasped")]
        if "is_grasped" not in infos and len(grasped) == 1:
            infos["is_grasped"] = infos[grasped[0]]
        self.values |= {"state": obs, **{f"info/{name}": value for name, value in infos.items()}}

    def _describe(self) -> TaskFacts:
        from mani_skill.utils.registration import REGISTERED_ENVS

        space = self.env.single_action_space
        if not isinstance(getattr(space, "low", None), np.ndarray):
            raise ConfigError(f"{self.cfg.id} has no plain vector of numbers as its action, but {space}")
        infos = {name[5:]: value for name, value in self.values.items() if name.startswith("info/")}
        return TaskFacts(
            state_size=int(self.values["state"].shape[1]),
            own_state=self._own_state(),
            action_low=space.low.astype(np.float32),
            action_high=space.high.astype(np.float32),
            info_names=tuple(infos),
            flags=frozenset(name for name, value in infos.items() if value.dtype == torch.bool),
            max_episode_steps=REGISTERED_ENVS[self.cfg.id].max_episode_steps,
            control_mode=str(self.env.agent.control_mode),
        )

    def _own_state(self) -> IntArray:
        """Where the numbers that ManiSkill gives beside images stand in the full state, by their names."""
        info = self.env.get_info()
        full = _columns(self.env._get_obs_state_dict(info))
        self.env._obs_mode = "rgb"  # asked for once; tasks look at the mode when they make an observation
        try:
            known = _columns(self.env._get_obs_state_dict(info))
        finally:
            self.env._obs_mode = "state"
        ends = np.cumsum(list(full.values())).tolist()
        places = {name: range(end - full[name], end) for name, end in zip(full, ends, strict=True)}
        return np.array([place for name in known if name in places for place in places[name]], np.int64)


def _columns(obs: Mapping[str, Any], path: str = "") -> dict[str, int]:
    """Name -> how many numbers, in the order in which ManiSkill strings them together."""
    found: dict[str, int] = {}
    for name, value in obs.items():
        if isinstance(value, Mapping):
            found.update(_columns(value, f"{path}{name}/"))
        else:
            found[f"{path}{name}"] = int(np.prod(value.shape[1:], dtype=np.int64))
    return found


def _resized(frames: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Frames uint8 [n, H, W, 3] at another size."""
    if size is None or tuple(frames.shape[1:3]) == size:
        return frames
    moved = frames.permute(0, 3, 1, 2).float()
    scaled = torch.nn.functional.interpolate(moved, size, mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()
