"""HER: goals in hindsight by hand, episodes in pieces, and bits that DQN alone does not learn to flip."""

import copy

import numpy as np
import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.steps import RunningEpisodes
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.rewards.zoo.her import steps_in_hindsight
from guerdon.training.serial import serial_pipeline_reward_model_onpolicy
from tests.rewards.zoo.zoo_tasks import controls, run, task, zoo_config

WALK = {"type": "her", "obs_shape": 3, "action_size": 2, "tolerance": 0.1}


def made(**settings):
    return create_reward_model({**WALK, "goal_size": 1, **settings})


def walk(length: int, start: float = 0.0) -> StepBatch:
    """One step to the right at a time, with a goal that is never reached; flat [place, achieved, wanted]."""
    place = start + torch.arange(length + 1.0)
    seen = torch.stack([place, place, torch.full_like(place, -9.0)], 1)
    last = torch.arange(length) == length - 1
    return StepBatch(
        obs=seen[:-1],
        actions=torch.ones(length, dtype=torch.int64),
        next_obs=seen[1:],
        env_rewards=torch.full((length,), -1.0),
        terminated=torch.zeros(length, dtype=torch.bool),
        truncated=last,
    )


def items_of(episode: StepBatch) -> list[dict]:
    def as_dict(obs):
        place, achieved, wanted = (np.array([float(each)], np.float32) for each in obs)
        return {"observation": place, "achieved_goal": achieved, "desired_goal": wanted}

    return [
        {
            "obs": as_dict(episode.obs[t]),
            "action": int(episode.actions[t]),
            "reward": float(episode.env_rewards[t]),
            "next_obs": as_dict(episode.next_obs[t]),
            "done": bool(episode.done[t]),
        }
        for t in range(len(episode))
    ]


@pytest.mark.parametrize("strategy", ["future", "episode", "final"])
def test_goals_come_from_the_right_part_of_the_episode(strategy):
    lengths = [3, 1, 4]
    first, last = torch.tensor([0] * 3 + [3] + [4] * 4), torch.tensor([2] * 3 + [3] + [7] * 4)
    low = {"future": torch.arange(8), "episode": first, "final": last}[strategy]
    drawn = torch.stack(
        [steps_in_hindsight(lengths, strategy, torch.Generator().manual_seed(n)) for n in range(400)]
    )
    assert torch.equal(drawn.amin(0), low)  # all choices are drawn, and no others
    assert torch.equal(drawn.amax(0), last)


def test_copies_want_what_was_achieved_and_are_paid_for_it():
    episodes = [walk(5), walk(3, start=20.0)]
    before = copy.deepcopy(episodes)
    model = made(k=3)
    new = model.augment(episodes)
    assert new.shape == (24,)
    wanted = new.next_obs[:, 2]
    assert torch.equal(new.obs[:, 2], wanted)
    reached = new.next_obs[:, 1]
    assert (wanted >= reached).all()  # `future`: later, and so further to the right
    assert torch.equal(new.env_rewards, torch.where(wanted == reached, 0.0, -1.0))
    assert 0.0 < (new.env_rewards == 0.0).float().mean() < 1.0
    rows = StepBatch.cat(before)
    for part in ("obs", "next_obs"):
        assert torch.equal(getattr(new, part)[:, :2], getattr(rows, part)[:, :2].repeat(3, 1))
    for old, kept in zip(before, episodes, strict=True):
        assert torch.equal(old.obs, kept.obs) and torch.equal(old.env_rewards, kept.env_rewards)
    final = made(strategy="final", k=3).augment(episodes)
    assert final.next_obs[:, 2].tolist() == [5.0] * 5 + [23.0] * 3
    assert torch.nonzero(final.env_rewards == 0.0).flatten().tolist() == [4, 7]


