"""ManiSkill tasks as vector environments, with the conventions of the embedded `guerdon/Tabletop-v0`.

On a CPU the environments live in some simulator processes and their states in shared memory; a frame is
rendered when somebody asks for it, by the process that owns the scene, and nowhere else. On a GPU it is
ManiSkill's own batch. What an episode is, when it ends and what is told of it is the same in both cases and
is decided here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from guerdon.config.maniskill import MAIN_CAMERA, ManiSkillConfig
from guerdon.config.tabletop import check_image_size, unknown_name
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array, with_control_mode
from guerdon.envs.inputs import (
    check_autoreset_mode,
    check_env_ids,
    check_going_on,
    check_num_envs,
    check_reset_mask,
    give_seeds,
)
from guerdon.envs.maniskill.batch import ManiSkillBatch, TaskFacts
from guerdon.envs.maniskill.pool import SimulatorPool

log = logging.getLogger("guerdon")

Observation: TypeAlias = Any
"""State vectors, or a dict of `state` and `base_camera`."""
Info: TypeAlias = dict[str, Any]


class DeviceSimulators:
    """ManiSkill's own batch behind the interface of `SimulatorPool`."""

    def __init__(self, cfg: ManiSkillConfig, num_envs: int, backend: str) -> None:
        self.batch = ManiSkillBatch(cfg, num_envs, backend)
        self.facts = self.batch.facts
        self.lost: BoolArray = np.zeros(num_envs, np.bool_)

    def step(self, actions: FloatArray | torch.Tensor) -> None:
        """Take one action in each environment, float32 [N, A]."""
        with torch.no_grad():
            self.batch.step(torch.as_tensor(actions, device=self.batch.device))

    def reset(self, env_ids: IntArray, seeds: Sequence[int], *, keep_final: bool) -> None:
        """Begin new episodes in `env_ids`."""
        with torch.no_grad():
            self.batch.reset(env_ids.tolist(), seeds, keep_final=keep_final)

    def state(self) -> FloatArray:
        """States, float32 [N, S]."""
        return _fetched(self.batch.state)

    def env_reward(self) -> FloatArray:
        """Rewards of the last step, float32 [N]."""
        return _fetched(self.batch.env_reward)

    def info(self, name: str) -> FloatArray:
        """One of the infos, float32 [N]."""
        return _fetched(self.batch.infos[name])

    def goal_in_picture(self) -> FloatArray:
        """Row and column of each goal as shares of the picture, float32 [N, 2]; NaN where none is known."""
        return _fetched(self.batch.goal_in_picture)

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what was before each of the last `num_steps` steps."""
        self.batch.keep_past(num_steps)

    def render_tensor(
        self,
        env_ids: IntArray,
        final: BoolArray,
        size: tuple[int, int] | None,
        steps_back: IntArray | None = None,
    ) -> torch.Tensor:
        """Frames uint8 [n, H, W, 3] on the device."""
        back = np.zeros(len(env_ids), np.int64) if steps_back is None else steps_back
        with torch.no_grad():
            frames = self.batch.render(size)[torch.as_tensor(env_ids, device=self.batch.device)]
            shown = [(final, self.batch.render(size, final=True))] if final.any() else []
            for number in np.unique(back[back > 0]).tolist():
                shown.append((back == number, self.batch.render(size, steps_back=number)))
            for which, old in shown:
                places = torch.as_tensor(np.flatnonzero(which), device=frames.device)
                frames[places] = old[torch.as_tensor(env_ids[which], device=frames.device)]
            return frames

    def render(
        self,
        env_ids: IntArray,
        final: BoolArray,
        size: tuple[int, int] | None,
        steps_back: IntArray | None = None,
    ) -> UInt8Array:
        """Frames uint8 [n, H, W, 3]."""
        frames: UInt8Array = self.render_tensor(env_ids, final, size, steps_back).cpu().numpy()
        return frames

    def close(self) -> None:
        """Free the simulation."""
        self.batch.close()


class ManiSkillVectorEnv(VectorEnv[Observation, Any, NDArray[Any]]):
    """N environments of a ManiSkill task.

    Environment i, seeded with s + i, plays the same episodes whatever the number of processes (on a GPU the
    batch is seeded as a whole). If a simulator process is lost, the episodes of its environments end there as
    truncated, with `episode_lost` in their infos, and new ones begin.

    Args:
        num_envs: N.
        config: settings; `settings` given by keyword go on top of the defaults instead.
        autoreset_mode: as for `TabletopVectorEnv`.
        simulators: what to simulate with; None: as the settings say.
        **settings: any field of `ManiSkillConfig`.
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
        config: ManiSkillConfig | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        simulators: SimulatorPool | DeviceSimulators | None = None,
        **settings: Any,
    ) -> None:
        self.config = ManiSkillConfig.from_settings(settings) if config is None else config
        self.num_envs = num_envs = check_num_envs(num_envs)
        self.render_mode = self.config.render_mode
        self.autoreset_mode = check_autoreset_mode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        self.simulators = _simulators(self.config, num_envs) if simulators is None else simulators
        self._tensors = self.config.output == "torch"
        self.facts: TaskFacts = self.simulators.facts
        self.max_episode_steps = self.config.max_episode_steps or self.facts.max_episode_steps
        self.spec = EnvSpec(
            self.config.id,
            entry_point="guerdon.envs.maniskill.env:ManiSkillVectorEnv",
            max_episode_steps=self.max_episode_steps,
        )
        self.single_action_space = spaces.Box(self.facts.action_low, self.facts.action_high, dtype=np.float32)
        self.single_observation_space = self._space()
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._ended: BoolArray = np.zeros(num_envs, np.bool_)
        """Where the last step ended an episode and began another one ..."""
        self._shown: BoolArray = self._ended
        """... and the end of the old one can be shown."""
        self._final_state: Any = None
        self._final_goal: FloatArray = np.zeros((num_envs, 2), np.float32)
        self._num_past = 0
        self._env_seeds = np.zeros(num_envs, np.uint64)
        self._episodes = np.full(num_envs, -1, np.int64)  # -1: never seeded
        self._elapsed = np.zeros(num_envs, np.int64)
        self._done: BoolArray = np.zeros(num_envs, np.bool_)

    # Episodes

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, Info]:
        """Begin new episodes; see `TabletopVectorEnv.reset`."""
        mask = check_reset_mask(options, self.num_envs)
        if isinstance(seed, (int, np.integer)):
            super().reset(seed=int(seed))
        self._env_seeds = give_seeds(self._env_seeds, self._episodes, seed, mask)
        self._begin(np.flatnonzero(mask), keep_final=False)
        self._ended, self._shown = self._ended & ~mask, self._shown & ~mask
        return self._observe(), self._infos(mask, np.zeros(self.num_envs, np.bool_))

    def step(self, actions: Any) -> tuple[Observation, Any, Any, Any, Info]:
        """Take one action in each environment.

        Args:
            actions: float [N, A]; values beyond the action space are clipped.

        Returns:
            Observations, env rewards float32 [N], terminated bool [N], truncated bool [N], infos.
        """
        self._check_begun()
        check_going_on(self._done, self.autoreset_mode)
        self.simulators.step(self._check_actions(actions))
        self._ended = self._shown = np.zeros(self.num_envs, np.bool_)
        self._elapsed += 1
        begun = self._done.copy()  # only NEXT_STEP comes here with finished episodes
        if begun.any():
            self._begin(np.flatnonzero(begun), keep_final=False)
        lost = self.simulators.lost.copy()
        env_reward = self.simulators.env_reward()
        env_reward[lost | begun] = 0.0
        terminated = np.zeros(self.num_envs, np.bool_)
        if self.config.terminate_on_success:
            terminated = self._flag("success") & ~lost & ~begun
        limit = self.max_episode_steps
        truncated = lost | (self._elapsed >= limit) if limit else lost
        self._done = terminated | truncated
        final: Info = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._done.any():
            final = self._restart(lost)
        everyone = np.ones(self.num_envs, np.bool_)
        infos = {**self._infos(everyone, lost & ~self._ended), **final}
        return self._observe(), self._out(env_reward), self._out(terminated), self._out(truncated), infos

    def _restart(self, lost: BoolArray) -> Info:
        """Keep the ends of finished episodes, begin new ones, and return the infos about the old ones."""
        finished = self._done.copy()
        ids = np.flatnonzero(finished)
        self._final_state = self._present()
        self._final_goal = self.simulators.goal_in_picture()
        final = {
            "final_obs": self._observe(ids),
            "_final_obs": self._out(finished),
            "final_info": self._infos(finished, lost),
            "_final_info": self._out(finished),
        }
        self._ended, self._shown = finished, finished & ~lost  # of what was lost there is no end to show
        self._begin(ids, keep_final=True)
        return final

    def _begin(self, ids: IntArray, *, keep_final: bool) -> None:
        """Start the next episode in the environments `ids`."""
        self._episodes[ids] += 1
        self._elapsed[ids] = 0
        self._done[ids] = False
        seeds = self.episode_seeds()[ids].tolist()
        self.simulators.reset(ids, seeds, keep_final=keep_final)

    @property
    def source(self) -> str:
        """Where recorded episodes say they come from; actions mean nothing without the control mode."""
        return with_control_mode(self.config.id, self.facts.control_mode)

    def episode_seeds(self) -> IntArray:
        """What the simulator was given as the seed of each present episode, int64 [N]."""
        pairs = zip(self._env_seeds.tolist(), self._episodes.tolist(), strict=True)
        drawn = [np.random.SeedSequence([s, max(n, 0)]).generate_state(1)[0] >> 1 for s, n in pairs]
        return np.array(drawn, np.int64)

    # Frames and states

    def render(self) -> tuple[Any, ...] | None:
        """One uint8 image [H, W, 3] for each environment; None without a render mode."""
        if self.render_mode is None:
            return None
        return tuple(self.render_frames(size=self.config.render_size))

    def render_frames(
        self,
        camera: str = MAIN_CAMERA,
        env_ids: IntArray | Sequence[int] | None = None,
        *,
        size: tuple[int, int] | None = None,
        final: bool = False,
    ) -> UInt8Array:
        """Images of some environments, rendered now and only for them; see `TabletopVectorEnv`."""
        frames: UInt8Array = self._render(self.simulators.render, camera, env_ids, size, final)
        return frames

    def render_tensor(
        self,
        camera: str = MAIN_CAMERA,
        env_ids: IntArray | Sequence[int] | None = None,
        *,
        size: tuple[int, int] | None = None,
        final: bool = False,
    ) -> torch.Tensor:
        """The same as a tensor on the device of the simulation."""
        if isinstance(self.simulators, SimulatorPool):
            return torch.from_numpy(self.render_frames(camera, env_ids, size=size, final=final))
        frames: torch.Tensor = self._render(self.simulators.render_tensor, camera, env_ids, size, final)
        return frames

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what the last `num_steps` steps before the latest one led to."""
        self._num_past = num_steps
        self.simulators.keep_past(num_steps)

    def render_past(
        self, camera: str, env_ids: IntArray | Sequence[int], steps_back: IntArray | Sequence[int]
    ) -> UInt8Array:
        """Images of what earlier actions led to; see `TabletopVectorEnv`. Lost episodes show what is now."""
        ids, back = self._check_view(camera, env_ids), np.asarray(steps_back, np.int64)
        if len(back) and not 1 <= int(back.min()) <= int(back.max()) <= self._num_past:
            raise DataError(f"steps_back must lie in 1..{self._num_past}, the steps that are remembered")
        return self.simulators.render(ids, np.zeros(len(ids), np.bool_), None, back)

    def _render(
        self,
        render: Callable[[IntArray, BoolArray, tuple[int, int] | None], Any],
        camera: str,
        env_ids: IntArray | Sequence[int] | None,
        size: tuple[int, int] | None,
        final: bool,
    ) -> Any:
        ids = self._check_view(camera, env_ids)
        shape = None if size is None else check_image_size("size", size)
        return render(ids, self._shown[ids] & final, shape)

    def _check_view(self, camera: str, env_ids: IntArray | Sequence[int] | None) -> IntArray:
        """Which environments to show, if they can be shown."""
        if camera != MAIN_CAMERA:
            raise ConfigError(unknown_name("camera", camera, [MAIN_CAMERA]))
        if not self.config.shows_images:
            raise ConfigError(f"{self.config.id} has no frames: set init_params.render_mode to rgb_array")
        self._check_begun()
        return check_env_ids(env_ids, self.num_envs)

    def goal_in_picture(self, camera: str, env_ids: IntArray | Sequence[int]) -> FloatArray:
        """Where the goal of the last action's episode appears: row and column as shares, float32 [n, 2]."""
        if camera != MAIN_CAMERA:
            raise ConfigError(unknown_name("camera", camera, [MAIN_CAMERA]))
        places = np.where(self._shown[:, None], self._final_goal, self.simulators.goal_in_picture())
        places = places[check_env_ids(env_ids, self.num_envs)]
        if np.isnan(places).any():
            raise ConfigError(
                f"{self.config.id} does not tell where its goal is in the picture: give a region instead, "
                "reward.model.crop=[top,left,height,width]"
            )
        return places

    def state(self) -> FloatArray:
        """The present state vectors, float32 [N, S], in every observation mode."""
        return self.simulators.state()

    def final_state(self) -> FloatArray:
        """The states that the last action led to, float32 [N, S]."""
        state = self.state()
        if self._ended.any():
            state[self._ended] = np.asarray(torch.as_tensor(self._final_state).cpu())[self._ended]
        return state

    def close_extras(self, **kwargs: Any) -> None:
        """End the simulators."""
        self.simulators.close()

    # What goes in and out

    def _space(self) -> spaces.Space[Any]:
        """The space of one environment's observations."""
        size = self.facts.state_size if self.config.obs_mode != "rgb" else len(self.facts.own_state)
        state = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        if self.config.obs_mode == "state":
            return state
        image = spaces.Box(0, 255, (*self.config.image_size, 3), np.uint8)
        return spaces.Dict({"state": state, MAIN_CAMERA: image})

    def _present(self) -> Any:
        """The states as they go out: an array, or a tensor on the device."""
        if self._tensors and isinstance(self.simulators, DeviceSimulators):
            return self.simulators.batch.state.clone()
        return self.simulators.state()

    def _observe(self, ids: IntArray | None = None) -> Observation:
        """New observations of all environments; images only of `ids`, where these are given, else zeros."""
        state = self._present()
        if self.config.obs_mode == "state":
            return state
        render = self.render_tensor if self._tensors else self.render_frames
        frames: Any = render(MAIN_CAMERA, ids)
        if ids is not None:
            some, shape = frames, (self.num_envs, *self.config.image_size, 3)
            frames = some.new_zeros(shape) if self._tensors else np.zeros(shape, np.uint8)
            frames[ids] = some
        own = state if self.config.obs_mode == "state+rgb" else state[:, self.facts.own_state]
        return {"state": own, MAIN_CAMERA: frames}

    def _flag(self, name: str) -> BoolArray:
        flag: BoolArray = self.simulators.info(name) >= 0.5
        return flag

    def _infos(self, mask: BoolArray, lost: BoolArray) -> Info:
        """New arrays [N], each with a mask that says for which environments it holds."""
        values: dict[str, NDArray[Any]] = {}
        for name in self.facts.info_names:
            if name in self.facts.flags:
                values[name] = self._flag(name) & ~lost
            else:
                values[name] = self.simulators.info(name)
        values["episode_lost"] = lost.copy()
        values["elapsed_steps"] = self._elapsed.copy()
        values["env_seed"] = self._env_seeds.astype(np.int64)
        values["episode_index"] = self._episodes.copy()
        told = {name: self._out(value) for name, value in values.items()}
        return told | {f"_{name}": self._out(mask.copy()) for name in values}

    def _out(self, array: NDArray[Any]) -> Any:
        """An array as it goes out."""
        if not (self._tensors and isinstance(self.simulators, DeviceSimulators)):
            return array
        return torch.as_tensor(array, device=self.simulators.batch.device)

    def _check_actions(self, actions: Any) -> Any:
        """Actions [N, A] as float32; clipping to the action space is left to the simulator."""
        if self._tensors and isinstance(actions, torch.Tensor):
            array: Any = actions.float()
            finite = bool(torch.isfinite(array).all())
        else:
            array = np.asarray(actions, np.float32)
            finite = bool(np.isfinite(array).all())
        if tuple(array.shape) != self.action_space.shape:
            raise DataError(
                f"actions must have shape {list(self.action_space.shape or ())}, not {list(array.shape)}"
            )
        if not finite:
            raise DataError("actions must be finite numbers")
        return array

    def _check_begun(self) -> None:
        if self._episodes.min() < 0:
            raise DataError("the environment has not been reset yet: call reset() first")


def _simulators(cfg: ManiSkillConfig, num_envs: int) -> SimulatorPool | DeviceSimulators:
    """Processes on a CPU, one batch on a GPU."""
    cuda = torch.cuda.is_available()
    if cfg.sim_backend == "gpu" and not cuda:
        raise ConfigError("sim_backend: gpu needs a CUDA device, and there is none: use auto or cpu")
    if cfg.sim_backend == "cpu" or not cuda:
        return SimulatorPool(cfg, num_envs)
    return DeviceSimulators(cfg, num_envs, "gpu")


def _fetched(tensor: torch.Tensor) -> FloatArray:
    """A copy as float32."""
    array: FloatArray = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
    return array
