"""A function as the reward of an agent: scored like any other reward, and not saved."""

import numpy as np
import pytest

import guerdon as gd
from guerdon.config import load_tree
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards.image.function import FunctionScorer
from guerdon.training.trainer import EmbodiedRunner
from tests.api.dot import SIZE, Dot

PPO = {"num_envs": 4, "n_steps": 16, "batch_size": 32, "net_arch": (16,), "seed": 1}
SAC = {"learning_starts": 16, "batch_size": 16, "net_arch": (16,), "iteration_steps": 32}


def nearness(frames):
    """0 where the square is in the middle, -1 at the sides."""
    assert frames.dtype == np.uint8 and frames.shape[1:] == (SIZE, SIZE, 3)
    columns = (frames[..., 0] > 200).any(axis=1).argmax(axis=1)
    return -np.abs(columns - (SIZE - 8) / 2) / ((SIZE - 8) / 2)


def metrics_of(agent, steps):
    kept = []
    agent.learn(steps, callbacks=lambda step: kept.append(step.metrics), progress=False)
    return kept


def test_ppo_learns_from_a_function_of_frames_alone():
    agent = gd.PPO(Dot, reward=nearness, **PPO)
    assert agent.reward_model is nearness
    before = agent.evaluate(20).env_return
    seen = metrics_of(agent, 1_280)
    assert seen[0]["rollout/rewards"] == pytest.approx(seen[0]["rollout/learned_rewards"])
    assert -1 <= seen[0]["rollout/learned_rewards"] < seen[-1]["rollout/learned_rewards"] <= 0
    assert agent.evaluate(20).env_return > before
    assert "monitor/reward_collapse" in seen[-1]  # the monitor watches it as a model that gives rewards
    assert "reward/fire_rate" not in seen[-1]  # nothing fires: these are no probabilities


def test_settings_that_combine_rewards_hold_for_functions():
    agent = gd.PPO(Dot, reward=nearness, combine_mode="weighted", reward_weight=2.0, **PPO)
    (seen,) = metrics_of(agent, 64)
    assert seen["rollout/rewards"] == pytest.approx(2 * seen["rollout/learned_rewards"], rel=1e-5)
    (seen,) = metrics_of(gd.PPO(Dot, reward=nearness, control="off", **PPO), 64)
    assert seen["rollout/rewards"] == 0 and seen["reward/frames_scored"] == 0


@pytest.mark.parametrize("make", [gd.PPO, gd.SAC])
def test_going_on_needs_the_function_again(make, checkpoint, tmp_path):
    settings = PPO if make is gd.PPO else SAC
    agent = make(Dot, reward=nearness, **settings).learn(64, progress=False)
    agent.save(tmp_path / "agent")
    with pytest.raises(ConfigError, match=r"trained on the function 'nearness'.*reward=function"):
        gd.load_agent(tmp_path / "agent", Dot)
    with pytest.raises(ConfigError, match="reward is another one: the agent was trained on the function"):
        gd.load_agent(tmp_path / "agent", Dot, reward=checkpoint)
    more = gd.load_agent(tmp_path / "agent", Dot, reward=nearness, num_envs=settings.get("num_envs"))
    assert more.learn(32, progress=False).num_steps > agent.num_steps == 64
    assert gd.load_agent(tmp_path / "agent").evaluate(2, env=Dot).episodes >= 2  # acting needs none


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_type": "binary"}, "reward_type is for fitted reward models: what the function 'nearness'"),
        ({"relabel_at": "sampling"}, "relabel_at is for fitted reward models"),
        ({"engine": "ray"}, "engine='ray' cannot be used with a reward function"),
        ({"reward": object()}, "reward must be a Reward, .* a function of frames or None, not object"),
        ({"reward": Dot}, "reward is the class Dot: give an instance of it"),
        ({"reward": "nowhere"}, "reward: there is no checkpoint at 'nowhere'"),
    ],
)
def test_what_a_function_cannot_do_is_said(settings, message):
    with pytest.raises(ConfigError, match=message):
        gd.PPO(Dot, **{"reward": nearness, **settings})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda frames: [1.0, 2.0, 3.0], r"a finite number for each of 64 frames, not \[3\]"),
        (lambda frames: np.full(len(frames), np.nan), "64 are not finite"),
        (lambda frames: "much", "a number for each of 64 frames, not 'much'"),
        (lambda frames: None, "a number for each of 64 frames, not None"),
    ],
)
def test_a_function_that_answers_wrongly_is_named(function, message):
    with pytest.raises(DataError, match=message):
        gd.PPO(Dot, reward=function, **PPO).learn(64, progress=False)


def test_a_function_is_refused_where_rewards_come_from_workers(tmp_path):
    section = {"use_reward_model": True, "reward_type": "continuous"}
    config = load_tree(
        {"reward": section, "learner": {"algorithm": "sac"}, "asynchronous": {"enabled": True}}
    )
    with pytest.raises(ConfigError, match=r"stays in this process.*asynchronous\.enabled=false"):
        EmbodiedRunner(config, tmp_path, reward_model=FunctionScorer(nearness))


def test_a_path_is_a_reward(checkpoint):
    (seen,) = metrics_of(gd.PPO(Dot, reward=checkpoint, **PPO), 64)
    assert 0 <= seen["reward/fire_rate"] <= 1


def test_prove_says_that_a_function_cannot_be_proved():
    agent = gd.PPO("guerdon/Tabletop-v0", reward=lambda frames: frames.mean(axis=(1, 2, 3)), num_envs=1)
    with agent, pytest.raises(ConfigError, match="its reward is a function"):
        gd.prove(agent)
