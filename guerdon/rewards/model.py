"""The interface of reward models: each is asked `score(batch) -> Scores`.

A model of the zoo, an ensemble and a plugin derive from `BaseRewardModel`; the image classifier
(`image/scorer.py`) gives the same `Scores` of frames. What scores become is decided in `relabel.py` alone. A
plugin implements four methods and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from guerdon.config import RewardConfig
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.steps import Scores as Scores
from guerdon.core.steps import StepBatch, checked_values
from guerdon.core.steps import SuccessScores as SuccessScores
from guerdon.core.types import display_path
from guerdon.data.files.checksums import load_torch
from guerdon.rewards.steps import to_items

StreamState: TypeAlias = Any
"""What a history-dependent model keeps of running episodes; only the model looks into it."""


class BaseRewardModel(ABC):
    """A reward model in a training loop: it is given experience, learns from it, and scores steps.

    Subclasses are made as `Class(config, device, tb_logger)`.
    """

    needs_experts: bool = False
    """Whether it learns from demonstrations."""
    changes: ClassVar[tuple[str, ...]] = ("reward",)
    """Keys of a transition that `estimate` replaces; where there are more, it looks at whole episodes."""
    history_dependent: ClassVar[bool] = False
    """Whether a reward depends on the episode up to its step: it is then scored as it is experienced, by
    `score_stream`. Otherwise a transition's reward depends on nothing but itself."""
    mapping: RewardConfig = RewardConfig()
    """How its probabilities become rewards (mode, type, values); rewards that it gives itself stay."""
    threshold: float = 0.5
    """Above which its probabilities count as success."""

    @abstractmethod
    def estimate(self, data: Any) -> Any:
        """`data` with the model's rewards: a new object of the same form, the input stays as it is."""

    @abstractmethod
    def train(self) -> Any:
        """Learn from what was collected."""

    @abstractmethod
    def collect_data(self, data: Any) -> None:
        """Take experience of the policy."""

    def collect_steps(self, batch: StepBatch) -> None:
        """The same of a batch; unless a model has a method of its own, `collect_data` is given dicts."""
        self.collect_data(to_items(batch))

    @abstractmethod
    def clear_data(self, iter: int) -> None:
        """Forget collected experience if that is due in the training iteration `iter`."""

    def score(self, batch: StepBatch) -> Scores:
        """Scores of steps [*L], or of streams that start here; changes nothing.

        Unless a model has a method of its own, `estimate` is asked, with dicts that it may edit.
        """
        answer = self.estimate(to_items(batch))
        if not isinstance(answer, list) or len(answer) != len(batch):
            shown = f"a list of {len(answer)}" if isinstance(answer, list) else f"a {type(answer).__name__}"
            raise DataError(
                f"estimate of {type(self).__name__} must return a list of {len(batch)} transitions, it "
                f"returned {shown}"
            )
        values = [torch.as_tensor(item["reward"]).detach().float().reshape(()) for item in answer]
        given = torch.stack(values).view(batch.shape)
        return Scores(rewards=checked_values(given, batch, type(self).__name__))

    def initial_state(self, num_streams: int) -> StreamState:
        """The state at the start of N episodes, of history-dependent models."""
        return None

    def score_stream(self, batch: StepBatch, state: StreamState) -> tuple[Scores, StreamState]:
        """Scores [T, N] of N streams that go on from `state`, and the state after; changes nothing."""
        return self.score(batch), state

    def load_expert_data(self, data: Any) -> None:
        """Take demonstrations."""
        raise ConfigError(f"{type(self).__name__} does not learn from demonstrations")

    def pretrain(self) -> Any:
        """Learn before the first update of the policy; the same as `train` unless a model does better."""
        return self.train()

    def state_dict(self) -> dict[str, Any]:
        """Everything among the attributes that has a state of its own, and the counters."""
        state: dict[str, Any] = {}
        for name, value in vars(self).items():
            if hasattr(value, "state_dict") and not isinstance(value, type):
                state[name] = value.state_dict()
            elif isinstance(value, int | float | Tensor):
                state[name] = value
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        own = self.state_dict()
        if own.keys() != state.keys():
            different = sorted(own.keys() ^ state.keys())
            raise DataError(f"what was saved is not of this {type(self).__name__}: it differs in {different}")
        for name, value in state.items():
            if hasattr(getattr(self, name), "load_state_dict"):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, value)

    def save(self, path: Path | str) -> None:
        """Write the state to one file, at once or not at all."""
        path = Path(path)
        write_atomic(path, lambda file: torch.save({"state": self.state_dict()}, file))

    def load(self, path: Path | str) -> None:
        """Read what `save` wrote; no code in the file is run."""
        self.load_state_dict(_read(Path(path))["state"])


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"there is no reward model at {display_path(path)}")
    state = load_torch(path)
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise DataError(f"{display_path(path)} holds no reward model of Guerdon")
    return state
