"""ManiSkill tasks as vector environments, with the conventions of the embedded `guerdon/Tabletop-v0`.

On a CPU the environments live in some simulator processes and their states in shared memory; a frame is
rendered when somebody asks for it, by the process that owns the scene, and nowhere else. On a GPU it is
ManiSkill's own batch. Episodes are the same in both cases (`EpisodeVectorEnv`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from guerdon.config import EnvConfig
from guerdon.config.maniskill import MAIN_CAMERA, ManiSkillConfig
from guerdon.core.errors import ConfigError, DataError, unknown_name
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array, with_control_mode
from guerdon.envs.maniskill.batch import ManiSkillBatch, TaskFacts
from guerdon.envs.maniskill.pool import SimulatorPool
from guerdon.envs.vector import (
    EnvIds,
    EpisodeVectorEnv,
    Info,
    Observation,
    check_image_size,
    check_steps_back,
)


class ManiSkillVectorEnv(EpisodeVectorEnv):
    """N environments of a ManiSkill task.

    Environment i, seeded with s + i, plays the same episodes whatever the number of processes (on a GPU the
    batch is seeded as a whole). If a simulator process is lost, the episodes of its environments end there as
    truncated, with `episode_lost` in their infos, and new ones begin.

    Args:
        num_envs: N.
        config: settings; without it `settings`, fields of `ManiSkillConfig`, are given by keyword.
        autoreset_mode: as for `EpisodeVectorEnv`.
        simulators: what to simulate with; None: as the settings say.
        **settings: see `config`.
    """

    config: ManiSkillConfig

    def __init__(
        self,
        num_envs: int = 1,
        *,
        config: ManiSkillConfig | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        simulators: SimulatorPool | ManiSkillBatch | None = None,
        **settings: Any,
    ) -> None:
        config = ManiSkillConfig.from_settings(settings) if config is None else config
        super().__init__(num_envs, config, autoreset_mode, config.render_mode)
        self.simulators = simulators or _start_simulators(config, self.num_envs)
        self.facts: TaskFacts = self.simulators.facts
        self.max_episode_steps = config.max_episode_steps or self.facts.max_episode_steps
        self.spec = EnvSpec(
            config.id,
            entry_point="guerdon.envs.maniskill.env:ManiSkillVectorEnv",
            max_episode_steps=self.max_episode_steps,
        )
        self._set_spaces(
            self._observation_space(),
            spaces.Box(self.facts.action_low, self.facts.action_high, dtype=np.float32),
        )
        self._device: ManiSkillBatch | None = None
        """The batch whose tensors are handed out; None: arrays are."""
        if isinstance(self.simulators, ManiSkillBatch) and config.output == "torch":
            self._device = self.simulators
        self._lost: BoolArray = np.zeros(self.num_envs, np.bool_)
        """Whose simulator process the last step lost."""
        self._has_final: BoolArray = np.zeros(self.num_envs, np.bool_)
        """Where the end of the last episode can still be shown: `_restarted`, but not lost."""
        self._final_state: Any = None
        self._final_goal: FloatArray = np.zeros((self.num_envs, 2), np.float32)
        self._num_past = 0

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

    def render_frames(
        self,
        camera: str = MAIN_CAMERA,
        env_ids: EnvIds | None = None,
        *,
        size: tuple[int, int] | None = None,
        final: bool = False,
    ) -> UInt8Array:
        """Images of some environments, rendered now and only for them; see `EpisodeVectorEnv`."""
        frames: UInt8Array = self.render_tensor(camera, env_ids, size=size, final=final).cpu().numpy()
        return frames

    def render_tensor(
        self,
        camera: str = MAIN_CAMERA,
        env_ids: EnvIds | None = None,
        *,
        size: tuple[int, int] | None = None,
        final: bool = False,
    ) -> torch.Tensor:
        """The same as a tensor on the device of the simulation."""
        ids = self._check_view(camera, env_ids)
        shape = None if size is None else check_image_size(size)
        return self.simulators.render_envs(ids, self._has_final[ids] & final, shape, np.zeros_like(ids))

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what the last `num_steps` steps before the latest one led to."""
        self._num_past = num_steps
        self.simulators.keep_past(num_steps)

    def render_past(self, camera: str, env_ids: EnvIds, steps_back: EnvIds) -> UInt8Array:
        """Images of what earlier actions led to; see `TabletopVectorEnv`. Lost episodes show what is now."""
        ids, back = self._check_view(camera, env_ids), check_steps_back(steps_back, self._num_past)
        frames = self.simulators.render_envs(ids, np.zeros(len(ids), np.bool_), None, back)
        past: UInt8Array = frames.cpu().numpy()
        return past

    def _check_view(self, camera: str, env_ids: EnvIds | None) -> IntArray:
        _check_camera(camera)
        if not self.config.shows_images:
            raise ConfigError(f"{self.config.id} has no frames: set init_params.render_mode to rgb_array")
        self._check_reset()
        return self._check_env_ids(env_ids)

    def goal_in_picture(self, camera: str, env_ids: EnvIds) -> FloatArray:
        """Where the goal of the last action's episode appears: row and column as shares, float32 [n, 2]."""
        _check_camera(camera)
        places = np.where(self._has_final[:, None], self._final_goal, self.simulators.read("goal_in_picture"))
        places = places[self._check_env_ids(env_ids)]
        if np.isnan(places).any():
            raise ConfigError(
                f"{self.config.id} does not tell where its goal is in the picture: give a region instead, "
                "reward.model.crop=[top,left,height,width]"
            )
        return places

    def state(self) -> FloatArray:
        """The present state vectors, float32 [N, S], in every observation mode."""
        return self.simulators.read("state")

    def final_state(self) -> FloatArray:
        """The states that the last action led to, float32 [N, S]."""
        state = self.state()
        if self._restarted.any():
            state[self._restarted] = np.asarray(torch.as_tensor(self._final_state).cpu())[self._restarted]
        return state

    def close_extras(self, **kwargs: Any) -> None:
        """End the simulators."""
        self.simulators.close()

    # The simulation

    def _check_actions(self, actions: Any) -> Any:
        """Actions [N, A] as float32; clipping to the action space is left to the simulator."""
        keep = self._device is not None and isinstance(actions, torch.Tensor)
        array: Any = actions.float() if keep else np.asarray(actions, np.float32)
        if tuple(array.shape) != self.action_space.shape:
            raise DataError(
                f"actions must have shape {list(self.action_space.shape or ())}, not {list(array.shape)}"
            )
        if not bool((torch if keep else np).isfinite(array).all()):
            raise DataError("actions must be finite numbers")
        return array

    def _advance(self, actions: Any) -> None:
        self._has_final = self._restarted
        self.simulators.step(actions)

    def _evaluate(self) -> tuple[FloatArray, BoolArray]:
        self._lost = self.simulators.lost.copy()
        env_reward = self.simulators.read("env_reward")
        env_reward[self._lost] = 0.0
        terminated = np.zeros(self.num_envs, np.bool_)
        if self.config.terminate_on_success:
            terminated = (self.simulators.read("info/success") >= 0.5) & ~self._lost
        return env_reward, terminated

    def _truncated(self) -> BoolArray:
        return super()._truncated() | self._lost

    def _start_worlds(self, ids: IntArray, *, keep_final: bool) -> None:
        if keep_final:
            self._final_state = self._present_state()
            self._final_goal = self.simulators.read("goal_in_picture")
            self._has_final = self._restarted & ~self._lost  # of what was lost there is no end to show
        else:
            self._has_final = self._has_final & self._restarted
        self._lost[ids] = False
        self.simulators.reset(ids, self.episode_seeds()[ids].tolist(), keep_final=keep_final)

    def _observe(self, ids: IntArray | None = None) -> Observation:
        state = self._present_state()
        if self.config.obs_mode == "state":
            return state
        frames: Any = self.render_tensor(MAIN_CAMERA, ids)
        if ids is not None:
            some = frames
            frames = some.new_zeros((self.num_envs, *some.shape[1:]))
            frames[ids] = some
        if self._device is None:
            frames = frames.cpu().numpy()
        own = state if self.config.obs_mode == "state+rgb" else state[:, self.facts.own_state]
        return {"state": own, MAIN_CAMERA: frames}

    def _task_infos(self) -> dict[str, NDArray[Any]]:
        values: dict[str, NDArray[Any]] = {
            name: self.simulators.read(f"info/{name}") for name in self.facts.info_names
        }
        for name in self.facts.flags:
            values[name] = (values[name] >= 0.5) & ~self._lost
        values["episode_lost"] = self._lost.copy()
        return values

    def _observation_space(self) -> spaces.Space[Any]:
        """The space of one environment's observations."""
        size = self.facts.state_size if self.config.obs_mode != "rgb" else len(self.facts.own_state)
        state = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        if self.config.obs_mode == "state":
            return state
        image = spaces.Box(0, 255, (*self.config.image_size, 3), np.uint8)
        return spaces.Dict({"state": state, MAIN_CAMERA: image})

    def _present_state(self) -> Any:
        """The states in the form in which they are handed out: an array, or a tensor on the device."""
        return self.state() if self._device is None else self._device.values["state"].clone()

    def _infos(self, mask: BoolArray) -> Info:
        return {name: self._out(value) for name, value in super()._infos(mask).items()}

    def _out(self, array: NDArray[Any]) -> Any:
        return array if self._device is None else torch.as_tensor(array, device=self._device.device)


