"""The policy of env workers where it is not the learner's own: a copy, or a worker in another process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.agents.agent import AnyAgent
from guerdon.agents.networks import Obs, to_obs
from guerdon.agents.policies import Share
from guerdon.agents.registry import make_agent
from guerdon.config import LearnerConfig
from guerdon.core.devices import device_here
from guerdon.distributed.engine import Handle


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """How to make a copy of the policy; its weights come later."""

    cfg: LearnerConfig
    spaces: tuple[gym.Space[Any], gym.Space[Any]]

    def make(self) -> AnyAgent:
        """A copy, on a GPU only if the learner is on one and there is one here, under whatever number."""
        cfg = replace(self.cfg, device=device_here(self.cfg.device))
        return make_agent(cfg, *self.spaces, seed=0, only_acts=True)


class RolloutPolicy(Protocol):
    """What a collector asks of a policy."""

    def step(self, obs: Obs) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> actions for the environments, actions as chosen, log-probabilities [N], values [N]."""

    def values(self, obs: Obs) -> torch.Tensor:
        """-> float32 [N]."""


class PolicyCopy:
    """Chooses actions with the weights it was given last.

    Args:
        agent: the copy.
        share: which of all environments it acts in; None: it serves several env workers, each with its own.
    """

    def __init__(self, agent: Any, share: Share | None = None) -> None:
        self.agent, self.share, self.version = agent, share, -1
        self._served: dict[Share, torch.Generator] = {}

    def sync(self, version: int, weights: dict[str, Any] | None) -> None:
        """From now on act with these weights; None if they have not changed."""
        self._served = {}
        if weights is not None:
            self.agent.load_policy(weights)
            self.version = version
        if self.version != version:
            raise RuntimeError(f"asked to act with version {version}, but the weights are of {self.version}")

    def step(self, obs: Any) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions for the environments, and as the learner needs them: actions, log-probabilities, values."""
        answer: tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]
        answer = self.agent.step(obs, self.share)
        return answer

    def values(self, obs: Any) -> torch.Tensor:
        """Values of observations, [N]."""
        values: torch.Tensor = self.agent.values(obs)
        return values

    def generator_state(self) -> NDArray[Any]:
        """Where the random numbers are."""
        state: NDArray[Any] = self.agent.generator_state()
        return state

    # For env workers in other processes

    def serve_step(self, obs: Any, share: Share) -> tuple[NDArray[Any], ...]:
        """`step` in arrays, for the environments of `share`."""
        if share not in self._served:
            self._served[share] = torch.Generator().set_state(torch.tensor(self.agent.generator_state()))
        env_actions, *tensors = self.agent.step(obs, share, self._served[share])
        return (env_actions, *(item.cpu().numpy() for item in tensors))

    def serve_values(self, obs: Any) -> NDArray[Any]:
        """`values` in an array."""
        return self.values(obs).cpu().numpy()

    def serve_generator(self, share: Share) -> NDArray[Any]:
        """Where the random numbers of `share` are."""
        generator = self._served.get(share)
        return self.generator_state() if generator is None else generator.get_state().numpy()


def make_rollout_worker(spec: PolicySpec) -> PolicyCopy:
    """A policy in a process of its own, which serves env workers."""
    return PolicyCopy(spec.make())


class DistantPolicy:
    """A policy in another process, as an env worker sees it."""

    def __init__(self, worker: Handle, share: Share) -> None:
        self._worker, self._share = worker, share

    def sync(self, version: int, weights: dict[str, Any] | None) -> None:
        """Nothing: the runner gives the weights to the rollout worker itself."""

    def step(self, obs: Any) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ask for actions."""
        answer = self._worker.call("serve_step", _as_arrays(obs), self._share)
        actions, log_probs, values = (torch.tensor(item) for item in answer[1:])
        return answer[0], actions, log_probs, values

    def values(self, obs: Any) -> torch.Tensor:
        """Ask for values."""
        return torch.tensor(self._worker.call("serve_values", _as_arrays(obs)))

    def generator_state(self) -> NDArray[Any]:
        """Ask where its random numbers are."""
        state: NDArray[Any] = self._worker.call("serve_generator", self._share)
        return state


def _as_arrays(obs: Any) -> dict[str, NDArray[Any]]:
    return {name: part.numpy() for name, part in to_obs(obs).items()}


def random_actions(space: gym.Space[Any], count: int, rng: np.random.Generator) -> NDArray[Any]:
    """Uniform over the action space, [count, ...]."""
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(int(space.n), size=count) + int(space.start)
    assert isinstance(space, gym.spaces.Box)
    return rng.uniform(space.low, space.high, (count, *space.shape)).astype(np.float32)
