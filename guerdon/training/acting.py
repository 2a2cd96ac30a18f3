"""`RolloutWorker`: the policy as env workers use it, in their own process or in another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import gymnasium as gym
import torch
from numpy.typing import NDArray

from guerdon.agents.agent import AnyAgent, OnPolicyAgent
from guerdon.agents.networks import to_obs
from guerdon.agents.policies import Share
from guerdon.agents.registry import make_agent
from guerdon.agents.rollout import RolloutPolicy
from guerdon.config import LearnerConfig
from guerdon.distributed.engine import Handle


class RolloutPolicyWorker(RolloutPolicy, Protocol):
    """What an env worker asks of a policy."""

    def sync(self, version: int, weights: dict[str, Any] | None) -> None:
        """From now on act with these weights."""

    def generator_state(self) -> NDArray[Any] | None:
        """Where the random numbers are; None if they are the learner's own."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """How to make a copy of the policy; its weights come later."""

    cfg: LearnerConfig
    spaces: tuple[gym.Space[Any], gym.Space[Any]]

    def make(self) -> AnyAgent:
        """A copy, on a GPU only if the learner is on one and there is one here, under whatever number."""
        device = torch.device(self.cfg.device).type if torch.cuda.is_available() else "cpu"
        return make_agent(replace(self.cfg, device=device), *self.spaces, seed=0, only_acts=True)


class RolloutWorker:
    """Chooses actions with the weights it was given last."""

    def __init__(self, learner: OnPolicyAgent, share: Share | None = None) -> None:
        """Act with `learner`: the run's own (weights are then never given), or a copy.

        Args:
            learner: the policy.
            share: which of all environments it acts in; None: all, with the learner's own random numbers.
        """
        self.learner, self.share, self.version = learner, share, 0
        self._served: dict[Share, torch.Generator] = {}

    def sync(self, version: int, weights: dict[str, Any] | None = None) -> None:
        """Take the actor's weights; in one process they are the same, and the version is noted."""
        self.version, self._served = version, {}
        if weights is not None:
            self.learner.load_policy(weights)

    def step(self, obs: Any) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions for the environments, and as the learner needs them: actions, log-probabilities, values."""
        return self.learner.step(obs, self.share)

    def values(self, obs: Any) -> torch.Tensor:
        """Values of observations, [N]."""
        return self.learner.values(obs)

    def generator_state(self) -> NDArray[Any] | None:
        """None for the learner itself."""
        return None if self.share is None else self.learner.generator_state()

    # For env workers in other processes

    def serve_step(self, obs: Any, share: Share) -> tuple[NDArray[Any], ...]:
        """`step` in arrays, for the environments of `share`."""
        if share not in self._served:
            self._served[share] = torch.Generator().set_state(torch.tensor(self.learner.generator_state()))
        env_actions, *tensors = self.learner.step(obs, share, self._served[share])
        return (env_actions, *(item.cpu().numpy() for item in tensors))

    def serve_values(self, obs: Any) -> NDArray[Any]:
        """`values` in an array."""
        return self.learner.values(obs).cpu().numpy()

    def serve_generator(self, share: Share) -> NDArray[Any]:
        """Where the random numbers of `share` are."""
        generator = self._served.get(share)
        return self.learner.generator_state() if generator is None else generator.get_state().numpy()


def make_rollout_worker(spec: PolicySpec) -> RolloutWorker:
    """A rollout worker in a process of its own."""
    learner = spec.make()
    assert learner.on_policy  # the others play chunks
    return RolloutWorker(learner)


class DistantPolicy:
    """A rollout worker in another process, as an env worker sees it."""

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
