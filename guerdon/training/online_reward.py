"""`OnlineReward`: a reward model of the zoo inside a run. It sees the policy's steps, learns, and scores.

The model lives with the learner. Env workers may be anywhere: what they send is all it needs. Its rewards
join those of the image model, if there is one, and are mixed with the env's in `rewards/relabel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import torch
from numpy.typing import NDArray

from guerdon.agents.agent import AnyAgent
from guerdon.agents.networks import STATE
from guerdon.config import RewardConfig
from guerdon.core.errors import ConfigError
from guerdon.core.progress import Notes
from guerdon.core.steps import RunningEpisodes, StepBatch
from guerdon.core.types import FloatArray
from guerdon.monitoring.reward_path import check_learned_rewards
from guerdon.rewards import create_reward_model
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.relabel import ModelRewards
from guerdon.rewards.zoo.base import ZooModel
from guerdon.rewards.zoo.drex import DREX

OWN_KEYS = {
    "weight": 1.0,
    "cooptrain": None,
    "pretrain": None,
    "expert": None,
    "expert_episodes": 10,
    "expert_noise": None,
}
"""Keys of the section that are not the model's, with their defaults."""


class OnlineReward(ModelRewards):
    """A reward model that learns beside the policy; `ModelRewards` is what it does in an iteration.

    Attributes:
        model: the reward model.
        weight: `reward_model.weight`; its rewards are multiplied by it.
        cooptrain: `reward_model.cooptrain`; whether it learns while the policy does. By default it does if it
            learns from the policy's steps at all.
        pretrains: `reward_model.pretrain`; whether it learns before the policy does. By default it does if it
            needs nothing of the policy.
    """

    def __init__(
        self,
        section: Mapping[str, Any],
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        agent: AnyAgent,
        *,
        seed: int,
        device: str,
        reward_mode: Literal["per_step", "terminal"] = "per_step",
        model: BaseRewardModel | None = None,
        env: Any = None,
        gives_env_rewards: bool = False,
    ) -> None:
        """Make the model that `section.type` names; what does not work in a run is refused here.

        Args:
            section: `reward_model`.
            spaces: of observations and actions.
            agent: that is trained.
            seed: of the model, unless `section` has one.
            device: where the model's networks are.
            reward_mode: `reward.reward_mode`.
            model: that is there already; None makes the one of `section`.
            env: the vector environments, where they are in this process.
            gives_env_rewards: the environment's rewards stand in for the model's (`reward.control: env`).
        """
        super().__init__()
        self.gives_env_rewards = gives_env_rewards
        own = {key: section.get(key, default) for key, default in OWN_KEYS.items()}
        given = {key: value for key, value in section.items() if key not in OWN_KEYS}
        self.notes = Notes()
        if model is None:
            shapes = {**space_shapes(*spaces), "seed": seed}
            model = create_reward_model({**shapes, **given}, device, self.notes)
        self.model = model
        self.expert = {key: own[key] for key in own if key.startswith("expert")}
        self.weight = float(own["weight"])
        needs_experience = bool(getattr(model, "needs_experience", True))
        self.cooptrain = needs_experience if own["cooptrain"] is None else bool(own["cooptrain"])
        self.pretrains = not needs_experience if own["pretrain"] is None else bool(own["pretrain"])
        self._needs_experience = needs_experience
        self.reward_mode = reward_mode
        self.action_space = spaces[1]
        self._running: dict[Hashable, RunningEpisodes] = {}
        self._refuse(agent, env)
        if isinstance(model, ZooModel):
            if env is not None:
                model.bind_env(env)
            if agent.on_policy and isinstance(spaces[0], gym.spaces.Box):
                model.policy_log_probs = lambda obs, actions: agent.log_probs({STATE: obs}, actions)

    def _refuse(self, agent: AnyAgent, env: Any) -> None:
        model, name = self.model, type(self.model).__name__
        if not isinstance(model, ZooModel):
            return
        if model.augments and agent.on_policy:
            raise ConfigError(
                f"{name} adds transitions that no policy played: use an off-policy agent such as dqn or sac, "
                f"not {agent.name}"
            )
        if (model.augments or isinstance(model, DREX)) and env is None:
            raise ConfigError(f"{name} asks the environments itself: it needs engine=local, synchronously")
        if model.obs_key is not None:
            raise ConfigError(f"{name} looks at frames: use reward.use_reward_model and reward.model")
        if not agent.on_policy and agent.num_n_steps != 1:
            raise ConfigError(f"{name} scores single steps: learner.{agent.name}.num_n_steps must be 1")

    @property
    def history_dependent(self) -> bool:
        """Whether rewards depend on the episode so far; steps are then scored once, as they come."""
        return bool(self.model.history_dependent)

    @property
    def augments(self) -> bool:
        """Whether it makes further transitions of finished episodes, for the replay buffer."""
        return bool(getattr(self.model, "augments", False))

    def pretrain(self, collect: Callable[[], Sequence[StepBatch]]) -> dict[str, float]:
        """Learn before the policy does, if that is asked for; `collect` gives first steps to learn from."""
        if not self.pretrains:
            return {}
        for part in collect() if self._needs_experience else ():
            self.model.collect_steps(part)
        learned = self.model.pretrain()
        self.model.clear_data(self._iteration)
        return self.notes.named(learned)

    def reset(self, stream: Hashable | None = None) -> None:
        """The episodes of a stream of environments start again; None: those of all."""
        if stream is None:
            self._states.clear()
            self._running.clear()
        self._states.pop(stream, None)
        self._running.pop(stream, None)

    def augment(self, steps: StepBatch, stream: Hashable) -> StepBatch | None:
        """Further transitions [M] that the model makes of the episodes which end with these steps [T, N]."""
        if not isinstance(self.model, ZooModel) or not self.augments:
            return None
        finished = self._running.setdefault(stream, RunningEpisodes(steps.shape[1])).add(steps)
        return self.model.augment(finished).to("cpu") if finished else None

    def check_path(
        self,
        relabel: Callable[[FloatArray], NDArray[Any]],
        objective: Callable[[], NDArray[Any]],
        shape: tuple[int, ...],
        cfg: RewardConfig,
        env_steps: int,
    ) -> bool:
        """Does what the model says reach what the policy is trained on? Returns whether that was checked.

        See `check_learned_rewards`; there is nothing to check while the reward has no weight.
        """
        weight = cfg.weight_at(env_steps) if cfg.combine_mode == "weighted" else 1.0
        if not weight and cfg.reward_weight_end and cfg.control == "none":
            return False  # it gets a weight on the way
        weight = weight if self.weight else 0.0
        check_learned_rewards(relabel, objective, shape, weight, cfg.control)
        return True

    def env_actions(self, actions: torch.Tensor) -> torch.Tensor:
        """The inverse of `model_actions` for discrete ones: as the environments count them."""
        space = self.action_space
        return actions + int(space.start) if isinstance(space, gym.spaces.Discrete) else actions

    # State

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs; running episodes start again."""
        return {"model": self.model.state_dict(), "iteration": self._iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.model.load_state_dict(state["model"])
        self._iteration = int(state["iteration"])
        self.reset()


def space_shapes(space: gym.Space[Any], actions: gym.Space[Any]) -> dict[str, Any]:
    """What a reward model has to know of the environments; beside cameras it gets the state."""
    if isinstance(space, gym.spaces.Dict) and STATE in space.spaces:
        space = space[STATE]
    if not isinstance(space, gym.spaces.Box):
        raise ConfigError(
            f"reward models of the zoo take observations that are vectors, or dicts with a vector `{STATE}` "
            f"and cameras, not {space}"
        )
    if isinstance(actions, gym.spaces.Discrete):
        return {"obs_shape": list(space.shape), "action_size": int(actions.n), "discrete_actions": True}
    assert isinstance(actions, gym.spaces.Box)
    size = int(actions.shape[0])
    return {"obs_shape": list(space.shape), "action_size": size, "discrete_actions": False}


def load_online(online: OnlineReward | None, state: Mapping[str, Any]) -> None:
    """Go on with the reward model of a saved loop; raises if one side has none."""
    saved = state.get("online")
    if (online is None) != (saved is None):
        kinds = ("no reward model of the zoo", "one")
        has, wants = (kinds[saved is not None], kinds[online is not None])
        raise ConfigError(f"the saved run has {has}, and the config's `reward_model` asks for {wants}")
    if online is not None and saved is not None:
        online.load_state_dict(saved)
