"""`check_reward_model`: does a reward model keep to what pipelines and wrappers rely on?

Like Gymnasium's `check_env` it uses synthetic data and raises at the first fault. It runs over every model of
the zoo in the tests, and is there for authors of plugins.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.core.errors import ConfigError, GuerdonError
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.registry import reward_model_class, section_of
from guerdon.rewards.steps import StepBatch, to_items
from guerdon.rewards.zoo.base import ZooModel
from guerdon.rewards.zoo.synthetic import same, synthetic_steps, tensors_in

LARGE = 3000
"""Rows of a batch that is larger than any buffer or batch size of the check."""
SMALL_SETTINGS = {"buffer_size": 256, "batch_size": 32, "update_per_collect": 2, "pretrain_updates": 2}
"""What models of the zoo are checked with, unless other settings are given."""


class RewardModelError(GuerdonError):
    """A reward model breaks the rules of the interface."""


def check_reward_model(
    model: BaseRewardModel | type[BaseRewardModel] | str,
    settings: Mapping[str, Any] | None = None,
    *,
    obs_shape: int | Sequence[int] = 4,
    action_size: int = 2,
    discrete_actions: bool = True,
    demonstrations: Sequence[StepBatch] | None = None,
    experience: StepBatch | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> dict[str, str]:
    """Raise `RewardModelError` at the first rule that the model breaks.

    Args:
        model: a class, a name in the table of reward models, or a model. A model is left as it was.
        settings: the `reward_model` section that the class is made with, shapes aside.
        obs_shape: of a single observation; of a model of the zoo its own settings count.
        action_size: number of discrete actions, or size of a real-valued one.
        discrete_actions: whether actions are numbers of choices.
        demonstrations: episodes [T]; None: synthetic ones. They are shown to models that need them.
        experience: [T, N] of a policy; None: synthetic.
        prepare: gives a model what it needs beyond these, before it learns; also to a second one.

    Returns:
        What was checked -> what was found, for people; under `empty` what becomes of an empty list.
    """
    shapes = {"obs_shape": obs_shape, "action_size": action_size, "discrete_actions": discrete_actions}
    if isinstance(model, BaseRewardModel):
        cls, cfg = type(model), getattr(model, "cfg", None)
        if cfg is None:
            raise ConfigError(
                f"{cls.__name__} has no `cfg`: give its class and its settings, so that it can be made a "
                "second time"
            )
    else:
        cls = reward_model_class(model) if isinstance(model, str) else model
        if not isinstance(cls, type) or not issubclass(cls, BaseRewardModel):
            raise ConfigError(
                f"model must be a BaseRewardModel, a class that derives from it or a name, not {model!r:.80}"
            )
        small = SMALL_SETTINGS if issubclass(cls, ZooModel) else {}
        name = {"type": model} if isinstance(model, str) else {}
        cfg = section_of({**shapes, **small, **(settings or {}), **name})

    def make() -> BaseRewardModel:
        return cls(deepcopy(cfg), "cpu", _Silence())  # type: ignore[call-arg]

    checked = model if isinstance(model, BaseRewardModel) else make()
    if isinstance(checked, ZooModel):
        shapes = {name: getattr(checked.cfg, name) for name in shapes}
    check = _Check(checked, make, shapes, demonstrations, experience, prepare)
    if checked is not model:
        return check.run()
    before = deepcopy(model.state_dict())
    try:
        return check.run()
    finally:
        model.load_state_dict(before)


class _Check:
    """Each method raises, or returns what was found."""

    def __init__(
        self,
        model: BaseRewardModel,
        make: Callable[[], BaseRewardModel],
        shapes: Mapping[str, Any],
        demonstrations: Sequence[StepBatch] | None,
        experience: StepBatch | None,
        prepare: Callable[[Any], None] | None,
    ) -> None:
        if not isinstance(model, BaseRewardModel):
            raise RewardModelError(f"{type(model).__name__} does not derive from BaseRewardModel")
        self.model, self.make, self.prepare = model, make, prepare
        self.zoo = model if isinstance(model, ZooModel) else None
        self.data = synthetic_steps(shapes, 40, 4, seed=1) if experience is None else experience
        self.experts = demonstrations or getattr(model, "experts", None)
        if not self.experts:
            lengths = [16 + number % 4 for number in range(12)]
            self.experts = [synthetic_steps(shapes, n, 1, seed=100 + i) for i, n in enumerate(lengths)]

    def run(self) -> dict[str, str]:
        """All checks, in the order in which a pipeline calls the methods."""
        checks: dict[str, Callable[[], str] | None] = {
            "learning": self.learning,
            "list form": self.list_form,
            "purity": self.purity,
            "tensor form": partial(self.tensor_form, self.zoo) if self.zoo else None,
            "independence": None
            if self.model.history_dependent or self.model.changes != ("reward",)
            else self.independence,
            "saving": self.saving,
            "devices": partial(self.devices, self.zoo) if self.zoo else None,
            "empty": self.empty_batches,
            "large": self.large_batches,
            "NaN": self.bad_numbers,
        }
        return {name: check() for name, check in checks.items() if check is not None}

    def learning(self) -> str:
        self.show_experts(self.model)
        shown = self.given(self.data)
        kept = deepcopy(shown)
        self.model.collect_data(shown)
        self.expect(same(shown, kept), "collect_data changes what it is given: keep a copy")
        for method in (self.model.train, self.model.pretrain):
            metrics = method()
            if isinstance(metrics, Mapping):
                bad = [name for name, value in metrics.items() if not np.isfinite(float(value))]
                self.expect(not bad, f"train returns a {'/'.join(map(str, bad))} that is no finite number")
        self.model.clear_data(1)
        self.model.collect_data(self.given(self.data))
        return "learns from synthetic data"

    def list_form(self) -> str:
        """`estimate` of a list of dicts: the same length and keys, new rewards; it may edit its input."""
        items = to_items(self.data.stream(0))
        kept = deepcopy(items)
        answer = self.model.estimate(items)
        edits, items = not same(items, kept), kept
        values = self.rewards_of(answer, len(items))
        for item, old in zip(answer, items, strict=True):
            lost = [key for key in old if key not in item]
            self.expect(not lost, f"estimate loses {lost[:1]} of the transitions")
            others = [key for key in old if key not in self.model.changes and not same(item[key], old[key])]
            self.expect(not others, f"estimate changes {others[:1]} of the transitions, not only the reward")
        self.expect(bool(torch.isfinite(values).all()), "estimate gives rewards that are not finite numbers")
        notice = "; notice: estimate edits its input, so that Guerdon hands it copies" if edits else ""
        return f"{len(items)} rewards from {values.min():.4g} to {values.max():.4g}{notice}"

    def purity(self) -> str:
        """Scoring changes nothing and draws nothing."""
        before, drawn = deepcopy(self.model.state_dict()), _global_generators()
        first = self.scores(self.data)
        untouched, after = same(drawn, _global_generators()), self.model.state_dict()
        changed = [name for name in after if name not in before or not same(after[name], before[name])]
        self.expect(
            not changed,
            f"estimate changes {changed[:1]} of the model's state: statistics are brought up to date in "
            "collect_data or train",
        )
        self.expect(untouched, "estimate draws from a global random generator: keep one of your own")
        again = self.scores(self.data)
        self.expect(torch.equal(first, again), "estimate gives other rewards the second time")
        return "scoring changes nothing"

    def tensor_form(self, model: ZooModel) -> str:
        """`score` of [N], [T] and [T, N]; streams can be scored in pieces."""
        data, kept = self.data, deepcopy(self.data)
        for batch in (data, data.stream(0), data.flat()):
            shape = model.score(batch).values.shape
            self.expect(
                shape == batch.shape,
                f"score of transitions {list(batch.shape)} has shape {list(shape)}",
            )
        self.expect(same(data, kept), "score changes the transitions that it is given")
        whole = torch.from_numpy(model.score(data).values)
        if not model.history_dependent:
            flat = torch.from_numpy(model.score(data.flat()).values).view(data.shape)
            self.alike(flat, whole, "score of [T, N] differs from that of [T * N]")
            return "[N] and [T, N], scored as rows"
        half = len(data.env_rewards) // 2 - 3  # within an episode
        first, state = model.score_stream(data[:half], model.initial_state(data.shape[1]))
        kept_state = deepcopy(state)
        second, _ = model.score_stream(data[half:], state)
        pieces = torch.from_numpy(np.concatenate([first.values, second.values]))
        self.alike(whole, pieces, "score_stream in two pieces differs from one call")
        unchanged = same(state, kept_state)
        self.expect(unchanged, "score_stream changes the state that it is given: return a new one")
        return "[N] and [T, N], scored as streams"

    def independence(self) -> str:
        """A transition's reward depends on nothing but itself: no scaling by the batch at hand."""
        rows = self.data.flat()
        whole, third = self.scores(rows), len(rows) // 3
        for first in (0, third, 2 * third):  # the lowest and the highest are not in all
            self.alike(
                whole[first : first + third],
                self.scores(rows[first : first + third]),
                "the reward of a transition depends on what else is in its batch: use running statistics",
            )
        return "a reward does not depend on the rest of the batch"

    def saving(self) -> str:
        """What is saved scores the same, and learns on the same."""
        wanted, other = self.scores(self.data), self.make()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reward_model.pt"
            self.model.save(path)
            self.show_experts(other)
            other.load(path)
        self.alike(
            wanted,
            self.scores(self.data, other),
            "a model that was saved and loaded gives other rewards: something that scoring depends on, such "
            "as running statistics, is missing from state_dict",
        )
        if self.zoo is not None:
            for each in (self.model, other):
                each.train()
            self.alike(
                self.scores(self.data),
                self.scores(self.data, other),
                "a model that was saved and loaded learns on differently: something that learning depends "
                "on, such as the optimiser or a generator, is missing from state_dict",
            )
        return "a saved model scores and learns as the one that was saved"

    def devices(self, model: ZooModel) -> str:
        """`to_device` takes everything along."""
        wanted = self.scores(self.data)
        model.to_device("cpu")
        self.alike(wanted, self.scores(self.data), "to_device('cpu') changes the rewards")
        if torch.cuda.is_available():
            model.to_device("cuda")
            self.alike(wanted, self.scores(self.data).cpu(), "rewards on the GPU differ", 1e-3)
            model.to_device("cpu")
        other: Any = self.make()
        self.show_experts(other)
        other.to_device("meta")
        left = [
            name
            for name, value in vars(other).items()
            if name != "optimizer" and any(part.device.type != "meta" for part in tensors_in(value))
        ]
        self.expect(not left, f"to_device leaves `{', '.join(left)}` where it was")
        return "moves as a whole"

    def empty_batches(self) -> str:
        """An empty list gives an empty list or a clear error."""
        try:
            answer = self.model.estimate([])
        except GuerdonError as error:
            return f"error: {error}"
        except Exception as error:
            crash = f"ends in {type(error).__name__}: {error}"
            self.expect(self.zoo is None, f"estimate([]) {crash}; return [] or raise a clear error")
            return f"error: {crash}; no pipeline asks for it"
        self.expect(isinstance(answer, list) and not answer, f"estimate([]) returns {answer!r}")
        return "an empty list"

    def large_batches(self) -> str:
        """More rows than any buffer holds, to learn from and to score."""
        large = StepBatch.cat([self.data.flat()] * (-(-LARGE // len(self.data))))[:LARGE]
        self.model.collect_data(self.given(large))
        self.model.train()
        finite = bool(torch.isfinite(self.scores(large)).all())
        self.expect(finite, "a large batch has rewards that are not finite")
        return f"{LARGE} transitions at once"

    def bad_numbers(self) -> str:
        """NaN in an observation is an error, or at least no reward."""
        obs, ahead = self.data.obs.clone(), self.data.next_obs.clone()
        obs[0, 0] = ahead[0, 0] = float("nan")
        try:
            values = self.scores(replace(self.data, obs=obs, next_obs=ahead))
        except GuerdonError as error:
            return f"error: {error}"
        self.expect(
            self.zoo is None and not bool(torch.isfinite(values[0, 0])),
            "an observation that is NaN gets a reward all the same: it should be an error",
        )
        return "its reward is no number, which pipelines refuse"

    # Tools

    def given(self, batch: StepBatch) -> Any:
        """A batch in the form that the pipelines give to this kind of model; a copy."""
        return deepcopy(batch) if self.zoo is not None else to_items(deepcopy(batch))

    def show_experts(self, model: BaseRewardModel) -> None:
        if model.needs_experts and not getattr(model, "experts", None):
            model.load_expert_data(self.experts)
        if self.prepare is not None:
            self.prepare(model)

    def scores(self, batch: StepBatch, model: BaseRewardModel | None = None) -> Tensor:
        """Rewards through `estimate`, as a pipeline would ask for them, [*L]."""
        answer = (model or self.model).estimate(self.given(batch))
        if isinstance(answer, StepBatch):
            return answer.env_rewards.cpu()
        return self.rewards_of(answer, len(batch)).view(batch.shape)

    def rewards_of(self, answer: Any, count: int) -> Tensor:
        """What an answer in the form of a list gives to `count` transitions, [N]."""
        self.expect(isinstance(answer, list), f"estimate of a list returns a {type(answer).__name__}")
        self.expect(len(answer) == count, f"estimate of {count} transitions returns {len(answer)} of them")
        whole = all(isinstance(item, Mapping) and "reward" in item for item in answer)
        self.expect(whole, "estimate loses ['reward'] of the transitions")
        values = [torch.as_tensor(item["reward"]).detach().float() for item in answer]
        sizes = {value.numel() for value in values}
        self.expect(sizes == {1}, f"rewards must be one number each, not {sorted(sizes)} numbers")
        return torch.stack([value.reshape(()) for value in values]).cpu()

    def alike(self, one: Tensor, other: Tensor, complaint: str, tolerance: float = 1e-4) -> None:
        alike = one.shape == other.shape and torch.allclose(one, other, tolerance, tolerance)
        self.expect(alike, complaint)

    def expect(self, holds: bool, complaint: str) -> None:
        if not holds:
            raise RewardModelError(f"{type(self.model).__name__}: {complaint}")


def _global_generators() -> list[Any]:
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]  # noqa: NPY002


class _Silence:
    """A logger that keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add_") and name not in ("flush", "close"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


__all__ = ["RewardModelError", "check_reward_model"]
