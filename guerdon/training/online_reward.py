"""`OnlineReward`: a reward model of the zoo inside a run. It sees the policy's steps, learns, and scores.

The model lives with the learner. Env workers may be anywhere: what they send is all it needs. Its rewards
join those of the image model, if there is one, and are mixed with the env's in `rewards/relabel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.agents.agent import AnyAgent
from guerdon.agents.networks import STATE
from guerdon.config import RewardConfig
from guerdon.core.batches import ReplayBatch, Rollout, StepChunk
from guerdon.core.errors import ConfigError
from guerdon.core.types import FloatArray
from guerdon.monitoring.reward_path import check_learned_rewards
from guerdon.rewards import create_reward_model
from guerdon.rewards.model import BaseRewardModel, StreamState
from guerdon.rewards.relabel import learned_rewards
from guerdon.rewards.steps import StepBatch, to_items
from guerdon.rewards.zoo.base import ZooModel
from guerdon.rewards.zoo.drex import DREX
from guerdon.rewards.zoo.experience import RunningEpisodes

OWN_KEYS = {
    "weight": 1.0,
    "cooptrain": None,
    "pretrain": None,
    "expert": None,
    "expert_episodes": 10,
    "expert_noise": None,
}
"""Keys of the section that are not the model's, with their defaults."""


