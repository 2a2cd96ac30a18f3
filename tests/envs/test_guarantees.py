"""What the rest of Guerdon relies on in `guerdon/Tabletop-v0`."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import guerdon.envs  # noqa: F401
from guerdon.config import EnvConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs import ScriptedExpert
from guerdon.envs.make import make_vector_env

ID = "guerdon/Tabletop-v0"


def vector(num_envs=8, mode=AutoresetMode.SAME_STEP, **settings):
    return gym.make_vec(
        ID, num_envs, vectorization_mode="vector_entry_point", autoreset_mode=mode, **settings
    )


def outcomes(noise, num_envs=200, **settings):
    """Success flags of one episode each -> bool [steps, N]."""
    env = vector(num_envs, AutoresetMode.DISABLED, **settings)
    obs, _ = env.reset(seed=0)
    expert = ScriptedExpert(noise=noise, seed=0)
    success = []
    for _ in range(50):
        obs, _, _, truncated, info = env.step(expert.act(obs))
        success.append(info["success"])
    assert truncated.all()
    return np.array(success)


@pytest.mark.parametrize("obs_mode", ["state", "rgb", "state+rgb"])
def test_gymnasium_accepts_it(obs_mode):
    check_env(gym.make(ID, obs_mode=obs_mode, render_mode="rgb_array").unwrapped, skip_render_check=False)


def test_the_expert_solves_the_task_and_holds():
    success = outcomes(0.0)
    assert success.any(axis=0).mean() >= 0.98
    assert success[-1].mean() >= 0.98


def test_noise_gives_a_mix():
    success = outcomes(0.5)
    assert 0.2 < success.any(axis=0).mean() < 0.9


def test_a_random_policy_does_not_solve_it():
    env = vector(200, AutoresetMode.DISABLED)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    once = np.zeros(200, bool)
    for _ in range(50):
        *_, info = env.step(rng.uniform(-1, 1, (200, 4)).astype(np.float32))
        once |= info["success"]
    assert once.mean() < 0.02


def test_an_environment_of_a_batch_is_the_single_one_with_its_seed():
    env = vector(5)
    env.reset(seed=40)
    expert = ScriptedExpert(noise=0.3, seed=1)
    actions, states, frames = [], [], []
    for _ in range(120):  # over two auto-resets
        actions.append(expert.act(env.unwrapped.state()))
        _, _, terminated, truncated, _ = env.step(actions[-1])
        expert.reset(terminated | truncated)
        states.append(env.unwrapped.final_state()[3])
        frames.append(env.unwrapped.render_frames("base_camera", [3], size=(16, 16), final=True)[0])
    single = gym.make(ID).unwrapped
    single.reset(seed=43)
    for step in range(120):
        obs, _, _, truncated, _ = single.step(actions[step][3])
        np.testing.assert_array_equal(obs, states[step])
        np.testing.assert_array_equal(
            single.vector.render_frames("base_camera", size=(16, 16))[0], frames[step]
        )
        if truncated:
            single.reset()


def test_the_final_frame_stays_available_after_auto_reset():
    same, disabled = vector(mode=AutoresetMode.SAME_STEP), vector(mode=AutoresetMode.DISABLED)
    for env in (same, disabled):
        env.reset(seed=7)
    action = np.random.default_rng(0).uniform(-1, 1, (50, 8, 4)).astype(np.float32)
    for step in range(50):
        _, _, _, truncated, info = same.step(action[step])
        obs, *_ = disabled.step(action[step])
    assert truncated.all()
    for camera in ("base_camera", "wrist_camera"):
        final = same.unwrapped.render_frames(camera, final=True)
        np.testing.assert_array_equal(final, disabled.unwrapped.render_frames(camera))
        assert not np.array_equal(final, same.unwrapped.render_frames(camera))  # the next episode has begun
    np.testing.assert_array_equal(info["final_obs"], obs)
    np.testing.assert_array_equal(same.unwrapped.final_state(), obs)
    assert info["_final_obs"].all()
    assert (info["final_info"]["elapsed_steps"] == 50).all()
    assert (info["elapsed_steps"] == 0).all()


def test_nothing_is_rendered_unless_asked_and_only_for_those_asked():
    env = vector(16).unwrapped
    seen = []
    original = env.renderer.render
    env.renderer.render = lambda scene, ids, *rest: seen.append(len(ids)) or original(scene, ids, *rest)
    env.reset(seed=0)
    for _ in range(60):
        env.step(np.zeros((16, 4), np.float32))
    assert seen == []
    assert env.render_frames("wrist_camera", [2, 5, 11], size=(24, 40)).shape == (3, 24, 40, 3)
    assert seen == [3]


def test_success_can_be_seen_in_a_frame():
    """Holding and shaking the cube at the goal differ by the lamp: many pixels around it change colour."""
    env = vector(64, AutoresetMode.DISABLED, max_episode_steps=60).unwrapped
    obs, _ = env.reset(seed=3)
    expert = ScriptedExpert()
    for _ in range(45):
        obs, *_, info = env.step(expert.act(obs))
    assert info["success"].mean() > 0.95
    still = env.render_frames("base_camera").astype(int)
    *_, info = env.step(np.tile(np.float32([0.3, 0, 0, -1]), (64, 1)))
    moved = ~info["success"]
    assert moved.mean() > 0.9  # the others stand at the edge of the workspace
    moving = env.render_frames("base_camera").astype(int)
    changed = (np.abs(still - moving).max(axis=-1) > 60).sum(axis=(1, 2))
    assert np.median(changed[moved]) >= 8


def test_a_decoy_is_no_goal_and_changes_nothing_else():
    plain, decoy = vector(32).unwrapped, vector(32, decoy=True).unwrapped
    states = [env.reset(seed=9)[0] for env in (plain, decoy)]
    np.testing.assert_array_equal(*states)
    pictures = [env.render_frames("base_camera") for env in (plain, decoy)]
    assert (pictures[0] != pictures[1]).any(axis=(1, 2, 3)).mean() > 0.9
    assert not decoy.step(np.zeros((32, 4), np.float32))[-1]["success"].any()


def test_domain_randomisation_varies_the_look_and_not_the_task():
    plain, varied = vector(16).unwrapped, vector(16, domain_randomization=1.0).unwrapped
    np.testing.assert_array_equal(plain.reset(seed=1)[0], varied.reset(seed=1)[0])
    corners = varied.render_frames("base_camera")[:, -4:, :4].reshape(16, -1)
    assert len({corner.tobytes() for corner in corners}) >= 14
    corners = plain.render_frames("base_camera")[:, -4:, :4].reshape(16, -1)
    assert len({corner.tobytes() for corner in corners}) == 1


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("dense", 0.0, 1.0), ("sparse", 0.0, 1.0), ("none", 0.0, 0.0)]
)
def test_env_rewards(kind, low, high):
    env = vector(64, AutoresetMode.DISABLED, reward=kind)
    obs, _ = env.reset(seed=0)
    expert = ScriptedExpert()
    env_rewards, successes = [], []
    for _ in range(50):
        obs, env_reward, _, _, info = env.step(expert.act(obs))
        env_rewards.append(env_reward)
        successes.append(info["success"])
    values, success = np.array(env_rewards), np.array(successes)
    assert (values.min(), values.max()) >= (low, low)
    assert values.max() <= high
    if kind == "sparse":
        np.testing.assert_array_equal(values, success.astype(np.float32))
    if kind == "dense":
        assert values[-1].mean() > 0.95 > 0.5 > values[0].mean()


def test_a_frame_can_be_written_in_place():
    env = vector(4).unwrapped
    env.reset(seed=0)
    pool = np.zeros((4, 3, 64, 64, 3), np.uint8)
    env.render_frames("base_camera", out=pool[:, 1])
    np.testing.assert_array_equal(pool[:, 1], env.render_frames("base_camera"))
    assert not pool[:, 0].any()
    assert not pool[:, 2].any()


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda env: env.step(np.zeros((3, 4))), DataError, r"\[8, 4\]"),
        (lambda env: env.step(np.full((8, 4), np.nan)), DataError, "not finite"),
        (lambda env: env.render_frames("base_camra"), ConfigError, "base_camera"),
        (lambda env: env.render_frames("base_camera", [8]), DataError, "between 0 and 7"),
    ],
)
def test_bad_input_is_named(act, error, message):
    env = vector().unwrapped
    env.reset(seed=0)
    with pytest.raises(error, match=message):
        act(env)


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="obs_mode"):
        make_vector_env(EnvConfig(init_params={"obs_mod": "rgb"}), autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ConfigError, match="sparse"):
        make_vector_env(EnvConfig(init_params={"reward": "sprse"}), autoreset_mode=AutoresetMode.SAME_STEP)


def test_a_module_that_registers_an_environment_is_imported(tmp_path, monkeypatch):
    text = "import gymnasium\ngymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    (tmp_path / "my_environments.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    section = EnvConfig(id="my_environments:Mine-v0", num_envs=2)
    env = make_vector_env(section, autoreset_mode=AutoresetMode.SAME_STEP)
    assert env.reset(seed=0)[0].shape == (2, 4)
    env.close()
    with pytest.raises(ConfigError, match="unknown environment 'Mime-v0'; did you mean 'Mine-v0'"):
        make_vector_env(EnvConfig(id="my_environments:Mime-v0"), autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'nowhere'"):
        make_vector_env(EnvConfig(id="nowhere:Mine-v0"), autoreset_mode=AutoresetMode.SAME_STEP)


def test_other_gymnasium_environments_can_be_made():
    env = make_vector_env(EnvConfig(id="CartPole-v1", num_envs=3), autoreset_mode=AutoresetMode.SAME_STEP)
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert env.metadata["final_frame"]  # nothing of an episode is lost
    assert env.reset(seed=0)[0].shape == (3, 4)
    env.close()
