import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.robot import ScriptedOperator
from guerdon.envs.robot.clock import Clock, Ticker
from guerdon.envs.robot.env import STATE_NAMES
from guerdon.envs.robot.poses import pose6

NOTHING = np.zeros(6, np.float32)


def play(env, action=lambda: NOTHING, seed=None):
    """One episode; the infos of its steps, and how it ended."""
    env.reset(seed=seed)
    infos = []
    while True:
        obs, reward, terminated, truncated, info = env.step(action())
        infos.append(info)
        assert env.observation_space.contains(obs)
        assert reward == float(info["success"])
        if terminated or truncated:
            return infos, terminated


def test_scripted_operator_inserts_in_time(make_env, server):
    env = make_env(operator=lambda config: ScriptedOperator(config, seed=3), success_hold_steps=5)
    for seed in range(6):
        infos, terminated = play(env, seed=seed)
        assert terminated and infos[-1]["success"] and len(infos) < 40
        assert server.world.truth()["inserted"]
        assert all(info["intervened"] for info in infos)
        assert [info["hold_steps"] for info in infos[-5:]] == [1, 2, 3, 4, 5]
    assert server.world.record.outside == 0 < server.world.record.commands


def test_random_actions_do_not_insert(make_env, server):
    env = make_env(max_episode_steps=40)
    rng = np.random.default_rng(0)
    for seed in range(4):
        infos, terminated = play(env, lambda: rng.uniform(-1, 1, 6).astype(np.float32), seed)
        assert not terminated and not infos[-1]["success"] and len(infos) == 40
    assert not server.world.truth()["inserted_once"]
    assert server.world.record.outside == 0


def test_gymnasium_finds_nothing_to_complain_about(make_env):
    env = make_env(enable_random_reset=False)
    with pytest.warns(UserWarning):
        check_env(env, skip_render_check=True)
    obs, _ = env.reset(seed=1)
    assert set(obs) == {"states", "main_images", "wrist_camera"}
    assert obs["states"].shape == (len(STATE_NAMES),)


def test_leaving_the_target_starts_the_count_anew(make_env):
    env = make_env(operator=lambda config: ScriptedOperator(config, noise=0.0), success_hold_steps=8)
    env.reset(seed=0)
    counts = []
    while not counts or counts[-1] < 4:
        *_, terminated, _, info = env.step(NOTHING)
        counts.append(info["hold_steps"])
        assert info["at_target"] == (info["hold_steps"] > 0) and not terminated
    env.operator = None
    up = np.array([0, 0, 1, 0, 0, 0], np.float32)
    *_, info = env.step(up)
    assert info["hold_steps"] == 0 and not info["at_target"]
    env.operator = ScriptedOperator(env.config, noise=0.0)
    counts = []
    terminated = False
    while not terminated:
        *_, terminated, _, info = env.step(NOTHING)
        counts.append(info["hold_steps"])
    assert counts[-8:] == [1, 2, 3, 4, 5, 6, 7, 8] and info["success"]


def test_standalone_ends_with_the_reward_models_word(make_env):
    seen = []

    def detect(obs):
        seen.append(obs["main_images"].shape)
        return len(seen) == 3

    env = make_env(standalone=True, success_detector=detect)
    infos, terminated = play(env, seed=0)
    assert terminated and len(infos) == 3 and infos[-1]["success"]
    assert not infos[-1]["at_target"], "the pose had no say"
    assert seen == [(32, 32, 3)] * 3
    env.success_detector = None
    with pytest.raises(ConfigError, match="standalone needs a reward model"):
        env.reset()


def test_standalone_does_not_end_at_the_target(make_env):
    env = make_env(
        operator=lambda config: ScriptedOperator(config, seed=0),
        standalone=True,
        success_detector=lambda obs: False,
        success_hold_steps=2,
        max_episode_steps=25,
    )
    infos, terminated = play(env, seed=0)
    assert not terminated and infos[-1]["hold_steps"] > 2 and not infos[-1]["success"]


