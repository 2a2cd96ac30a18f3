"""`check_reward_model`: does a reward model keep to what pipelines and wrappers rely on?

Like Gymnasium's `check_env` it uses synthetic data and raises at the first fault. It runs over every model of
the zoo in the tests, and is there for authors of plugins.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
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
        small = SMALL_SETTINGS if issubclass(cls, ZooModel) else {}
        name = {"type": model} if isinstance(model, str) else {}
        cfg = section_of({**shapes, **small, **(settings or {}), **name})

    def make() -> BaseRewardModel:
        return cls(deepcopy(cfg), "cpu", _Silence())  # type: ignore[call-arg]

    checked = model if isinstance(model, BaseRewardModel) else make()
    if isinstance(checked, ZooModel):
        shapes = {name: getattr(checked.cfg, name) for name in shapes}
    check = _Check(checked, make, prepare)
    if checked is not model:
        return check.run(shapes, demonstrations, experience)
    before = deepcopy(model.state_dict())
    try:
        return check.run(shapes, demonstrations, experience)
    finally:
        model.load_state_dict(before)


class _Check:
    def __init__(
        self,
        model: BaseRewardModel,
        make: Callable[[], BaseRewardModel],
        prepare: Callable[[Any], None] | None,
    ) -> None:
        if not isinstance(model, BaseRewardModel):
            raise RewardModelError(f"{type(model).__name__} does not derive from BaseRewardModel")
        self.model, self.make, self.prepare = model, make, prepare
        self.zoo = model if isinstance(model, ZooModel) else None
        self.found: dict[str, str] = {}

    def run(
        self,
        shapes: Mapping[str, Any],
        demonstrations: Sequence[StepBatch] | None,
        experience: StepBatch | None,
    ) -> dict[str, str]:
        """All checks, in the order in which a pipeline calls the methods."""
        self.data = synthetic_steps(shapes, 40, 4, seed=1) if experience is None else experience
        self.experts = (
            demonstrations
            or getattr(self.model, "experts", None)
            or [synthetic_steps(shapes, 16 + number % 4, 1, seed=100 + number) for number in range(12)]
        )
        self.learning()
        self.list_form()
        self.purity()
        if self.zoo is not None:
            self.tensor_form(self.zoo)
        if not self.model.history_dependent and self.model.changes == ("reward",):
            self.independence()
        self.saving()
        if self.zoo is not None:
            self.devices(self.zoo)
        self.empty_batches()
        self.large_batches()
        self.bad_numbers()
        return self.found

    # Each method raises, or notes what was found.

    def learning(self) -> None:
        """`load_expert_data`, `collect_data`, `train`, `pretrain`, `clear_data`."""
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
        self.found["learning"] = "learns from synthetic data"

    def list_form(self) -> None:
        """`estimate` of a list of dicts: the same length and keys, new rewards, the input untouched."""
        items = to_items(self.data.stream(0))
        kept = deepcopy(items)
        answer = self.model.estimate(items)
        self.expect(
            same(items, kept),
            "estimate changes the items that it is given, which are in a replay buffer perhaps: begin with "
            "data = [{**item} for item in data]",
        )
        self.expect(isinstance(answer, list), f"estimate of a list returns a {type(answer).__name__}")
        self.expect(
            len(answer) == len(items), f"estimate of {len(items)} transitions returns {len(answer)} of them"
        )
        for item, old in zip(answer, items, strict=True):
            lost = [key for key in old if not isinstance(item, Mapping) or key not in item]
            self.expect(not lost, f"estimate loses {lost[:1]} of the transitions")
            kept_keys = [key for key in old if key not in self.model.changes]
            others = [key for key in kept_keys if not same(item[key], old[key])]
            self.expect(not others, f"estimate changes {others[:1]} of the transitions, not only the reward")
        values = self.rewards_of(answer)
        self.expect(bool(torch.isfinite(values).all()), "estimate gives rewards that are not finite numbers")
        self.found["list form"] = f"{len(items)} rewards from {values.min():.4g} to {values.max():.4g}"

    def purity(self) -> None:
        """Scoring changes nothing and draws nothing."""
        before = deepcopy(self.model.state_dict())
        drawn = _global_generators()
        first = self.scores(self.data)
        untouched = same(drawn, _global_generators())
        changed = [
            name
            for name, value in self.model.state_dict().items()
            if name not in before or not same(value, before[name])
        ]
        self.expect(
            not changed,
            f"estimate changes {changed[:1]} of the model's state: statistics are brought up to date in "
            "collect_data or train",
        )
        self.expect(untouched, "estimate draws from a global random generator: keep one of your own")
        self.expect(
            torch.equal(first, self.scores(self.data)), "estimate gives other rewards the second time"
        )
        self.found["purity"] = "scoring changes nothing"

    def tensor_form(self, model: ZooModel) -> None:
        """`score` of [N], [T] and [T, N]; streams can be scored in pieces."""
        kept = deepcopy(self.data)
        for batch in (self.data, self.data.stream(0), self.data.flat()):
            rewards = model.score(batch).values
            self.expect(
                tuple(rewards.shape) == batch.shape,
                f"score of transitions {list(batch.shape)} has shape {list(rewards.shape)}",
            )
        self.expect(same(self.data, kept), "score changes the transitions that it is given")
        if model.history_dependent:
            self.streams(model)
        else:
            flat = torch.from_numpy(model.score(self.data.flat()).values).view(self.data.shape)
            whole = torch.from_numpy(model.score(self.data).values)
            self.alike(flat, whole, "score of [T, N] differs from that of [T * N]")
        kind = "streams" if model.history_dependent else "rows"
        self.found["tensor form"] = f"[N] and [T, N], scored as {kind}"

    def streams(self, model: ZooModel) -> None:
        """Scoring goes on where it stopped."""
        half = len(self.data.env_rewards) // 2 - 3  # within an episode
        batch, fresh = self.data, model.initial_state(self.data.shape[1])
        whole, _ = model.score_stream(batch, fresh)
        first, state = model.score_stream(batch[:half], fresh)
        kept = deepcopy(state)
        second, _ = model.score_stream(batch[half:], state)
        pieces = torch.from_numpy(np.concatenate([first.values, second.values]))
        self.alike(torch.from_numpy(whole.values), pieces, "score_stream in two pieces differs from one call")
        self.expect(same(state, kept), "score_stream changes the state that it is given: return a new one")

    def independence(self) -> None:
        """A transition's reward depends on nothing but itself: no scaling by the batch at hand."""
        rows = self.data.flat()
        whole, third = self.scores(rows), len(rows) // 3
        for first in (0, third, 2 * third):  # the lowest and the highest are not in all
            self.alike(
                whole[first : first + third],
                self.scores(rows[first : first + third]),
                "the reward of a transition depends on what else is in its batch: use running statistics",
            )
        self.found["independence"] = "a reward does not depend on the rest of the batch"

    def saving(self) -> None:
        """What is saved scores the same, and learns on the same."""
        wanted = self.scores(self.data)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reward_model.pt"
            self.model.save(path)
            other = self.make()
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
        self.found["saving"] = "a saved model scores and learns as the one that was saved"

    def devices(self, model: ZooModel) -> None:
        """`to_device` takes everything along."""
        wanted = self.scores(self.data)
        model.to_device("cpu")
        self.alike(wanted, self.scores(self.data), "to_device('cpu') changes the rewards")
        if torch.cuda.is_available():
            model.to_device("cuda")
            self.alike(wanted, self.scores(self.data).cpu(), "rewards on the GPU differ", 1e-3)
            model.to_device("cpu")
        other = self.make()
        assert isinstance(other, ZooModel)
        self.show_experts(other)
        other.to_device("meta")
        left = [
            name
            for name, value in vars(other).items()
            if name != "optimizer" and any(part.device.type != "meta" for part in tensors_in(value))
        ]
        self.expect(not left, f"to_device leaves `{', '.join(left)}` where it was")
        self.found["devices"] = "moves as a whole"

    def empty_batches(self) -> None:
        """An empty list gives an empty list or a clear error."""
        try:
            answer = self.model.estimate([])
        except GuerdonError as error:
            self.found["empty"] = f"error: {error}"
            return
        except Exception as error:
            crash = f"ends in {type(error).__name__}: {error}"
            self.expect(self.zoo is None, f"estimate([]) {crash}; return [] or raise a clear error")
            self.found["empty"] = f"error: {crash}; no pipeline asks for it"
            return
        self.expect(isinstance(answer, list) and not answer, f"estimate([]) returns {answer!r}")
        self.found["empty"] = "an empty list"

    def large_batches(self) -> None:
        """More rows than any buffer holds, to learn from and to score."""
        large = StepBatch.cat([self.data.flat()] * (-(-LARGE // len(self.data))))[:LARGE]
        self.model.collect_data(self.given(large))
        self.model.train()
        values = self.scores(large)
        self.expect(len(values) == LARGE, f"{LARGE} transitions get {len(values)} rewards")
        self.expect(bool(torch.isfinite(values).all()), "a large batch has rewards that are not finite")
        self.found["large"] = f"{LARGE} transitions at once"

    def bad_numbers(self) -> None:
        """NaN in an observation is an error, or at least no reward."""
        obs, ahead = self.data.obs.clone(), self.data.next_obs.clone()
        obs[0, 0], ahead[0, 0] = float("nan"), float("nan")
        broken = StepBatch(**{**self.data.parts(), "obs": obs, "next_obs": ahead})
        try:
            values = self.scores(broken)
        except GuerdonError as error:
            self.found["NaN"] = f"error: {error}"
            return
        self.expect(
            self.zoo is None and not bool(torch.isfinite(values[0, 0])),
            "an observation that is NaN gets a reward all the same: it should be an error",
        )
        self.found["NaN"] = "its reward is no number, which pipelines refuse"

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
        self.expect(
            isinstance(answer, list) and len(answer) == len(batch),
            f"estimate of {len(batch)} transitions returns "
            f"{len(answer) if isinstance(answer, list) else type(answer).__name__}",
        )
        return self.rewards_of(answer).view(batch.shape)

    def rewards_of(self, items: Sequence[Mapping[str, Any]]) -> Tensor:
        values = [torch.as_tensor(item["reward"]).detach().float() for item in items]
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