class Notes:
    """What a reward model has for a logger: scalars are noted and logged with the next line of metrics.

    Everything else goes to TensorBoard as it comes, or nowhere if nothing is written.
    """

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.board: Any = None

    def add_scalar(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a number; the latest one of a name counts."""
        self.scalars[name] = float(value)

    def pop(self) -> dict[str, float]:
        """What was noted since the last call."""
        noted, self.scalars = self.scalars, {}
        return noted

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add_") and name not in ("flush", "close"):
            raise AttributeError(name)
        return (lambda *args, **kwargs: None) if self.board is None else getattr(self.board, name)


class OnlineReward:
    """A reward model that learns beside the policy.

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
        self._gives_env_rewards = gives_env_rewards
        own = {key: section.get(key, default) for key, default in OWN_KEYS.items()}
        given = {key: value for key, value in section.items() if key not in OWN_KEYS}
        self.notes = Notes()
        if model is None:
            shapes = {**space_shapes(*spaces), "seed": seed}
            model = create_reward_model({**shapes, **given}, device, self.notes)
        self.model = model
        self.weight = float(own["weight"])
        needs_experience = bool(getattr(model, "needs_experience", True))
        self.cooptrain = needs_experience if own["cooptrain"] is None else bool(own["cooptrain"])
        self.pretrains = not needs_experience if own["pretrain"] is None else bool(own["pretrain"])
        self._needs_experience = needs_experience
        self.reward_mode = reward_mode
        self._space = spaces[1]
        self._states: dict[Hashable, StreamState] = {}
        self._running: dict[Hashable, RunningEpisodes] = {}
        self._iteration = 0
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
        if self._needs_experience:
            self._show(collect())
        learned = self.model.pretrain()
        self.model.clear_data(self._iteration)
        return _named(learned) | self.notes.pop()

    def reset(self, stream: Hashable | None = None) -> None:
        """The episodes of a stream of environments start again; None: those of all."""
        if stream is None:
            self._states.clear()
            self._running.clear()
        self._states.pop(stream, None)
        self._running.pop(stream, None)

    def learn(self, parts: Sequence[StepBatch]) -> dict[str, float]:
        """Learn from new steps of the policy, [T, N] each; returns what is to be logged."""
        if not self.cooptrain or not parts:
            return {}
        self._show(parts)
        learned = self.model.train()
        self.model.clear_data(self._iteration)
        self._iteration += 1
        return _named(learned) | self.notes.pop()

    def _show(self, parts: Sequence[StepBatch]) -> None:
        for part in parts:
            self.model.collect_data(part if isinstance(self.model, ZooModel) else to_items(part))

    def augment(self, steps: StepBatch, stream: Hashable) -> StepBatch | None:
        """Further transitions [M] that the model makes of the episodes which end with these steps [T, N]."""
        if not isinstance(self.model, ZooModel) or not self.augments:
            return None
        finished = self._running.setdefault(stream, RunningEpisodes(steps.shape[1])).add(steps)
        return self.model.augment(finished).to("cpu") if finished else None

    def rewards(self, steps: StepBatch) -> FloatArray:
        """Weighted rewards of steps [*L], float32, that depend on nothing but the step; changes nothing."""
        return self._mapped(self.model.score(steps), steps)

    def stream_rewards(self, steps: StepBatch, stream: Hashable) -> FloatArray:
        """Weighted rewards of the next steps [T, N] of a stream, float32; its history is carried on."""
        if not self.history_dependent:
            return self.rewards(steps)
        state = self._states.get(stream)
        if state is None:
            state = self.model.initial_state(steps.shape[1])
        scores, self._states[stream] = self.model.score_stream(steps, state)
        return self._mapped(scores, steps)

    def _mapped(self, scores: Any, steps: StepBatch) -> FloatArray:
        if self._gives_env_rewards:
            return np.array(steps.env_rewards.cpu().numpy(), np.float32)
        model = self.model
        mapping = replace(model.mapping, reward_mode=self.reward_mode)
        learned = learned_rewards(scores, steps.done.cpu().numpy(), mapping, model.threshold)
        return np.float32(self.weight) * learned

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

    # Steps of a run as the model sees them

    def of_rollout(self, rollout: Rollout) -> StepBatch:
        """A rollout whose collector kept `next_obs`, [T, N]."""
        assert rollout.next_obs is not None
        return StepBatch(
            obs=rollout.obs[STATE],
            actions=self._actions(rollout.actions),
            next_obs=rollout.next_obs,
            env_rewards=rollout.env_rewards,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            log_probs=rollout.log_probs,
        )

    def of_sample(self, batch: ReplayBatch) -> StepBatch:
        """A sample of single steps from a replay buffer, [B]."""
        return StepBatch(
            obs=batch.obs[STATE],
            actions=self._actions(batch.actions),
            next_obs=batch.next_obs[STATE],
            env_rewards=batch.env_rewards[:, 0],
            terminated=batch.terminated,
            truncated=batch.truncated,
        )

    def of_chunk(self, chunk: StepChunk) -> StepBatch:
        """Steps of an env worker, [K, n]."""
        next_obs = [_state(chunk.final_obs.get(t, chunk.obs_after(t))) for t in range(len(chunk))]
        return StepBatch(
            obs=_state(chunk.obs),
            actions=self._actions(torch.from_numpy(np.array(chunk.actions))),
            next_obs=torch.stack(next_obs),
            env_rewards=torch.from_numpy(np.array(chunk.env_rewards, np.float32)),
            terminated=torch.from_numpy(np.array(chunk.terminated)),
            truncated=torch.from_numpy(np.array(chunk.truncated)),
        )

    def _actions(self, actions: torch.Tensor) -> torch.Tensor:
        """As the environments took them: within their bounds, or counted from 0."""
        if isinstance(self._space, gym.spaces.Discrete):
            return actions - int(self._space.start)
        assert isinstance(self._space, gym.spaces.Box)
        return actions.clamp(torch.from_numpy(self._space.low), torch.from_numpy(self._space.high))

    def env_actions(self, actions: torch.Tensor) -> torch.Tensor:
        """The inverse of that for discrete actions: as the environments count them."""
        return actions + int(self._space.start) if isinstance(self._space, gym.spaces.Discrete) else actions

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


def _state(obs: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(obs[STATE] if isinstance(obs, Mapping) else obs, np.float32))


def _named(learned: Any) -> dict[str, float]:
    """What a model returned for the log, under names; plugins may return anything."""
    if not isinstance(learned, Mapping):
        return {}
    return {f"reward_model/{name}": float(value) for name, value in learned.items()}


def load_online(online: OnlineReward | None, state: Mapping[str, Any]) -> None:
    """Go on with the reward model of a saved loop; raises if one side has none."""
    saved = state.get("online")
    if (online is None) != (saved is None):
        kinds = ("no reward model of the zoo", "one")
        has, wants = (kinds[saved is not None], kinds[online is not None])
        raise ConfigError(f"the saved run has {has}, and the config's `reward_model` asks for {wants}")
    if online is not None and saved is not None:
        online.load_state_dict(saved)