def test_a_list_of_dicts_comes_back_as_new_dicts_with_the_goals_of_its_own_end():
    items = items_of(walk(4))
    untouched = copy.deepcopy(items)
    model = create_reward_model({**WALK, "strategy": "final"})  # the goal's size is found in the dicts
    new = model.estimate(items)
    assert str(items) == str(untouched)
    assert [item["reward"] for item in new] == [-1.0, -1.0, -1.0, 0.0]
    for item, old in zip(new, items, strict=True):
        for key in ("obs", "next_obs"):
            assert item[key]["desired_goal"].dtype == np.float32 and item[key]["desired_goal"] == [4.0]
            assert item[key]["observation"] is old[key]["observation"]
        assert item["done"] is old["done"] and item["action"] == 1
    assert str(model.estimate(items)) == str(new)
    flat = made(strategy="final").estimate(walk(4))
    assert flat.env_rewards.tolist() == [-1.0, -1.0, -1.0, 0.0] and flat.obs[:, 2].tolist() == [4.0] * 4


def test_streams_side_by_side_keep_to_their_own_episodes():
    streams = [walk(4), walk(4, start=10.0)]
    parts = {name: torch.stack([getattr(each, name) for each in streams], 1) for name in streams[0].parts()}
    new = made(strategy="final").estimate(StepBatch(**parts))
    assert new.next_obs[:, :, 2].tolist() == [[4.0, 14.0]] * 4
    assert new.env_rewards.tolist() == [[-1.0, -1.0]] * 3 + [[0.0, 0.0]]


def test_episodes_that_come_in_pieces_are_put_together():
    whole = [walk(7), walk(2, start=50.0), walk(5)]
    stream = StepBatch.cat(whole).streams()
    running, found = RunningEpisodes(1), []
    for rows in (slice(0, 3), slice(3, 8), slice(8, 14)):
        found += running.add(stream[rows])
    assert len(found) == 3
    for mine, original in zip(found, whole, strict=True):
        for name, part in original.parts().items():
            assert torch.equal(getattr(mine, name), part), name


def test_the_environment_says_what_a_goal_pays_and_when_it_ends():
    env = task("guerdon/BitFlip-v0", 2, num_bits=3)
    model = create_reward_model({"type": "her", "obs_shape": 9, "action_size": 3, "strategy": "final"})
    model.bind_env(env)
    assert model.goal_size == 3

    class Ends:
        def compute_reward(self, achieved, desired, info):
            return np.where((achieved == desired).all(-1), 7.0, 0.0)

        def compute_terminated(self, achieved, desired, info):
            return (achieved == desired).all(-1)

    other = made(strategy="final", tolerance=None)
    other.rules = Ends()
    new = other.augment([walk(3)])
    assert new.env_rewards.tolist() == [0.0, 0.0, 7.0] and new.terminated.tolist() == [False, False, True]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="strategy"):
        made(strategy="futur")
    with pytest.raises(ConfigError, match="no room for two goals"):
        made(goal_size=2)
    with pytest.raises(ConfigError, match="tolerance"):
        made(tolerance=None).augment([walk(3)])
    with pytest.raises(DataError, match="desired_goal"):
        create_reward_model(WALK).estimate([{**items_of(walk(1))[0], "obs": np.zeros(3)}])
    with pytest.raises(ConfigError, match="not goal-conditioned"):
        made().bind_env(task("guerdon/FixedCartPole-v0"))
    settings = zoo_config("bit_flip_her")
    settings["learner"] = {"algorithm": "ppo"}
    with pytest.raises(ConfigError, match="dqn or sac"):
        serial_pipeline_reward_model_onpolicy(settings)


# The outcome: bits


@pytest.mark.outcome
@pytest.mark.slow
def test_bits_are_flipped_as_wanted_with_hindsight_and_not_without():
    settings = {**zoo_config("bit_flip_her"), "stop_value": -5.6}  # of -5, where every bit is flipped once
    learned = run(settings)
    solved = learned.evaluations[-1][2].success_at_end
    own = {**settings, "mix": {"combine_mode": "add"}}  # the environment's reward, and nothing added to it
    without = {
        **controls(settings, learned),
        "the environment's reward": controls(own, learned, ("zero",), hidden=False)["zero"],
    }
    best = {
        name: max(each.success_at_end or 0.0 for _, _, each in result.evaluations)
        for name, result in without.items()
    }
    print(f"{learned.env_steps} steps: {solved}, without {best}")
    assert solved is not None and solved >= 0.9, (solved, best)
    assert max(best.values()) < 0.2, best
