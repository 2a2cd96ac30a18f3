"""Wrappers: the right frames are judged, all rewards are reported, and Stable-Baselines3 learns from them."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from guerdon.config import RewardConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs import TabletopEnv, TabletopVectorEnv
from guerdon.serve import ImageRewardWorker, Scores
from guerdon.wrappers import LearnedRewardVectorWrapper, LearnedRewardWrapper

LENGTH = 3
"""Steps of an episode of the counting environment."""


class CountingEnv(gym.Env):
    """Draws 80 * id + 10 * episode + step into its frames; the env reward is always -1."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, number=0, images=True, render_mode=None):
        self.number, self.images, self.render_mode = number, images, render_mode
        self.episode, self.steps, self.renders = -1, 0, 0
        state, frame = gym.spaces.Box(0, 255, (1,), np.float32), gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        self.observation_space = gym.spaces.Dict({"state": state, "base_camera": frame}) if images else state
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def drawn(self):
        return 80 * self.number + 10 * self.episode + self.steps

    def frame(self):
        return np.full((8, 8, 3), self.drawn(), np.uint8)

    def observe(self):
        state = np.full(1, self.drawn(), np.float32)
        return {"state": state, "base_camera": self.frame()} if self.images else state

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self.observe(), {"count": self.drawn()}

    def step(self, action):
        self.steps += 1
        return self.observe(), -1.0, False, self.steps >= LENGTH, {"count": self.drawn()}

    def render(self):
        self.renders += 1
        return self.frame()


class LockstepEnv(gym.vector.VectorEnv):
    """A vector environment that is not known to reset single environments."""

    num_envs = 2
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    render_mode = None
    single_observation_space = gym.spaces.Box(0, 1, (1,))
    single_action_space = gym.spaces.Box(0, 1, (1,))


class Reader:
    """Takes the number drawn into a frame, over 255, for its probability of success."""

    image_keys = ("base_camera",)

    def __init__(self, **settings):
        self.cfg = RewardConfig(**{"reward_type": "continuous", **settings})
        self.threshold = 0.5 if self.cfg.reward_threshold == "calibrated" else self.cfg.reward_threshold
        self.calls = []

    def images(self, observations):
        return {"base_camera": observations["base_camera"]}

    def score(self, frames):
        numbers = frames["base_camera"][:, 0, 0, 0]
        self.calls.append(numbers.tolist())
        prob = (numbers / 255).astype(np.float32)
        return Scores(prob_success=prob, disagreement=np.zeros_like(prob))


