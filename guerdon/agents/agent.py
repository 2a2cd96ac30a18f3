"""The interface of an agent: what acts, learns, is copied and is saved, whatever its algorithm.

`guerdon/training/` knows the classes here and no other: an `OnPolicyAgent` plays rollouts and learns from
them, an `OffPolicyAgent` learns from a replay buffer. `registry.py` lists the agents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import gymnasium as gym
import torch
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.networks import ObsSpec
from guerdon.agents.policies import Share
from guerdon.config import BCConfig, LearnerConfig, NetworkConfig, OffPolicyConfig, PriorConfig
from guerdon.core.batches import Rollout, TrainBatch
from guerdon.core.errors import ConfigError


class Agent(ABC):
    """What all agents can do. Everything random comes from generators of their own, which are saved."""

    name: ClassVar[str]
    """In `AGENTS` or of the plugin, as `learner.algorithm`."""
    section: ClassVar[str]
    """Of its settings: `learner.<section>`. An agent of a plugin has that of the agent it derives from."""
    action_spaces: ClassVar[tuple[type[gym.Space[Any]], ...]]
    """Which kinds of actions it takes."""
    cfg: Any
    """Its section of the settings."""
    device: torch.device

    @abstractmethod
    def __init__(
        self,
        spec: ObsSpec,
        action_space: Any,
        cfg: Any,
        network: NetworkConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the networks.

        Args:
            spec: what an observation holds.
            action_space: of a single environment.
            cfg: the agent's section, `learner.<name>`.
            network: the `learner.network` section.
            seed: of the first weights and of everything that is drawn later.
            device: where the networks are.
        """

    @classmethod
    def settings(cls, learner: LearnerConfig) -> Any:
        """Its section of the settings; a plugin may make one of its own from `learner.settings`."""
        return getattr(learner, cls.section)

    @classmethod
    def acting_settings(cls, cfg: Any) -> Any:
        """Settings of a copy that only acts: without networks that only learning needs."""
        return cfg

    @abstractmethod
    def act(self, obs: Any, deterministic: bool = False, *, progress: float = 1.0) -> NDArray[Any]:
        """Actions for N observations as the environments give them: float32 [N, A], or int64 [N].

        Args:
            obs: states or a mapping, [N, ...].
            deterministic: the best action that is known, without exploration.
            progress: share of the run that is over, 0 to 1; exploration may follow from it.
        """

    # Cloning

    def clone(self, data: tuple[Mapping[str, Tensor], Tensor], cfg: BCConfig, seed: int) -> dict[str, float]:
        """Fit the policy to demonstrations before it learns; see `cloning.clone`.

        Args:
            data: observations [M, ...] and the actions chosen in them, float32 [M, A].
            cfg: the `learner.warm_start` section.
            seed: decides the order of the minibatches.

        Returns:
            `loss_first`, `loss_last`, `num_transitions`, `num_updates`.
        """
        raise ConfigError(f"learner.warm_start is for ppo, sac and td3: {self.name} cannot clone actions")

    def check_reference(self) -> None:  # noqa: B027 - most agents need none
        """Raise if the settings pull the policy towards a cloned one that there is not."""

    # Copies of the policy elsewhere

    @abstractmethod
    def policy_state(self) -> dict[str, Any]:
        """What a copy needs to act as this agent would now, as arrays of their own."""

    @abstractmethod
    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Act as the agent did when `policy_state` was taken."""

    # Saving

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that later updates and actions depend on, as a copy."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the same actions and updates follow. `DataError` if it does not fit."""


class OnPolicyAgent(Agent):
    """An agent that learns from rollouts of its present weights."""

    on_policy: Literal[True] = True

    @abstractmethod
    def step(
        self, obs: Any, share: Share | None = None, generator: torch.Generator | None = None
    ) -> tuple[NDArray[Any], Tensor, Tensor, Tensor]:
        """Draw actions for N observations.

        Args:
            obs: of N environments.
            share: which rows of a larger batch they are; None: they are the whole of it.
            generator: what to draw from; None: the agent's own.

        Returns:
            Actions as the environments take them; actions as drawn [N, ...], their log-probabilities [N] and
            the values of the observations [N], as inference tensors: autograd needs copies of them.
        """

    @abstractmethod
    def values(self, obs: Any) -> Tensor:
        """Values of N observations, float32 [N]."""

    @abstractmethod
    def log_probs(self, obs: Any, actions: Tensor) -> Tensor:
        """How likely actions are in N observations, float32 [N]."""

    @abstractmethod
    def advantages(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Advantages and returns from the rollout's training rewards, float32 [T, N] each."""

    @abstractmethod
    def update(self, rollout: Rollout, progress: float = 0.0) -> dict[str, float]:
        """Learn from a rollout of this policy; returns means over all gradient steps, for the log.

        Args:
            rollout: of this policy as it is.
            progress: share of the run that is over, 0 to 1.
        """

    @abstractmethod
    def generator_state(self) -> NDArray[Any]:
        """Where the random numbers of acting are, uint8."""

    @abstractmethod
    def set_generator(self, state: NDArray[Any]) -> None:
        """Go on drawing where another copy stopped."""


class OffPolicyAgent(Agent):
    """An agent that learns from batches of a replay buffer."""

    on_policy: Literal[False] = False
    cfg: OffPolicyConfig
    num_updates: int = 0
    """Updates so far."""
    prior: PriorConfig | None = None
    """Settings of demonstrations that are sampled beside the buffer; None: it does not take any."""
    num_n_steps: int = 1
    """Rewards that are summed before bootstrapping."""
    num_first_updates: int = 0
    """Updates that are done at once when learning starts."""

    @abstractmethod
    def targets(self, batch: TrainBatch) -> Tensor:
        """What the values regress on, float32 [B]; may draw random numbers."""

    @abstractmethod
    def update(self, batch: TrainBatch, prior_rows: int = 0) -> dict[str, float]:
        """One gradient step of everything whose turn it is; returns losses for the log.

        Args:
            batch: on which to learn, B rows.
            prior_rows: how many of its first rows are demonstrations.
        """

    @abstractmethod
    def seed_acting(self, seed: int) -> None:
        """Begin a new sequence of random numbers for acting."""


AnyAgent: TypeAlias = OnPolicyAgent | OffPolicyAgent
"""Type checkers tell the two apart by `on_policy`."""
