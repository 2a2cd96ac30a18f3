"""`check_reward_model` passes every model of the table and finds planted faults, each with its own words."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from guerdon.core.errors import ConfigError
from guerdon.core.running_stats import Statistics
from guerdon.models import Contract, ResNetRewardModel, save_checkpoint
from guerdon.rewards import (
    REWARD_MODELS,
    RewardModelError,
    StepBatch,
    ZooModel,
    check_reward_model,
    create_reward_model,
)
from guerdon.rewards.zoo.gail import GAIL
from guerdon.rewards.zoo.networks import RewardNetwork
from guerdon.rewards.zoo.synthetic import synthetic_steps
from tests.rewards.page_plugin import SETTINGS, InPlaceRewardModel, PageRewardModel


def knows_the_policy(model):
    model.policy_log_probs = lambda obs, actions: -obs.flatten(1)[:, 0].abs()


def has_rankings(model):
    shapes = {name: getattr(model.cfg, name) for name in ("obs_shape", "action_size", "discrete_actions")}
    levels = {0.0: 1, 0.5: 2, 1.0: 3}
    model.load_ranked_data({level: [synthetic_steps(shapes, 12, 1, seed)] for level, seed in levels.items()})


def of_images(folder, discrete):
    """The image classifier needs a checkpoint, and images to look at."""
    shapes = {"obs_shape": [8, 8, 3], "action_size": 2, "discrete_actions": discrete}
    model = ResNetRewardModel(arch="resnet10", width=8, image_size=(3, 16, 16))
    save_checkpoint(folder / "fitted", model, Contract.of(model, threshold=0.5))
    rows = synthetic_steps(shapes, 40, 4, 0)
    images = {name: (getattr(rows, name) * 60.0 + 128.0).clamp(0.0, 255.0) for name in ("obs", "next_obs")}
    return {
        **shapes,
        "settings": {"checkpoint_path": str(folder / "fitted")},
        "experience": StepBatch(**{**rows.parts(), **images}),
    }


SPECIAL: dict[str, dict] = {
    "airl": {"prepare": knows_the_policy},
    "gcl": {"prepare": knows_the_policy},
    "drex": {"prepare": has_rankings},
    "ensemble": {"settings": {"member": {"type": "gail", "batch_size": 16, "update_per_collect": 2}}},
    "her": {"settings": {"goal_size": 1, "tolerance": 0.5}},
}
"""Name in the table -> arguments of the check, for models that need more than the usual ones."""


EXPENSIVE = ("ensemble", "image_success", "pwil")
"""Models that `make test` checks with continuous actions alone."""


@pytest.mark.parametrize(
    ("name", "discrete"),
    [
        pytest.param(
            name,
            discrete,
            id=f"{name}-{'discrete' if discrete else 'continuous'}",
            marks=[pytest.mark.slow] if discrete and name in EXPENSIVE else [],
        )
        for name in sorted(REWARD_MODELS)
        for discrete in (True, False)
    ],
)
def test_every_model_of_the_table_passes(name, discrete, tmp_path):
    special = of_images(tmp_path, discrete) if name == "image_success" else SPECIAL.get(name, {})
    found = check_reward_model(name, **{"discrete_actions": discrete, **special})
    assert {"learning", "list form", "purity", "saving", "empty", "large", "NaN"} <= found.keys()
    assert found["empty"].startswith(("error: ", "an empty list"))


def test_a_plugin_from_the_page_passes():
    found = check_reward_model(PageRewardModel, SETTINGS)
    assert found["independence"] and "devices" not in found


def test_a_model_is_left_as_it_was():
    model = create_reward_model({"type": "gail", "obs_shape": 3, "action_size": 5})
    model.load_expert_data(
        [synthetic_steps({"obs_shape": 3, "action_size": 5, "discrete_actions": True}, 9, 1, 0)]
    )
    before = model.state_dict()
    check_reward_model(model)
    after = model.state_dict()
    assert after["train_iter"] == 0 and len(model.experience) == 0
    assert all(torch.equal(part, after["network"][name]) for name, part in before["network"].items())


def test_a_model_without_settings_is_asked_for_its_class():
    class Bare(PageRewardModel):
        def __init__(self):
            pass

    with pytest.raises(ConfigError, match="give its class"):
        check_reward_model(Bare())


# Planted faults


class WrongLength(PageRewardModel):
    def estimate(self, data):
        return super().estimate(data)[1:]


class TwoNumbers(PageRewardModel):
    def estimate(self, data):
        return [{**item, "reward": torch.zeros(2)} for item in data]


class Nothing(PageRewardModel):
    def estimate(self, data):
        super().estimate(data)


class LosesKeys(PageRewardModel):
    def estimate(self, data):
        return [{"reward": item["reward"]} for item in super().estimate(data)]


class ChangesObservations(PageRewardModel):
    def estimate(self, data):
        return [{**item, "obs": item["obs"] * 2.0} for item in super().estimate(data)]


class ScalesInPlace(PageRewardModel):
    def collect_data(self, data):
        for item in data:
            item["obs"].mul_(0.5)
        super().collect_data(data)


class MinMax(PageRewardModel):
    def estimate(self, data):
        items = super().estimate(data)
        values = torch.stack([item["reward"] for item in items])
        low, high = values.min(), values.max()
        return [{**item, "reward": (item["reward"] - low) / (high - low)} for item in items]


class Counting(PageRewardModel):
    def estimate(self, data):
        self.train_iter += 1
        return super().estimate(data)


class Noisy(PageRewardModel):
    def estimate(self, data):
        return [{**item, "reward": item["reward"] + next(self.noise)} for item in super().estimate(data)]

    noise = iter(np.random.default_rng(0).random(1_000_000).tolist())


class TorchRandom(PageRewardModel):
    def estimate(self, data):
        torch.rand(1)
        return super().estimate(data)


class PythonRandom(PageRewardModel):
    def estimate(self, data):
        random.random()
        return super().estimate(data)


class CrashesOnNothing(GAIL):
    def estimate(self, data):
        if isinstance(data, list):
            assert data[0] is not None
        return super().estimate(data)


class HidesNaN(PageRewardModel):
    def estimate(self, data):
        return [{**item, "reward": item["reward"].nan_to_num()} for item in super().estimate(data)]


class ForgetsStatistics(PageRewardModel):
    """Scales by a deviation that is kept where saving does not look."""

    def collect_data(self, data):
        super().collect_data(data)
        self.spread = [float(torch.stack([item["obs"] for item in data]).std())]

    def estimate(self, data):
        spread = getattr(self, "spread", [1.0])[0] * 3.0
        return [{**item, "reward": item["reward"] / spread} for item in super().estimate(data)]


class InfiniteReward(PageRewardModel):
    def estimate(self, data):
        return [{**item, "reward": item["reward"] / 0.0} for item in super().estimate(data)]


@pytest.mark.parametrize(
    ("cls", "complaint"),
    [
        (WrongLength, "estimate of 40 transitions returns 39 of them"),
        (TwoNumbers, r"rewards must be one number each, not \[2\]"),
        (Nothing, "estimate of a list returns a NoneType"),
        (LosesKeys, r"estimate loses \['obs'\]"),
        (ChangesObservations, r"estimate changes \['obs'\] of the transitions, not only the reward"),
        (ScalesInPlace, "collect_data changes what it is given"),
        (MinMax, "depends on what else is in its batch"),
        (Counting, r"estimate changes \['train_iter'\] of the model's state"),
        (Noisy, "other rewards the second time"),
        (TorchRandom, "draws from a global random generator"),
        (PythonRandom, "draws from a global random generator"),
        (HidesNaN, "NaN gets a reward all the same"),
        (ForgetsStatistics, "missing from state_dict"),
        (InfiniteReward, "rewards that are not finite numbers"),
    ],
)
def test_faults_of_plugins(cls, complaint):
    with pytest.raises(RewardModelError, match=f"{cls.__name__}: .*{complaint}"):
        check_reward_model(cls, SETTINGS)


class WrongShape(GAIL):
    def rewards(self, batch: StepBatch) -> torch.Tensor:
        return super().rewards(batch).flatten()


class LearnsWhileScoring(GAIL):
    def rewards(self, batch: StepBatch) -> torch.Tensor:
        self.obs_statistics.update(batch.obs.flatten(0, -2))
        return super().rewards(batch)


class KeepsBehind(GAIL):
    """Has something that `to_device` does not know."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.offset = Seen(torch.ones(3))


