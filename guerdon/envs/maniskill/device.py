"""ManiSkill's own batch, all environments on one device, behind the interface of `SimulatorPool`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.envs.maniskill.batch import ManiSkillBatch


class DeviceSimulators:
    """N environments in this process; nothing is ever lost."""

    def __init__(self, cfg: ManiSkillConfig, num_envs: int, backend: str) -> None:
        self.batch = ManiSkillBatch(cfg, num_envs, backend)
        self.facts = self.batch.facts
        self.lost: BoolArray = np.zeros(num_envs, np.bool_)

    def step(self, actions: FloatArray | torch.Tensor) -> None:
        """Take one action in each environment, float32 [N, A]."""
        with torch.no_grad():
            self.batch.step(torch.as_tensor(actions, device=self.batch.device))

    def reset(self, env_ids: IntArray, seeds: Sequence[int], *, keep_final: bool) -> None:
        """Start new episodes in `env_ids`."""
        with torch.no_grad():
            self.batch.reset(env_ids.tolist(), seeds, keep_final=keep_final)

    def read(self, name: str) -> FloatArray:
        """A copy of `state` [N, S], `env_reward` [N] or `goal_in_picture` [N, 2] of the batch, float32."""
        return _fetch(getattr(self.batch, name))

    def info(self, name: str) -> FloatArray:
        """One of the infos, float32 [N]."""
        return _fetch(self.batch.infos[name])

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what was before each of the last `num_steps` steps."""
        self.batch.keep_past(num_steps)

    def render_tensor(
        self, env_ids: IntArray, final: BoolArray, size: tuple[int, int] | None, steps_back: IntArray
    ) -> torch.Tensor:
        """Frames uint8 [n, H, W, 3] on the device; arguments as for `SimulatorPool.render`."""
        with torch.no_grad():
            frames = self.batch.render(size)[torch.as_tensor(env_ids, device=self.batch.device)]
            earlier = [(final, self.batch.render(size, final=True))] if final.any() else []
            for number in np.unique(steps_back[steps_back > 0]).tolist():
                earlier.append((steps_back == number, self.batch.render(size, steps_back=number)))
            for which, old in earlier:
                places = torch.as_tensor(np.flatnonzero(which), device=frames.device)
                frames[places] = old[torch.as_tensor(env_ids[which], device=frames.device)]
            return frames

    def render(
        self, env_ids: IntArray, final: BoolArray, size: tuple[int, int] | None, steps_back: IntArray
    ) -> UInt8Array:
        """The same as an array."""
        frames: UInt8Array = self.render_tensor(env_ids, final, size, steps_back).cpu().numpy()
        return frames

    def close(self) -> None:
        """Free the simulation."""
        self.batch.close()


def _fetch(tensor: torch.Tensor) -> FloatArray:
    """A copy as float32."""
    array: FloatArray = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
    return array
