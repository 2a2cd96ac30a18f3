"""What the reward models of the zoo share, so that each is a short file: formula, network, settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from guerdon.config import build
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.notebook import html_table
from guerdon.core.running_stats import Statistics
from guerdon.core.steps import checked_values
from guerdon.rewards.model import Scores, StreamState
from guerdon.rewards.relabel import learned_rewards
from guerdon.rewards.steps import StepBatch, from_items, with_rewards
from guerdon.rewards.zoo.networks import Adam, RewardNetwork, check_actions
from guerdon.rewards.zoo.saving import SavedModel
from guerdon.rewards.zoo.settings import ZooSettings as ZooSettings

LogProbs: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(observations [N, *S], actions [N] or [N, A]) -> their log-probabilities, float32 [N]."""


class Experience:
    """Flat transitions, the latest `capacity` of them; memory is taken as it is filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ring: dict[str, Tensor] = {}
        self._next, self._size = 0, 0

    def __len__(self) -> int:
        return self._size

    def add(self, batch: StepBatch) -> None:
        """Take a copy of a flat batch; the oldest rows make room."""
        count = min(len(batch), self.capacity)
        if not count:
            return
        parts = batch[len(batch) - count :].parts()
        if not self._ring:
            self._ring = {
                name: part.new_empty((self.capacity, *part.shape[1:])) for name, part in parts.items()
            }
        if parts.keys() != self._ring.keys():
            different = sorted(parts.keys() ^ self._ring.keys())
            raise DataError(f"transitions with and without {', '.join(different)} cannot be kept together")
        room = self.capacity - self._next
        for name, part in parts.items():
            self._ring[name][self._next : self._next + count] = part[:room].detach()
            if count > room:
                self._ring[name][: count - room] = part[room:].detach()
        self._next = (self._next + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    @property
    def rows(self) -> StepBatch:
        """All of it, [N], in no particular order; a view that later additions change."""
        if not self._size:
            raise DataError("there is no experience yet")
        return StepBatch(**{name: part[: self._size] for name, part in self._ring.items()})

    def sample(self, count: int, generator: torch.Generator) -> StepBatch:
        """`count` rows, drawn with replacement; copies."""
        return StepBatch(
            **dict(zip(self._ring, self.sample_parts(count, generator, *self._ring), strict=True))
        )

    def sample_parts(self, count: int, generator: torch.Generator, *names: str) -> list[Tensor]:
        """These parts of `count` rows, drawn with replacement; copies."""
        if not self._size:
            raise DataError("there is no experience yet")
        picked = torch.randint(self._size, (count,), generator=generator)
        return [self._ring[name].index_select(0, picked.to(self._ring[name].device)) for name in names]

    def clear(self) -> None:
        """Forget everything."""
        self._next, self._size = 0, 0

    def to(self, device: torch.device) -> Experience:
        """Move to another device; returns itself."""
        self._ring = {name: part.to(device) for name, part in self._ring.items()}
        return self

    def state_dict(self) -> dict[str, Any]:
        """A copy of what is there."""
        parts = {name: part[: self._size].clone() for name, part in self._ring.items()} if self._size else {}
        return {"parts": parts, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.clear()
        if state["parts"]:
            self.add(StepBatch(**state["parts"]))
        self._next = int(state["next"])


class ZooModel(SavedModel):
    """Shared by the models of the zoo. A subclass has `Settings`, `make_network`, `sample_batch`, `rewards`.

    Attributes:
        cfg: the settings.
        network: what is learned.
        experience: transitions of the policy.
        experts: demonstrations, one `StepBatch` [T] each.
        train_iter: gradient steps so far.
    """

    Settings: ClassVar[type[ZooSettings]] = ZooSettings
    needs_experience: ClassVar[bool] = True
    """Whether it learns from the policy's own transitions."""
    scales_by: ClassVar[Literal["policy", "experts"]] = "policy"
    """Whose observations `normalize_obs` scales by. A policy that failed may be anywhere: by its spread all
    that the experts do looks like one point. Without own experience it is the experts' in any case."""
    policy_log_probs: LogProbs | None = None
    """Asks the policy in training how likely actions are; set by pipelines whose policy can tell."""
    obs_key: str | None = None
    """The camera whose frames it judges, in place of observations; None: it looks at observations."""
    augments: ClassVar[bool] = False
    """Whether it makes further transitions of finished episodes, for the replay buffer."""

    def __init__(
        self,
        config: Mapping[str, Any] | ZooSettings,
        device: torch.device | str = "cpu",
        tb_logger: Any = None,
    ) -> None:
        if not isinstance(config, ZooSettings):
            config = build(self.Settings, dict(config), "reward_model")
        if not isinstance(config, self.Settings):
            raise ConfigError(
                f"{type(self).__name__} takes {self.Settings.__name__}, not {type(config).__name__}"
            )
        self.cfg: Any = config
        self._obs_size = config.obs_size
        self.device, self.tb_logger = torch.device(device), tb_logger
        self.generator = torch.Generator().manual_seed(config.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.network: RewardNetwork = self.make_network().to(self.device)
        self.obs_statistics = Statistics((config.obs_size,)).to(self.device)
        weights = [item for item in self.network.parameters() if item.requires_grad]
        self.optimizer = Adam(weights, config.lr) if weights else None
        self.experience = Experience(config.buffer_size)
        self.experts: list[StepBatch] = []
        self.train_iter, self.new_data_count = 0, 0
        self.setup()
        if config.data_path is not None and self.needs_experts:
            self.load_expert_data(config.data_path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in self._facts().items())})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, str]:
        """What it was made for and how far it is."""
        cfg, kind = self.cfg, "discrete" if self.cfg.discrete_actions else "continuous"
        known = {
            "observations": "x".join(map(str, cfg.obs_shape)),
            "actions": f"{cfg.action_size} {kind}",
            "updates": str(self.train_iter),
        }
        if self.needs_experts:
            known["demonstrations"] = f"{len(self.experts)} episodes"
        return {**known, "device": str(self.device)}

    # What a model says

    def make_network(self) -> RewardNetwork:
        """The network, with weights from torch's global generator."""
        return RewardNetwork()

    def setup(self) -> None:
        """Make what the model has beside its network, before demonstrations are loaded."""

    def sample_batch(self) -> tuple[Any, ...]:
        """What `network.learn` takes in one gradient step."""
        raise NotImplementedError(f"{type(self).__name__} has no method `sample_batch`")

    def sample_batches(self, num_updates: int) -> Iterator[tuple[Any, ...]]:
        """What a round of gradient steps takes; for models that draw for all of them at once."""
        return (self.sample_batch() for _ in range(num_updates))

    def rewards(self, batch: StepBatch) -> Tensor:
        """Rewards of checked transitions, float32 [*L]; changes nothing. See `stream_rewards`."""
        if not self.history_dependent:
            raise NotImplementedError(f"{type(self).__name__} has no method `rewards`")
        streams = batch.streams()
        return self.stream_rewards(streams, self.initial_state(streams.shape[1]))[0].view(batch.shape)

    def stream_rewards(self, batch: StepBatch, state: StreamState) -> tuple[Tensor, StreamState]:
        """Rewards [T, N] of checked streams that go on from `state`, and the state after; changes nothing.

        History-dependent models have this method and `initial_state` in the place of `rewards`.
        """
        return self.rewards(batch), state

    def bind_env(self, env: Any) -> None:
        """See the vector environments before the first step, and take from them what the model needs."""

    def augment(self, episodes: Sequence[StepBatch]) -> StepBatch:
        """Further transitions [N] made of finished episodes, [T] each; of models that augment."""
        raise NotImplementedError(f"{type(self).__name__} augments, and has no method `augment`")

    def update_statistics(self, batch: StepBatch) -> None:
        """Bring further statistics up to date with what was collected, [*L]."""

    def measure(self, *drawn: Any) -> dict[str, float]:
        """Further scalars to log, of the last gradient step's data."""
        return {}

    # The interface

    @torch.no_grad()
    def score(self, batch: StepBatch) -> Scores:
        """Scores of transitions [*L], or of streams that start here; changes nothing."""
        rewards = self.rewards(self.checked(batch))
        return Scores(rewards=checked_values(rewards, batch, type(self).__name__))

    @torch.no_grad()
    def score_stream(self, batch: StepBatch, state: StreamState) -> tuple[Scores, StreamState]:
        """Scores [T, N] of N streams that go on from `state`, and the state after; changes nothing."""
        rewards, state = self.stream_rewards(self.checked(batch), state)
        return Scores(rewards=checked_values(rewards, batch, type(self).__name__)), state

    def estimate(self, data: Any) -> Any:
        """New transitions with the model's rewards, in the form of `data`."""
        batch = from_items(data)
        done = batch.done.cpu().numpy()
        rewards = torch.from_numpy(learned_rewards(self.score(batch), done, self.mapping, self.threshold))
        if isinstance(data, StepBatch):
            return replace(batch.to(self.device), env_rewards=rewards)
        return with_rewards(data, rewards)

    def collect_data(self, data: Any) -> None:
        """Keep transitions of the policy, and bring the statistics up to date, if it learns from them."""
        batch = self.checked(data if isinstance(data, StepBatch) else from_items(data))
        if not self.needs_experience:
            return
        flat = batch.flat()
        self.experience.add(flat)
        self.new_data_count += len(flat)
        if self.cfg.normalize_obs and self.scales_by == "policy":
            self.obs_statistics.update(flat.next_obs.to(self.device).flatten(1))
        self.update_statistics(batch)

    def collect_steps(self, batch: StepBatch) -> None:
        """The same, without a detour over dicts."""
        self.collect_data(batch)

    def clear_data(self, iter: int) -> None:
        """Forget the policy's transitions every `clear_buffer_per_iters` iterations."""
        if self.cfg.clear_buffer_per_iters and iter % self.cfg.clear_buffer_per_iters == 0:
            self.experience.clear()

    def load_expert_data(self, data: Any) -> None:
        """Take demonstrations: a path, a list of dicts, `StepBatch`, or a list of those, one an episode."""
        if not self.needs_experts:
            super().load_expert_data(data)
        from guerdon.rewards.zoo.demonstrations import first_steps, read_demonstrations

        given = first_steps(read_demonstrations(data), self.cfg.expert_steps)
        episodes = [self.checked(each) for each in given]
        self.experts, self._expert_rows = episodes, StepBatch.cat(episodes)
        if self.cfg.normalize_obs and (self.scales_by == "experts" or not self.needs_experience):
            self.obs_statistics.count.zero_()  # other demonstrations take the place of earlier ones
            self.obs_statistics.update(self.expert_rows.next_obs.to(self.device).flatten(1))

    def train(self) -> dict[str, float]:
        """`update_per_collect` gradient steps, if enough is new; returns what was logged, means over them."""
        if self.new_data_count < self.cfg.target_new_data_count:
            return {}
        self.new_data_count = 0
        return self._fit(self.cfg.update_per_collect)

    def pretrain(self) -> dict[str, float]:
        """`pretrain_updates` gradient steps."""
        return self._fit(self.cfg.pretrain_updates)

    def _fit(self, num_updates: int) -> dict[str, float]:
        if self.needs_experts:
            len(self.expert_rows)  # raises without demonstrations
        if self.optimizer is None or (self.needs_experience and not len(self.experience)):
            return {}
        losses, drawn = list[Tensor](), tuple[Any, ...]()
        for drawn in self.sample_batches(num_updates):
            losses.append(self.network.gradients(*drawn))
            self.optimizer.fused_step()
        self.train_iter += num_updates
        with torch.no_grad():
            scalars = {"loss": float(torch.stack(losses).mean()), **self.measure(*drawn)}
        if not all(map(math.isfinite, scalars.values())):
            raise DataError(f"{type(self).__name__}: the loss is not a finite number any more: {scalars}")
        self.log(scalars)
        return scalars

    def log(self, scalars: Mapping[str, float]) -> None:
        """`reward_model/<name>` to TensorBoard, at the number of gradient steps."""
        if self.tb_logger is not None:
            for name, value in scalars.items():
                self.tb_logger.add_scalar(f"reward_model/{name}", value, self.train_iter)

    # For the models

    @property
    def expert_rows(self) -> StepBatch:
        """All demonstrated transitions, [N]."""
        if not self.experts:
            raise ConfigError(f"{type(self).__name__} has no demonstrations: set reward_model.data_path")
        return self._expert_rows

    def checked(self, batch: StepBatch) -> StepBatch:
        """The batch on the model's device, if its shapes and numbers are right."""
        size = math.prod(batch.obs.shape[len(batch.shape) :])
        if size != self._obs_size:
            raise DataError(
                f"observations have {size} numbers, {type(self).__name__} was made for {self._obs_size}"
            )
        check_actions(batch.actions, self.cfg.action_size, self.cfg.discrete_actions)
        batch.check_finite()
        return batch.to(self.device)

    def obs_features(self, obs: Tensor) -> Tensor:
        """Observations as flat vectors, scaled if asked for: [N, *S] -> float32 [N, obs_size]."""
        flat = obs.flatten(1).float()
        return self.obs_statistics.normalized(flat) if self.cfg.normalize_obs else flat

    def action_features(self, actions: Tensor) -> Tensor:
        """Actions as vectors, discrete ones one-hot: [N] or [N, A] -> float32 [N, action_size]."""
        if not self.cfg.discrete_actions:
            return actions.float()
        return functional.one_hot(actions, self.cfg.action_size).float()

    def features(self, batch: StepBatch, parts: Sequence[str] | None = None) -> Tensor:
        """`obs`, `action` and `next_obs` of transitions side by side, [N, F]; `parts` or as `inputs` says."""
        flat = batch.flat()
        columns = [
            self.action_features(flat.actions) if part == "action" else self.obs_features(getattr(flat, part))
            for part in parts or INPUTS[self.cfg.inputs]
        ]
        return torch.cat(columns, dim=1)

    def num_features(self, parts: Sequence[str] | None = None) -> int:
        """F."""
        names = parts or INPUTS[self.cfg.inputs]
        return sum(self.cfg.action_size if name == "action" else self.cfg.obs_size for name in names)

    def sample_experts(self, count: int) -> StepBatch:
        """`count` demonstrated transitions, drawn with replacement."""
        rows = self.expert_rows
        return rows[torch.randint(len(rows), (count,), generator=self.generator).to(self.device)]

    def sample_pairs(self, num_updates: int) -> tuple[StepBatch, StepBatch]:
        """Demonstrated transitions and the policy's, [num_updates * batch_size] each."""
        count = num_updates * self.cfg.batch_size
        return self.sample_experts(count), self.experience.sample(count, self.generator)

    def batches(self, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Tensors of the same length, cut into pieces for single gradient steps."""
        return zip(*(torch.split(part, self.cfg.batch_size) for part in parts), strict=True)


INPUTS: dict[str, tuple[str, ...]] = {
    "state_action": ("obs", "action"),
    "state": ("next_obs",),
    "state_next_state": ("obs", "next_obs"),
}
"""What networks are given of a step, by the name of the setting `inputs`."""
