"""GAIL: its formulas, and its default form; test_imitation_outcomes.py has what policies learn from it."""

import math
from dataclasses import replace

import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.rewards.zoo.base import INPUTS
from guerdon.rewards.zoo.gail import Discriminator, accuracy, cross_entropy, reward_of
from tests.rewards.zoo import zoo_tasks

SHAPES = {"obs_shape": 2, "action_size": 2, "discrete_actions": True}


def rows(count=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return StepBatch(
        obs=torch.randn(count, 2, generator=draw),
        actions=torch.randint(2, (count,), generator=draw),
        next_obs=torch.randn(count, 2, generator=draw),
        env_rewards=torch.full((count,), math.nan),
        terminated=torch.zeros(count, dtype=torch.bool),
        truncated=torch.arange(count) == count - 1,
    )


def model(**settings):
    made = create_reward_model({"type": "gail", **SHAPES, **settings})
    made.load_expert_data([rows(30, 1)])
    made.collect_data(rows(30, 2))
    return made


def test_reward_forms_are_the_papers():
    logits = torch.tensor([-2.0, 0.0, 3.0])
    expert = 1.0 / (1.0 + torch.exp(-logits))  # D
    torch.testing.assert_close(reward_of(logits, "positive"), -torch.log(1.0 - expert))
    torch.testing.assert_close(reward_of(logits, "negative"), torch.log(expert))
    torch.testing.assert_close(reward_of(logits, "logit"), torch.log(expert) - torch.log(1.0 - expert))


def test_cross_entropy_by_hand():
    logits = torch.tensor([2.0, -1.0, 0.5, -3.0])  # two of the expert, two of the policy
    expert = torch.sigmoid(logits)
    wanted = -(expert[0].log() + expert[1].log() + (1 - expert[2]).log() + (1 - expert[3]).log()) / 4
    torch.testing.assert_close(cross_entropy(logits), wanted)
    assert accuracy(logits) == 0.5


def test_gradient_penalty_by_hand():
    network = Discriminator(2, (), gradient_penalty=3.0)
    with torch.no_grad():
        network.layers[0].weight.copy_(torch.tensor([[3.0, 4.0]]))  # the gradient has norm 5 everywhere
    expert, policy = torch.zeros(2, 2), torch.zeros(2, 2)
    loss = network.learn(expert, policy, torch.full((2, 1), 0.5))
    assert loss.item() == pytest.approx(math.log(2.0) + 3.0 * (5.0 - 1.0) ** 2)


@pytest.mark.parametrize("inputs", INPUTS)
def test_it_sees_its_inputs_and_nothing_else(inputs):
    gail, batch = model(inputs=inputs), rows()
    before = gail.estimate(batch).env_rewards
    changes = {"obs": batch.obs + 1.0, "actions": 1 - batch.actions, "next_obs": batch.next_obs + 1.0}
    for name, part in changes.items():
        seen = name.removesuffix("s") in INPUTS[inputs] or name in INPUTS[inputs]
        after = gail.estimate(replace(batch, **{name: part})).env_rewards
        assert bool((after != before).all()) == seen


@pytest.mark.parametrize("form", ["logit", "positive", "negative"])
def test_learning_raises_the_experts_reward_above_the_policys(form):
    gail = create_reward_model({"type": "gail", **SHAPES, "reward_form": form, "update_per_collect": 100})
    expert, policy = rows(50, 1), rows(50, 2)
    expert = replace(expert, obs=expert.obs.abs())
    gail.load_expert_data([expert])
    gail.collect_data(replace(policy, obs=-policy.obs.abs()))
    reported = gail.train()
    assert reported["accuracy"] > 0.9
    of_expert = gail.estimate(expert).env_rewards.mean()
    assert of_expert > gail.estimate(replace(policy, obs=-policy.obs.abs())).env_rewards.mean() + 0.5


def test_the_scale_is_the_experts_and_scoring_leaves_it():
    gail = model()
    mean = gail.obs_statistics.mean.clone()
    torch.testing.assert_close(mean.float(), rows(30, 1).next_obs.mean(0))
    gail.collect_data(rows(30, 3))
    gail.estimate(rows(4, 4))
    assert torch.equal(gail.obs_statistics.mean, mean)


def test_demonstrations_that_do_not_fit_are_refused():
    gail = create_reward_model({"type": "gail", **SHAPES})
    with pytest.raises(ConfigError, match="no demonstrations"):
        gail.collect_data(rows())
        gail.train()
    with pytest.raises(DataError, match="observations have 1 numbers"):
        gail.load_expert_data([replace(rows(), obs=torch.zeros(4, 1), next_obs=torch.zeros(4, 1))])
    with pytest.raises(DataError, match="real numbers"):
        gail.load_expert_data([replace(rows(), actions=torch.zeros(4, 2))])


def ended(length, terminated, seed=0):
    """An episode that ends by itself, or at a time limit."""
    made = rows(length, seed)
    return replace(made, terminated=made.truncated & terminated, truncated=made.truncated & (not terminated))


@pytest.mark.parametrize(
    ("ends", "form"),
    [
        ([(5, False), (9, False)], "positive"),  # the data ends, the expert goes on
        ([(9, True), (9, True), (7, True)], "positive"),  # a time limit that the data calls an end
        ([(5, True), (9, True), (7, True)], "logit"),  # the expert gets something done
    ],
)
def test_the_form_follows_from_how_demonstrations_end(ends, form, caplog):
    gail = create_reward_model({"type": "gail", **SHAPES})
    with caplog.at_level("INFO"):
        gail.load_expert_data([ended(length, terminated) for length, terminated in ends])
    assert gail.reward_form == form and f"reward_form: {form}, because" in caplog.text
    batch = rows()
    logits = gail.network(gail.features(batch))
    torch.testing.assert_close(gail.estimate(batch).env_rewards, reward_of(logits, form).detach())
    given = create_reward_model({"type": "gail", **SHAPES, "reward_form": "negative"})
    given.load_expert_data([ended(*each) for each in ends])
    assert given.reward_form == "negative"


def test_a_saved_model_keeps_its_form():
    first = create_reward_model({"type": "gail", **SHAPES})
    first.load_expert_data([ended(5, True), ended(9, True), ended(7, True)])
    again = create_reward_model({"type": "gail", **SHAPES})
    again.load_state_dict(first.state_dict())
    assert again.reward_form == "logit"
    older = {key: value for key, value in first.state_dict().items() if key != "reward_form"}
    older["settings"] = older["settings"].replace('"auto"', '"logit"')
    again = create_reward_model({"type": "gail", **SHAPES})
    again.load_state_dict(older)
    assert again.reward_form == "logit"


@pytest.mark.outcome
@pytest.mark.slow
def test_the_default_form_beats_the_zero_reward_where_episodes_end_early():
    """`logit` stayed at 11 of 500 on CartPole-v1: while its rewards are negative, falling early pays."""
    settings = {**zoo_tasks.zoo_config("cartpole_gail"), "stop_value": 300.0}
    settings["reward_model"] = {
        key: value for key, value in settings["reward_model"].items() if key != "reward_form"
    }
    demonstrations = [  # as in files with `dones` alone: the time limit looks like an end
        replace(each, terminated=each.done, truncated=torch.zeros_like(each.truncated))
        for each in zoo_tasks.experts("CartPole-v1", 10)
    ]
    found = zoo_tasks.run(settings, demonstrations=demonstrations)
    zoo_tasks.assert_taught(settings, found, target=300.0, far=150.0)