def test_resets_are_random_and_follow_the_seed(make_env):
    env = make_env()
    places = [env.reset(seed=seed)[1]["ee_pose"] for seed in (1, 2, 1)]
    assert np.abs(places[0][:2] - places[1][:2]).max() > 0.003
    np.testing.assert_allclose(places[0][:3], places[2][:3], atol=0.004)
    x, y, z = env.config.reset_pose[:3]
    for place in places:
        assert abs(place[0] - x) < 0.032 and abs(place[1] - y) < 0.032 and abs(place[2] - z) < 0.011


def test_an_action_moves_by_its_scale(make_env):
    env = make_env(axes=("z", "rz"), action_scale=(0.02, 0.1), enable_random_reset=False)
    _, before = env.reset(seed=0)
    *_, after = env.step(np.array([-0.5, 1.0], np.float32))
    moved = pose6(after["ee_pose"]) - pose6(before["ee_pose"])
    assert -0.011 < moved[2] < -0.006
    assert 0.05 < moved[5] < 0.11
    assert np.abs(moved[:2]).max() < 0.003


def test_the_gripper_is_a_further_number(make_env, server):
    env = make_env(use_gripper=True)
    env.reset(seed=0)
    for value, opening in ((1.0, 1.0), (0.2, 1.0), (-1.0, 0.0)):
        env.step(np.array([0, 0, 0, 0, 0, 0, value], np.float32))
        assert server.world._arm.gripper_target == opening


def test_a_joint_reset_comes_every_so_many_episodes(make_env, monkeypatch):
    env = make_env(joint_reset_cycle=2, precision_param={"translational_stiffness": 2500})
    done = []
    monkeypatch.setattr(env.driver, "reset", lambda: done.append(env._episodes))
    for _ in range(5):
        env.reset()
    assert done == [2, 4]


@pytest.mark.parametrize("action", [np.zeros(3), np.full(6, np.nan), np.zeros((1, 6))])
def test_actions_that_make_no_sense_are_refused(make_env, server, action):
    env = make_env()
    env.reset(seed=0)
    before = server.world.record.commands
    with pytest.raises(DataError, match="action"):
        env.step(action)
    assert server.world.record.commands == before
    env.step(NOTHING)


def test_no_step_without_an_episode(make_env):
    env = make_env(max_episode_steps=1)
    with pytest.raises(DataError, match="reset"):
        env.step(NOTHING)
    env.reset(seed=0)
    assert env.step(NOTHING)[3]
    with pytest.raises(DataError, match="reset"):
        env.step(NOTHING)
    env.close()
    with pytest.raises(DataError, match="closed"):
        env.reset()


class LateClock(Clock):
    """A clock that only moves when somebody sleeps, and oversleeps every fourth time."""

    def __init__(self):
        super().__init__(1.0)
        self.time, self.naps = 100.0, 0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.naps += 1
        self.time += max(seconds, 0.0) + (0.05 if self.naps % 4 == 0 else 0.001)


def test_jitter_is_measured():
    clock = LateClock()
    ticker = Ticker(clock, rate=10.0)
    ticker.start()
    for _ in range(100):
        ticker.wait()
        clock.time += 0.005  # thinking
    timing = ticker.timing()
    assert timing.steps == 100 and timing.overruns == 25
    assert timing.jitter_p50 < 0.002 < timing.jitter_p95 and timing.jitter_max == pytest.approx(
        0.05, abs=0.002
    )
    assert 0.1 < timing.mean_period < 0.12


def test_slow_thinking_does_not_cut_a_command_short():
    clock = LateClock()
    clock.naps = -(10**9) * 4
    ticker = Ticker(clock, rate=10.0)
    ticker.start()
    for _ in range(5):
        clock.time += 0.3
        commanded = clock.time
        ticker.wait()
        assert clock.time - commanded >= 0.08
