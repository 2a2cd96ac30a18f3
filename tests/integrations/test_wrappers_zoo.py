"""Reward models of the zoo behind the wrappers: what is scored, and what becomes of the reward."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import StepBatch, ZooModel, create_reward_model
from guerdon.wrappers import (
    GymVectorToSB3,
    LearnedRewardVecEnv,
    LearnedRewardVectorWrapper,
    LearnedRewardWrapper,
)
from tests.rewards.page_plugin import SETTINGS, InPlaceRewardModel
from tests.rewards.zoo.zoo_tasks import FIXED_CARTPOLE, experts, task


class Clock(gym.Env):
    """Observes the time; ends by itself after `length` steps, or is cut off."""

    observation_space = gym.spaces.Box(-1.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(3, start=1)

    def __init__(self, length: int = 3, cut: bool = False) -> None:
        self.length, self.cut, self.time = length, cut, 0

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.array([0.0], np.float32), {}

    def step(self, action):
        self.time += 1
        over = self.time == self.length
        obs = np.array([self.time], np.float32)
        return obs, 7.0, over and not self.cut, over and self.cut, {}


class Digits(ZooModel):
    """The reward spells the transition: obs, action, next_obs, ended by itself, cut off."""

    def rewards(self, batch: StepBatch) -> torch.Tensor:
        ends = batch.terminated.float() * 0.5 + batch.truncated.float() * 0.25
        return 100.0 * batch.obs[..., 0] + 10.0 * batch.actions + batch.next_obs[..., 0] + ends


class Counted(ZooModel):
    """The reward is the number of the step within its episode."""

    history_dependent = True

    def initial_state(self, num_streams):
        return torch.zeros(num_streams)

    def stream_rewards(self, batch, memory):
        (one,) = [memory.clone()]
        return one[None], torch.where(batch.done[0], torch.zeros(()), one + 1.0)


def digits(cls=Digits):
    return cls({"obs_shape": 1, "action_size": 3})


CLOCK = [11.0 + 0.0, 112.0, 213.5]
"""What `Digits` says of an episode of three steps in which action 2 (counted from 1) is always chosen."""


def test_one_environment():
    env = LearnedRewardWrapper(Clock(), digits())
    with pytest.raises(DataError, match="not been reset"):
        env.step(2)
    for _ in range(2):
        env.reset()
        seen = [env.step(2) for _ in range(3)]
        assert [reward for _, reward, *_ in seen] == CLOCK
        infos = [info for *_, info in seen]
        assert [info["learned_reward"] for info in infos] == CLOCK
        assert [info["env_reward"] for info in infos] == [7.0] * 3 and "prob_success" not in infos[0]
        assert [terminated for _, _, terminated, _, _ in seen] == [False, False, True]
    cut = LearnedRewardWrapper(Clock(cut=True), digits())
    cut.reset()
    assert [cut.step(2)[1] for _ in range(3)][-1] == 213.25


def vector(mode, lengths=(3, 2), cls=SyncVectorEnv):
    return cls([lambda length=length: Clock(length) for length in lengths], autoreset_mode=mode)


def play(env, steps, action=2):
    env.reset(seed=0)
    return np.array([env.step(np.full(env.num_envs, action))[1] for _ in range(steps)])


def test_vectors_that_reset_in_the_same_step():
    rewards = play(LearnedRewardVectorWrapper(vector(AutoresetMode.SAME_STEP), digits()), 6)
    assert rewards[:, 0].tolist() == CLOCK * 2
    assert rewards[:, 1].tolist() == [11.0, 112.5] * 3


def test_vectors_that_reset_in_the_next_step():
    env = LearnedRewardVectorWrapper(vector(AutoresetMode.NEXT_STEP), digits())
    rewards = play(env, 7)
    assert rewards[:, 0].tolist() == [*CLOCK, 0.0, *CLOCK]  # the step that only resets has no reward
    assert rewards[:, 1].tolist() == [11.0, 112.5, 0.0, 11.0, 112.5, 0.0, 11.0]


def test_vectors_that_the_caller_resets():
    env = LearnedRewardVectorWrapper(vector(AutoresetMode.DISABLED), digits())
    env.reset()
    rows = [env.step(np.array([2, 2]))[1] for _ in range(2)]
    env.reset(options={"reset_mask": np.array([False, True])})
    rows.append(env.step(np.array([2, 2]))[1])
    assert np.array(rows)[:, 0].tolist() == CLOCK and rows[2][1] == 11.0


def test_infos_of_vectors():
    env = LearnedRewardVectorWrapper(vector(AutoresetMode.SAME_STEP), digits())
    env.reset()
    *_, info = env.step(np.array([2, 3]))
    assert info["learned_reward"].tolist() == [11.0, 21.0] and info["env_reward"].tolist() == [7.0, 7.0]
    assert info["_learned_reward"].all()


def test_stable_baselines():
    env = LearnedRewardVecEnv(DummyVecEnv([Clock, lambda: Clock(2, cut=True)]), digits())
    env.reset()
    seen = [env.step(np.array([2, 2])) for _ in range(4)]
    assert [rewards[0] for _, rewards, *_ in seen] == [*CLOCK, 11.0]
    assert [rewards[1] for _, rewards, *_ in seen] == [11.0, 112.25] * 2
    info = seen[1][3][1]
    assert (info["learned_reward"], info["env_reward"]) == (112.25, 7.0)


# Memory


@pytest.mark.parametrize("wrap", ["single", "vector", "sb3"])
def test_models_keep_their_memory(wrap):
    if wrap == "single":
        env = LearnedRewardWrapper(Clock(), digits(Counted))
        found = []
        for _ in range(2):
            env.reset()
            found += [env.step(2)[1] for _ in range(3)]
    elif wrap == "vector":
        env = LearnedRewardVectorWrapper(vector(AutoresetMode.SAME_STEP), digits(Counted))
        found = play(env, 6)[:, 0].tolist()
    else:
        env = LearnedRewardVecEnv(DummyVecEnv([Clock]), digits(Counted))
        env.reset()
        found = [float(env.step(np.array([2]))[1][0]) for _ in range(6)]
    assert found == [0.0, 1.0, 2.0] * 2


def test_memory_needs_whole_episodes():
    late = LearnedRewardVectorWrapper(vector(AutoresetMode.NEXT_STEP), digits(Counted))
    with pytest.raises(ConfigError, match="autoreset_mode SAME_STEP"):
        play(late, 4)
    free = LearnedRewardVectorWrapper(vector(AutoresetMode.DISABLED), digits(Counted))
    play(free, 1)
    with pytest.raises(ConfigError, match="none can be reset before its end"):
        free.reset(options={"reset_mask": np.array([True, False])})


# Mixing


def test_mixing():
    fading = MixConfig(
        combine_mode="weighted",
        env_reward_weight=2.0,
        reward_weight=1.0,
        reward_weight_end=0.0,
        reward_weight_steps=4,
    )
    rewards = play(LearnedRewardVectorWrapper(vector(AutoresetMode.SAME_STEP), digits(), fading), 3)
    weights = np.array([1.0, 0.5, 0.0])  # two steps at a time
    assert rewards[:, 0].tolist() == (14.0 + weights * CLOCK).tolist()
    added = play(
        LearnedRewardVectorWrapper(vector(AutoresetMode.SAME_STEP), digits(), MixConfig(combine_mode="add")),
        2,
    )
    assert added[:, 0].tolist() == [18.0, 119.0]


def test_terminal_mode_rewards_the_last_step_alone():
    last = MixConfig(reward_mode="terminal", combine_mode="add")
    rewards = play(LearnedRewardVectorWrapper(vector(AutoresetMode.SAME_STEP), digits(), last), 6)
    assert rewards[:, 0].tolist() == [7.0, 7.0, 7.0 + CLOCK[-1]] * 2


def test_running_normalisation():
    env = LearnedRewardVectorWrapper(
        vector(AutoresetMode.SAME_STEP, (3, 3)), digits(), MixConfig(normalize=True)
    )
    rewards, so_far = play(env, 3), []
    for reward, raw in zip(rewards[:, 0], CLOCK, strict=True):
        so_far += [raw, raw]
        deviation = np.std(so_far)
        assert reward == pytest.approx(raw / deviation if deviation > 1e-8 else raw, rel=1e-5)


def test_settings_of_the_other_kind_are_refused():
    with pytest.raises(ConfigError, match="mixed by a MixConfig"):
        LearnedRewardWrapper(Clock(), digits(), RewardConfig())
    with pytest.raises(ConfigError, match="are for the zoo"):
        LearnedRewardWrapper(Clock(), object(), MixConfig())


# Models and learners


def test_goals_are_made_flat():
    model = create_reward_model(
        {"type": "her", "obs_shape": 9, "action_size": 3, "goal_size": 3, "tolerance": 0.5}
    )
    env = LearnedRewardVectorWrapper(task("guerdon/BitFlip-v0", 8, num_bits=3), model)
    env.reset(seed=0)
    seen = []
    for number in range(9):
        *_, info = env.step(np.full(8, number % 3))
        assert info["learned_reward"].tolist() == info["env_reward"].tolist()
        seen += info["env_reward"].tolist()
    assert set(seen) == {0.0, -1.0}


def test_other_dicts_are_refused():
    space = gym.spaces.Dict({"a": gym.spaces.Box(0.0, 1.0, (1,))})
    env = gym.wrappers.TransformObservation(Clock(), lambda obs: {"a": obs}, space)
    with pytest.raises(ConfigError, match="not a dict of a"):
        LearnedRewardWrapper(env, digits()).reset()


def test_a_plugin():
    env = LearnedRewardVectorWrapper(
        task(FIXED_CARTPOLE, 4), InPlaceRewardModel(_Section(SETTINGS), "cpu", _Logger())
    )
    env.reset(seed=0)
    _, rewards, *_ = env.step(np.zeros(4, np.int64))
    assert rewards.shape == (4,) and len(set(rewards.tolist())) == 4


class _Section(dict):
    __getattr__ = dict.__getitem__


class _Logger:
    def add_scalar(self, *args):
        pass


def gail():
    model = create_reward_model(
        {"type": "gail", "obs_shape": 4, "action_size": 2, "batch_size": 64, "update_per_collect": 5}
    )
    model.load_expert_data(experts(FIXED_CARTPOLE, 3))
    return model


def test_a_learner_of_stable_baselines_teaches_the_model():
    model = gail()
    obs = torch.from_numpy(task(FIXED_CARTPOLE, 4).reset(seed=0)[0])
    rows = StepBatch(
        obs=obs,
        actions=torch.zeros(4, dtype=torch.int64),
        next_obs=obs,
        env_rewards=torch.zeros(4),
        terminated=torch.zeros(4, dtype=torch.bool),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    before = model.rewards(rows)
    venv = LearnedRewardVecEnv(GymVectorToSB3(task(FIXED_CARTPOLE, 8)), model, train_every=256)
    learner = PPO("MlpPolicy", venv, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    learner.learn(1024)
    assert model.train_iter >= 4 * 5 and not torch.equal(before, model.rewards(rows))
    buffer = learner.rollout_buffer.rewards
    assert np.isfinite(buffer).all() and len(np.unique(buffer)) > 8
    assert not np.isin(buffer, [0.0, 1.0]).any()  # which is what the environment gives


def test_teaching_needs_every_step():
    env = LearnedRewardVectorWrapper(vector(AutoresetMode.NEXT_STEP), digits(), train_every=4)
    with pytest.raises(ConfigError, match="train_every needs"):
        play(env, 4)