class ForgetsOwnStatistics(GAIL):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.reward_statistics = Statistics()

    def collect_data(self, data) -> None:
        super().collect_data(data)
        self.reward_statistics.update(data.next_obs)

    def rewards(self, batch: StepBatch) -> torch.Tensor:
        return super().rewards(batch) / self.reward_statistics.deviation * 2.0

    def to_device(self, device) -> None:
        super().to_device(device)
        self.reward_statistics.to(device)


class ForgetsItsGenerator(GAIL):
    def load_own_state(self, state) -> None:
        self.own = torch.Generator().manual_seed(1 + len(self.experts))

    def sample_batches(self, num_updates):
        own = self.__dict__.setdefault("own", torch.Generator().manual_seed(0))
        for expert, policy, between in super().sample_batches(num_updates):
            yield expert, policy + torch.randn(policy.shape, generator=own), between


@dataclasses.dataclass
class Seen:
    count: torch.Tensor


class Streams(ZooModel):
    """The reward is the number of the step within its episode, counted over the calls."""

    history_dependent = True
    resets_memory, changes_memory = False, False

    def make_network(self) -> RewardNetwork:
        return RewardNetwork()

    def initial_state(self, num_streams: int) -> Seen:
        return Seen(torch.zeros(num_streams))

    def rewards(self, batch: StepBatch) -> torch.Tensor:
        streams = batch.streams()
        return self.stream_rewards(streams, self.initial_state(streams.shape[1]))[0].view(batch.shape)

    def stream_rewards(self, batch: StepBatch, memory: Seen) -> tuple[torch.Tensor, Seen]:
        count = torch.zeros(batch.shape[1]) if self.resets_memory else memory.count
        rewards = []
        for done in batch.done:
            rewards.append(count.clone())
            count = torch.where(done, torch.zeros(()), count + 1.0)
        if self.changes_memory:
            memory.count.add_(1.0)
        return torch.stack(rewards), Seen(count)


