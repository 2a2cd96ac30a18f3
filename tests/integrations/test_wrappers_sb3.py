"""Stable-Baselines3: final frames are judged in spite of its resets, and PPO learns from that alone."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor

from guerdon.core.errors import ConfigError, DataError
from guerdon.envs import TabletopVectorEnv
from guerdon.wrappers import GymVectorToSB3, KeepFinalFrame, LearnedRewardVecEnv
from tests.integrations.test_wrappers import (
    LENGTH,
    CountingEnv,
    LockstepEnv,
    Reader,
    Recorder,
    actions,
    counting,
    ending_from,
    final_frames,
)


def makers(wrapper=lambda env: env, **settings):
    return [lambda number=number: wrapper(CountingEnv(number, **settings)) for number in range(2)]


def dummy(**settings):
    return DummyVecEnv(makers(**settings))


VENVS = {
    "dummy": dummy,
    "subprocesses": lambda: SubprocVecEnv(makers(), start_method="fork"),  # quick: nothing is imported again
    "rendered": lambda: dummy(wrapper=KeepFinalFrame, images=False, render_mode="rgb_array"),
    "adapter": lambda: GymVectorToSB3(counting()),
}


def states(obs):
    return (obs["state"] if isinstance(obs, dict) else obs).ravel().tolist()


@pytest.mark.parametrize("kind", VENVS)
def test_final_frames_are_judged_and_all_rewards_reported(kind):
    reader = Reader(combine_mode="add")
    venv = LearnedRewardVecEnv(VENVS[kind](), reader)
    assert states(venv.reset()) == [0, 80]
    results = [venv.step(actions(2)) for _ in range(LENGTH + 1)]
    venv.close()
    assert reader.calls == [[1, 81], [2, 82], [3, 83], [11, 91]]  # one call for all environments
    obs, training, done, infos = results[LENGTH - 1]
    assert states(obs) == [10, 90] and done.all()
    np.testing.assert_allclose(training, np.array([3, 83]) / 255 - 1, rtol=1e-6)
    assert training.dtype == np.float32
    for number, info in zip([3, 83], infos, strict=True):
        assert info["env_reward"] == -1.0
        assert info["learned_reward"] == info["prob_success"] == pytest.approx(number / 255)
        assert states(info["terminal_observation"]) == [number]
        assert (info["count"], info["TimeLimit.truncated"]) == (number, True)
    assert "terminal_observation" not in results[-1][3][0]


def test_terminal_mode_renders_one_frame_per_episode():
    reader, inner = Reader(reward_mode="terminal"), VENVS["rendered"]()
    venv = LearnedRewardVecEnv(inner, reader)
    venv.reset()
    training = np.stack([venv.step(actions(2))[1] for _ in range(2 * LENGTH)])
    assert reader.calls == [[3, 83], [13, 93]]
    assert [env.unwrapped.renders for env in inner.envs] == [2, 2]
    assert np.count_nonzero(training.any(axis=1)) == 2


@pytest.mark.parametrize("kind", VENVS)
def test_standalone_ends_single_episodes(kind):
    reader = Reader(**ending_from(82))
    venv = LearnedRewardVecEnv(VENVS[kind](), reader)
    venv.reset()
    venv.step(actions(2))
    obs, training, done, infos = venv.step(actions(2))
    assert (done.tolist(), training.tolist(), states(obs)) == ([False, True], [0, 1], [2, 90])
    assert states(infos[1]["terminal_observation"]) == [82]
    assert infos[1]["TimeLimit.truncated"] is False
    obs, _, done, infos = venv.step(actions(2))
    assert (done.tolist(), states(obs)) == ([True, True], [10, 100])
    assert [info["TimeLimit.truncated"] for info in infos] == [True, False]
    assert venv.venv.reset_infos[1]["count"] == 100
    venv.close()


@pytest.mark.parametrize("kind", VENVS)
def test_success_in_the_last_step_is_no_time_limit(kind):
    """Otherwise the value of a state behind the end would be learned."""
    venv = LearnedRewardVecEnv(VENVS[kind](), Reader(**ending_from(83)))
    venv.reset()
    for _ in range(LENGTH):
        _, training, done, infos = venv.step(actions(2))
    assert (done.tolist(), training.tolist()) == ([True, True], [0, 1])
    assert [info["TimeLimit.truncated"] for info in infos] == [True, False]
    venv.close()


def test_the_adapter_seeds_and_shows_the_final_frames_of_tabletop():
    moves = np.random.default_rng(1).uniform(-1, 1, (4, 3, 4)).astype(np.float32)
    adapter = GymVectorToSB3(TabletopVectorEnv(3, autoreset_mode="SameStep", max_episode_steps=4))
    reader = Recorder(reward_mode="terminal")
    venv = LearnedRewardVecEnv(adapter, reader)
    venv.seed(11)
    first = venv.reset()
    results = [venv.step(move) for move in moves]
    np.testing.assert_array_equal(reader.calls, [final_frames(11, 4, moves)])
    assert results[-1][1].tolist() == [0, 0.5, 1]
    alone = TabletopVectorEnv(3, autoreset_mode="Disabled")
    np.testing.assert_array_equal(first, alone.reset(seed=11)[0])
    for move in moves:
        reached = alone.step(move)[0]
    infos = results[-1][3]
    np.testing.assert_array_equal([info["terminal_observation"] for info in infos], reached)
    assert [info["episode_index"] for info in infos] == [0, 0, 0]
    assert [info["episode_index"] for info in venv.venv.reset_infos] == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GymVectorToSB3(counting(mode=AutoresetMode.NEXT_STEP)), "autoreset_mode SAME_STEP"),
        (lambda: LearnedRewardVecEnv(counting(), Reader()), "into GymVectorToSB3"),
        (
            lambda: LearnedRewardVecEnv(VecMonitor(dummy()), Reader(standalone=True)),
            "which VecMonitor does not offer",
        ),
        (
            lambda: LearnedRewardVecEnv(GymVectorToSB3(LockstepEnv()), Reader(standalone=True)),
            "LockstepEnv is not known to take",
        ),
        (lambda: GymVectorToSB3(counting()).set_attr("number", 3), "belongs to the whole batch"),
        (lambda: GymVectorToSB3(counting()).env_method("drawn"), "drawn cannot be called"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("mode", "message"), [("rgb_array", "put each environment into KeepFinalFrame"), (None, "show no images")]
)
def test_frames_that_cannot_be_seen_are_an_error(mode, message):
    venv = LearnedRewardVecEnv(dummy(images=False, render_mode=mode), Reader())
    venv.reset()
    with pytest.raises(DataError, match=message):
        for _ in range(LENGTH):
            venv.step(actions(2))
