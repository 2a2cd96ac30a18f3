"""The ensemble: mean less deviation, members of their own; test_imitation_outcomes.py has policies."""

from dataclasses import replace

import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import create_reward_model
from tests.rewards.zoo.test_gail import SHAPES, rows


def ensemble(member=None, **settings):
    member = {"type": "gail", "update_per_collect": 20, **(member or {})}
    return create_reward_model({"type": "ensemble", **SHAPES, "member": member, **settings})


def taught(**settings):
    made = ensemble(**settings)
    made.load_expert_data([rows(30, 1)])
    made.collect_data(rows(30, 2))
    return made


def test_the_reward_is_the_mean_less_the_deviation():
    made, batch = taught(size=2, disagreement_weight=0.7), rows()
    first, second = (each.estimate(batch).env_rewards for each in made.members)
    assert not torch.equal(first, second)  # seeds of their own
    wanted = (first + second) / 2 - 0.7 * (first - second).abs() / 2  # of two, half their distance
    torch.testing.assert_close(made.estimate(batch).env_rewards, wanted)


def test_it_doubts_what_it_has_not_seen():
    made = taught(size=4)
    near, far = rows(30, 2), replace(rows(30, 2), obs=5.0 * rows(30, 2).obs)
    for _ in range(20):
        reported = made.train()
    assert reported["disagreement"] == pytest.approx(float(made.score(near).disagreement.mean()), rel=0.2)
    assert made.score(far).disagreement.mean() > 1.5 * made.score(near).disagreement.mean()


def test_saving_keeps_every_member(tmp_path):
    made, batch = taught(), rows()
    made.train()
    made.save(tmp_path / "model.pt")
    other = ensemble()
    assert not torch.equal(other.estimate(batch).env_rewards, made.estimate(batch).env_rewards)
    other.load(tmp_path / "model.pt")
    assert torch.equal(other.estimate(batch).env_rewards, made.estimate(batch).env_rewards)
    with pytest.raises(DataError, match="3 members"):
        ensemble(size=2).load(tmp_path / "model.pt")


def test_data_reaches_and_leaves_all_members():
    made = taught()
    assert [len(each.experience) for each in made.members] == [30, 30, 30]
    made.clear_data(1)
    assert [len(each.experience) for each in made.members] == [0, 0, 0]
    made.policy_log_probs = known = lambda obs, actions: torch.zeros(len(obs))
    assert all(each.policy_log_probs is known for each in made.members)


def test_what_cannot_be_a_member_is_refused():
    with pytest.raises(ConfigError, match="no ensembles"):
        create_reward_model(
            {"type": "ensemble", **SHAPES, "member": {"type": "ensemble", "member": {"type": "gail"}}}
        )
    with pytest.raises(ConfigError, match="seed"):
        ensemble({"seed": 3})
    with pytest.raises(ConfigError, match="type is missing"):
        create_reward_model({"type": "ensemble", **SHAPES})