class ForgetfulStreams(Streams):
    resets_memory = True


class ChangingStreams(Streams):
    changes_memory = True


def test_streams_pass():
    assert check_reward_model(Streams)["tensor form"] == "[N] and [T, N], scored as streams"


@pytest.mark.parametrize(
    ("cls", "complaint"),
    [
        (CrashesOnNothing, r"estimate\(\[\]\) ends in IndexError"),
        (WrongShape, r"score of transitions \[40, 4\] has shape \[160\]|for transitions of"),
        (LearnsWhileScoring, r"estimate changes \['statistics'\]"),
        (KeepsBehind, "to_device leaves `offset` where it was"),
        (ForgetsOwnStatistics, "gives other rewards: something that scoring depends on"),
        (ForgetsItsGenerator, "learns on differently"),
        (ForgetfulStreams, "in two pieces differs"),
        (ChangingStreams, "changes the state"),
    ],
)
def test_faults_of_models(cls, complaint):
    with pytest.raises(Exception, match=complaint) as caught:
        check_reward_model(cls)
    assert "Error" in type(caught.value).__name__ and type(caught.value).__module__.startswith("guerdon.")


def test_an_estimate_in_place_passes_with_a_notice():
    report = check_reward_model(InPlaceRewardModel, SETTINGS)
    assert "notice: estimate edits its input" in str(report)
    assert "notice" not in str(check_reward_model(PageRewardModel, SETTINGS))