def counting(count=2, mode=AutoresetMode.SAME_STEP, **settings):
    makers = [lambda number=number: CountingEnv(number, **settings) for number in range(count)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def actions(count):
    return np.zeros((count, 1), np.float32)


def ending_from(number):
    """Settings with which frames from `number` on end the episode."""
    return {"standalone": True, "reward_type": "binary", "reward_threshold": (number - 0.5) / 255}


# One environment


@pytest.mark.parametrize("images", [True, False])
def test_single_every_frame_that_an_action_led_to_is_judged(images):
    reader = Reader()
    env = LearnedRewardWrapper(CountingEnv(1, images, render_mode="rgb_array"), reader)
    env.reset()
    steps = [env.step(np.zeros(1)) for _ in range(LENGTH)]
    assert reader.calls == [[81], [82], [83]]
    assert [step[1] for step in steps] == pytest.approx([81 / 255, 82 / 255, 83 / 255])
    assert [(step[2], step[3]) for step in steps] == [(False, False), (False, False), (False, True)]
    info = steps[-1][4]
    assert (info["env_reward"], info["count"]) == (-1.0, 83)
    assert info["learned_reward"] == info["prob_success"] == pytest.approx(83 / 255)


def test_single_terminal_mode_renders_one_frame_per_episode():
    reader, inner = Reader(reward_mode="terminal"), CountingEnv(0, images=False, render_mode="rgb_array")
    env = LearnedRewardWrapper(inner, reader)
    training = []
    for _ in range(2):
        env.reset()
        steps = [env.step(np.zeros(1)) for _ in range(LENGTH)]
        training += [step[1] for step in steps]
        assert np.isnan(steps[0][4]["prob_success"]) and steps[0][4]["learned_reward"] == 0.0
    assert reader.calls == [[3], [13]]
    assert inner.renders == 2
    assert training == pytest.approx([0, 0, 3 / 255, 0, 0, 13 / 255])


def test_rewards_are_mixed_as_the_settings_say():
    cfg = RewardConfig(
        reward_type="binary", success_reward=10.0, combine_mode="weighted", reward_weight=0.5,
        env_reward_weight=2.0,
    )  # fmt: skip
    env = LearnedRewardWrapper(CountingEnv(2), Reader(), cfg)  # from 161 on: all above 0.5
    env.reset()
    _, training, _, _, info = env.step(np.zeros(1))
    assert training == pytest.approx(2.0 * -1.0 + 0.5 * 10.0)
    assert (info["env_reward"], info["learned_reward"]) == (-1.0, 10.0)


def test_single_standalone_success_terminates():
    env = LearnedRewardWrapper(CountingEnv(0), Reader(**ending_from(2)))
    env.reset()
    assert env.step(np.zeros(1))[1:4] == (0.0, False, False)
    assert env.step(np.zeros(1))[1:4] == (1.0, True, False)


def test_standalone_in_terminal_mode_rewards_the_frame_that_ended_the_episode():
    env = LearnedRewardWrapper(CountingEnv(0), Reader(reward_mode="terminal", **ending_from(2)))
    env.reset()
    assert [env.step(np.zeros(1))[1:4] for _ in range(2)] == [(0.0, False, False), (1.0, True, False)]


def test_a_tabletop_environment_is_rendered_on_demand():
    class Mean(Reader):
        def score(self, frames):
            self.calls.append(frames["base_camera"].copy())
            return Scores(prob_success=np.full(1, 0.25, np.float32), disagreement=np.zeros(1, np.float32))

    inner, reader = TabletopEnv(image_size=(32, 32)), Mean()
    env = LearnedRewardWrapper(inner, reader)
    env.reset(seed=3)
    assert env.step(np.array([1, 0, 0, 1], np.float32))[1] == 0.25
    np.testing.assert_array_equal(reader.calls[0], inner.render_frames("base_camera"))


# Vector environments


def test_same_step_judges_the_final_frames_of_ended_episodes():
    reader = Reader()
    envs = LearnedRewardVectorWrapper(counting(), reader)
    envs.reset()
    results = [envs.step(actions(2)) for _ in range(LENGTH + 1)]
    assert reader.calls == [[1, 81], [2, 82], [3, 83], [11, 91]]
    obs, training, terminated, truncated, info = results[2]
    assert obs["state"].ravel().tolist() == [10, 90]  # the next episodes have begun
    np.testing.assert_allclose(training, np.array([3, 83]) / 255, rtol=1e-6)
    assert training.dtype == np.float32
    assert truncated.all() and not terminated.any()
    assert info["env_reward"].tolist() == [-1, -1]
    np.testing.assert_array_equal(info["prob_success"], info["learned_reward"])


def test_next_step_gives_no_reward_for_beginning_an_episode():
    reader = Reader(combine_mode="add")
    envs = LearnedRewardVectorWrapper(counting(mode=AutoresetMode.NEXT_STEP), reader)
    envs.reset()
    results = [envs.step(actions(2)) for _ in range(LENGTH + 2)]
    assert reader.calls == [[1, 81], [2, 82], [3, 83], [11, 91]]
    _, training, _, _, info = results[LENGTH]
    assert training.tolist() == info["learned_reward"].tolist() == [0, 0]
    assert np.isnan(info["prob_success"]).all()
    np.testing.assert_allclose(results[-1][1], np.array([11, 91]) / 255 - 1, rtol=1e-6)


def test_next_step_after_a_reset_by_the_caller_is_a_step_like_any_other():
    reader = Reader()
    envs = LearnedRewardVectorWrapper(counting(mode=AutoresetMode.NEXT_STEP), reader)
    envs.reset()
    for _ in range(LENGTH):
        envs.step(actions(2))
    envs.reset()
    rewards = envs.step(actions(2))[1]
    assert reader.calls[-1] == [11, 91] and rewards == pytest.approx([11 / 255, 91 / 255])
    for _ in range(LENGTH - 1):
        envs.step(actions(2))
    envs.reset(options={"reset_mask": np.array([True, False])})
    rewards = envs.step(actions(2))[1]  # the second one only begins
    assert reader.calls[-1] == [21] and rewards == pytest.approx([21 / 255, 0.0])


def test_disabled_autoreset_and_resets_of_single_environments():
    reader = Reader(**ending_from(82))
    envs = LearnedRewardVectorWrapper(counting(mode=AutoresetMode.DISABLED), reader)
    envs.reset()
    envs.step(actions(2))
    _, training, terminated, truncated, _ = envs.step(actions(2))
    assert (terminated.tolist(), truncated.tolist()) == ([False, True], [False, False])
    assert training.tolist() == [0, 1]
    envs.reset(options={"reset_mask": np.array([False, True])})
    envs.step(actions(2))
    assert reader.calls == [[1, 81], [2, 82], [3, 91]]


def test_standalone_begins_again_in_the_same_step():
    reader = Reader(**ending_from(82))
    envs = LearnedRewardVectorWrapper(counting(), reader)
    envs.reset()
    envs.step(actions(2))
    obs, _, terminated, truncated, info = envs.step(actions(2))
    assert (terminated.tolist(), truncated.tolist()) == ([False, True], [False, False])
    assert obs["state"].ravel().tolist() == [2, 90]
    assert info["_final_obs"].tolist() == [False, True]
    assert info["final_obs"][1]["state"].item() == 82 and info["final_obs"][0] is None
    assert (info["count"].tolist(), info["final_info"]["count"][1]) == ([2, 90], 82)
    _, _, terminated, truncated, info = envs.step(actions(2))  # one by the model, one by the environment
    assert (terminated.tolist(), truncated.tolist()) == ([False, True], [True, False])
    assert [item["state"].item() for item in info["final_obs"]] == [3, 91]
    assert info["final_info"]["count"].tolist() == [3, 91]
    assert info["_final_obs"].tolist() == info["_final_info"].tolist() == [True, True]


class Recorder(Reader):
    """Keeps all frames that it is shown."""

    def score(self, frames):
        self.calls.append(frames["base_camera"].copy())
        prob = np.linspace(0, 1, len(self.calls[-1]), dtype=np.float32)
        return Scores(prob_success=prob, disagreement=np.zeros_like(prob))


def final_frames(seed, steps, moves):
    """The last frames of Tabletop episodes, seen without any reset."""
    envs = TabletopVectorEnv(3, autoreset_mode="Disabled", max_episode_steps=steps)
    envs.reset(seed=seed)
    for move in moves:
        envs.step(move)
    return envs.render_frames("base_camera")


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
@pytest.mark.parametrize("obs_mode", ["state", "state+rgb"])
def test_tabletop_terminal_mode_judges_each_final_frame_once(mode, obs_mode, monkeypatch):
    moves = np.random.default_rng(0).uniform(-1, 1, (5, 3, 4)).astype(np.float32)
    expected = final_frames(4, 5, moves)
    reader = Recorder(reward_mode="terminal")
    inner = TabletopVectorEnv(3, autoreset_mode=mode, max_episode_steps=5, obs_mode=obs_mode)
    envs = LearnedRewardVectorWrapper(inner, reader)
    rendered, original = [], inner.render_frames

    def counted(camera="base_camera", env_ids=None, **keywords):
        rendered.append(3 if env_ids is None else len(env_ids))
        return original(camera, env_ids, **keywords)

    envs.reset(seed=4)
    monkeypatch.setattr(inner, "render_frames", counted)
    results = [envs.step(move) for move in moves]
    assert len(reader.calls) == 1
    np.testing.assert_array_equal(reader.calls[0], expected)
    assert results[-1][1].tolist() == [0, 0.5, 1]
    assert not np.any([training for _, training, *_ in results[:-1]])
    if obs_mode == "state":
        assert rendered == [3]  # one frame for each episode


def test_tabletop_standalone_resets_single_environments():
    reader = Recorder(reward_type="binary", standalone=True, reward_threshold=0.9)  # the last one always ends
    envs = LearnedRewardVectorWrapper(TabletopVectorEnv(3, autoreset_mode="SameStep"), reader)
    envs.reset(seed=0)
    move = np.ones((3, 4), np.float32)
    for number in range(3):
        obs, training, terminated, _, info = envs.step(move)
        assert terminated.tolist() == [False, False, True] and training.tolist() == [0, 0, 1]
        assert info["episode_index"].tolist() == [0, 0, number + 1]
        assert info["final_info"]["episode_index"][2] == number
        assert not np.array_equal(info["final_obs"][2], obs[2])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LearnedRewardVectorWrapper(CountingEnv(), Reader()), ConfigError, "no vector environment"),
        (lambda: LearnedRewardWrapper(counting(), Reader()), ConfigError, "use LearnedRewardVectorWrapper"),
        (
            lambda: LearnedRewardVectorWrapper(
                counting(mode=AutoresetMode.NEXT_STEP), Reader(standalone=True)
            ),
            ConfigError,
            "SAME_STEP or DISABLED",
        ),
        (
            lambda: LearnedRewardVectorWrapper(LockstepEnv(), Reader(standalone=True)),
            ConfigError,
            "LockstepEnv is not known to take",
        ),
        (
            lambda: LearnedRewardWrapper(CountingEnv(), Reader(), RewardConfig(reward_threshold=0.3)),
            ConfigError,
            "reward_threshold is 0.3, but the reward model was loaded with calibrated",
        ),
        (
            lambda: LearnedRewardWrapper(CountingEnv(), ImageRewardWorker(RewardConfig())),
            ConfigError,
            "init_worker",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_frames_that_cannot_be_seen_are_an_error():
    env = LearnedRewardWrapper(CountingEnv(images=False), Reader())
    env.reset()
    with pytest.raises(DataError, match="shows no images"):
        env.step(np.zeros(1))
    envs = LearnedRewardVectorWrapper(counting(images=False, render_mode="rgb_array"), Reader())
    envs.reset()
    with pytest.raises(DataError, match="final frame is gone"):
        for _ in range(LENGTH):
            envs.step(actions(2))


def test_normalised_rewards_are_divided_by_their_deviation():
    reader = Reader()
    envs = LearnedRewardVectorWrapper(counting(), reader, replace(reader.cfg, normalize=True))
    envs.reset()
    _, training, _, _, info = envs.step(actions(2))
    np.testing.assert_allclose(training, info["learned_reward"] / info["learned_reward"].std(), rtol=1e-5)
