"""Rollouts: what is valued, what is counted, and training rewards beside the environment's."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from guerdon.core.batches import Rollout
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.tabletop.env import TabletopVectorEnv
from guerdon.training.env_worker import RolloutCollector
from tests.agents.cartpoles import CARTPOLE, SAME_STEP, cartpoles, learner


def test_final_observations_are_valued_and_the_next_episode_is_not():
    """Values that tell which episode an observation is of: final values must be those of the old one."""

    class Counter(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        episode = -1

        def reset(self, *, seed=None, options=None):
            self.episode, self.steps = self.episode + 1, 0
            return np.array([self.episode, 0.0]), {}

        def step(self, action):
            self.steps += 1
            obs, over = np.array([self.episode, float(self.steps)]), self.steps == 3
            even = self.episode % 2 == 0
            return obs, float(self.steps), over and even, over and not even, {"success": self.steps == 2}

    class Reader:
        def step(self, obs):
            actions = torch.zeros(2, 1)
            return actions.numpy(), actions, torch.zeros(2), self.values(obs)

        def values(self, obs):
            return obs["state"][:, 0] * 10 + obs["state"][:, 1]

    seen = []
    collector = RolloutCollector(SyncVectorEnv([Counter] * 2, autoreset_mode=SAME_STEP), 7)
    collector.reset(0)
    rollout = collector.collect(Reader(), lambda t, obs, done, info: seen.append((t, obs, done)))
    assert rollout.values[:, 0].tolist() == [0, 1, 2, 10, 11, 12, 20]
    assert rollout.final_values[:, 1].tolist() == [0, 0, 0, 0, 0, 13, 0]  # episode 1 was truncated, 0 ended
    assert rollout.last_values.tolist() == [21, 21]
    assert rollout.terminated[:, 0].nonzero().flatten().tolist() == [2]
    assert rollout.truncated[:, 0].nonzero().flatten().tolist() == [5]
    assert rollout.success[:, 0].tolist() == [False, True, False, False, True, False, False]
    assert [obs[0].tolist() for _, obs, _ in seen][2] == [0.0, 3.0]
    records = collector.pop_episodes()
    assert len(records) == 4 and collector.episodes.records == []
    assert {(r.env_return, r.length, r.success_once, r.success_at_end) for r in records} == {
        (6.0, 3, True, False)
    }
    assert collector.collect(Reader()).values[:3, 0].tolist() == [21, 22, 30]  # goes on where it stopped


def test_tabletop_success_comes_from_the_final_info():
    from guerdon.envs import ScriptedExpert

    expert = ScriptedExpert(noise=0.0, seed=0)

    class Expert:
        def step(self, obs):
            actions = expert.act(obs["state"].numpy())
            return actions, torch.from_numpy(actions), torch.zeros(8), torch.zeros(8)

        def values(self, obs):
            return torch.zeros(len(obs["state"]))

    collector = RolloutCollector(TabletopVectorEnv(8, autoreset_mode=SAME_STEP), 50)
    collector.reset(0)
    rollout = collector.collect(Expert())
    records = collector.pop_episodes()
    assert len(records) == 8
    assert all(record.success_at_end and record.length == 50 for record in records)
    assert rollout.success[-1].all() and not rollout.success[0].any()


def some_rollout() -> Rollout:
    env = cartpoles(4)
    collector = RolloutCollector(env, 8)
    collector.reset(0)
    rollout = collector.collect(learner(env, CARTPOLE))
    env.close()
    return rollout


def test_update_rewards_changes_the_training_rewards_alone():
    rollout = some_rollout()
    env_rewards = rollout.env_rewards.clone()
    assert torch.equal(rollout.training_rewards, env_rewards)
    given = np.full((8, 4), 0.25, np.float32)
    rollout.update_rewards(given)
    given[:] = 9.0
    assert torch.equal(rollout.training_rewards, torch.full((8, 4), 0.25))
    assert torch.equal(rollout.env_rewards, env_rewards)


@pytest.mark.parametrize(
    ("value", "complaint"), [(np.zeros((4, 8)), "shape"), (np.full((8, 4), np.nan), "finite")]
)
def test_wrong_training_rewards_are_refused(value: Any, complaint: str):
    with pytest.raises(DataError, match=complaint):
        some_rollout().update_rewards(value)


def test_collectors_refuse_what_loses_final_observations():
    with pytest.raises(ConfigError, match="SAME_STEP"):
        RolloutCollector(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"), 8)
    env = cartpoles(2)
    with pytest.raises(DataError, match="reset"):
        RolloutCollector(env, 8).collect(learner(env, CARTPOLE))
    env.close()


def test_a_rollout_knows_the_step_within_each_episode():
    env = cartpoles(3)
    ppo, collector = learner(env, CARTPOLE), RolloutCollector(env, 40)
    collector.reset(0)
    before = np.zeros(3, np.int64)
    for _ in range(3):  # episodes go on from rollout to rollout
        rollout = collector.collect(ppo)
        for done, elapsed in zip(rollout.terminated | rollout.truncated, rollout.elapsed, strict=True):
            assert elapsed.tolist() == before.tolist()
            before = np.where(done.numpy(), 0, before + 1)
    env.close()