def make_env(cfg: EnvConfig, *, autoreset_mode: AutoresetMode, **_: Any) -> ManiSkillVectorEnv:
    """A ManiSkill task; its name may stand in `init_params` too, as ManiSkill's own `gym.make` has it."""
    settings: dict[str, Any] = {"id": cfg.id, **cfg.init_params}
    if cfg.max_episode_steps is not None:
        settings["max_episode_steps"] = cfg.max_episode_steps
    config = ManiSkillConfig.from_settings(settings)
    return ManiSkillVectorEnv(cfg.num_envs, config=config, autoreset_mode=autoreset_mode)


def _check_camera(camera: str) -> None:
    if camera != MAIN_CAMERA:
        raise ConfigError(unknown_name("camera", camera, [MAIN_CAMERA]))


def _start_simulators(cfg: ManiSkillConfig, num_envs: int) -> SimulatorPool | ManiSkillBatch:
    """Processes on a CPU, one batch on a GPU."""
    cuda = torch.cuda.is_available()
    if cfg.sim_backend == "gpu" and not cuda:
        raise ConfigError("sim_backend: gpu needs a CUDA device, and there is none: use auto or cpu")
    if cfg.sim_backend == "cpu" or not cuda:
        return SimulatorPool(cfg, num_envs)
    return ManiSkillBatch(cfg, num_envs, "gpu")
