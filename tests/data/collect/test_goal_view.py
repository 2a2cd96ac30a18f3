"""`NAME@goal`: the part of a camera's picture around the goal, from collecting to a run."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from guerdon.cli.reward import score
from guerdon.cli.train import train
from guerdon.config import (
    CollectConfig,
    EnvConfig,
    FitDataConfig,
    RewardConfig,
    RewardModelConfig,
    build,
    load_config,
    to_plain,
)
from guerdon.core.errors import ConfigError
from guerdon.data.collect.run import collect
from guerdon.envs import TabletopVectorEnv
from guerdon.envs.observations import FrameSource, window, with_final
from guerdon.envs.tabletop.camera import base_camera
from guerdon.envs.tabletop.scene import GOAL
from guerdon.fit import fit_reward_model
from guerdon.training.frames import FrameSelector
from tests.plain_fit import plain_fit, plain_optim

VIEW = "base_camera@goal"


def tabletop(**settings):
    env = TabletopVectorEnv(
        6, image_size=(48, 64), max_episode_steps=3, autoreset_mode=AutoresetMode.SAME_STEP, **settings
    )
    env.reset(seed=0)
    return env


def test_windows_stay_within_the_picture():
    images = np.arange(2 * 8 * 10, dtype=np.uint8).reshape(2, 8, 10, 1)
    cut = window(images, np.array([[0.5, 0.5], [-0.3, 2.0]], np.float32), 0.5)
    np.testing.assert_array_equal(cut[0], images[0, 2:6, 3:7])
    np.testing.assert_array_equal(cut[1], images[1, :4, 6:])


@pytest.mark.parametrize("domain_randomization", [0.0, 1.0])
def test_the_place_of_the_goal_is_where_it_is_drawn(domain_randomization):
    """A goal that is moved changes the picture around the place that is told, and next to nowhere else."""
    env = tabletop(domain_randomization=domain_randomization)
    before, reported = env.render_frames(), env.goal_in_picture("base_camera", np.arange(6))
    env._rows[GOAL] += [[0.0], [0.0], [5.0]]  # out of sight
    changed = (env.render_frames().astype(int) != before).any(axis=-1)
    for number in range(6):
        rows, columns = np.nonzero(changed[number])
        assert len(rows) > 4
        place = reported[number] * [48, 64]
        distance = np.hypot(rows + 0.5 - place[0], columns + 0.5 - place[1])
        assert np.median(distance) < 8 and distance.min() < 2.5


@pytest.mark.parametrize("obs_mode", ["state", "rgb"])
def test_the_view_follows_each_episodes_own_goal(obs_mode):
    env = tabletop(obs_mode=obs_mode)
    source = FrameSource(env, [VIEW, "base_camera"])
    borders = 0
    for _ in range(7):
        rows = env._rows  # before the step: of the same episode
        u, v, _ = base_camera(rows, (48, 64)).project(rows[GOAL])
        places = np.stack([v / 48, u / 64], axis=1)
        obs, _, _, truncated, info = env.step(np.zeros((6, 4), np.float32))
        reached = with_final(obs, info.get("final_obs"), truncated)
        frames = source.frames(reached, truncated, np.array([4, 1]))
        whole = env.render_frames("base_camera", [4, 1], final=True)
        np.testing.assert_array_equal(frames["base_camera"], whole)
        np.testing.assert_array_equal(frames[VIEW], window(whole, places[[4, 1]], 0.5))
        assert frames[VIEW].shape == (2, 24, 24, 3)
        borders += bool(truncated.any())
    assert borders == 2


def test_stacks_of_the_view_are_rendered_on_demand_too():
    frames = {}
    for mode in ("per_step", "terminal"):
        env = tabletop()
        feed = FrameSelector(env, [VIEW], RewardConfig(reward_mode=mode), 2)
        rng = np.random.default_rng(0)
        for _ in range(3):
            obs, _, _, truncated, info = env.step(rng.uniform(-1, 1, (6, 4)).astype(np.float32))
            picked = feed.step(with_final(obs, info.get("final_obs"), truncated), truncated)
        frames[mode] = picked[1][VIEW].copy()
        assert feed.num_rendered == (18 if mode == "per_step" else 12)
    assert frames["terminal"].shape == (6, 2, 24, 24, 3)
    np.testing.assert_array_equal(frames["terminal"], frames["per_step"])


class Pictures(gym.Env):
    """Shows pictures and knows nothing of a goal."""

    observation_space = gym.spaces.Dict({"base_camera": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)


def test_an_environment_that_does_not_tell_is_refused():
    env = SyncVectorEnv([Pictures])
    FrameSource(env, ["base_camera"])
    with pytest.raises(ConfigError, match=r"cannot say where the goal is .* give a region instead"):
        FrameSource(env, [VIEW])


def test_crop_goal_is_short_for_the_view():
    config = build(RewardModelConfig, {"crop": "goal", "image_keys": ["base_camera", "wrist_camera@goal"]})
    assert config.image_keys == (VIEW, "wrist_camera@goal") and config.crop is None
    assert build(RewardModelConfig, to_plain(config)) == config
    loaded = load_config("train_reward", ["reward.model.crop=goal"])
    assert loaded.reward.model.image_keys == (VIEW,)
    with pytest.raises(ConfigError, match="did you mean 'goal'"):
        build(RewardModelConfig, {"crop": "gaol"}, "reward.model")


@pytest.mark.slow
def test_from_collecting_to_a_run(tmp_path):
    """At equal size the view tells success better than the whole picture, and a policy trains on it."""
    env = EnvConfig(num_envs=16, init_params={"image_size": [64, 64]})
    section = CollectConfig(
        policy="scripted",
        policy_noise=0.6,
        target_success=40,
        target_failure=40,
        cameras=("base_camera", VIEW),
    )
    for name, seed in (("data", 0), ("fresh", 50)):
        assert collect(env, replace(section, save_dir=str(tmp_path / name)), seed=seed).complete
    cfg = plain_fit(
        epochs=4,
        global_batch_size=64,
        optim=plain_optim(lr=2e-3),
        data=FitDataConfig(path=str(tmp_path / "data"), num_samples_per_episode=20),
    )
    model = RewardModelConfig(
        model_type="binary_classifier", arch="resnet10", width=8, image_size=(3, 32, 32), hidden_dim=16
    )
    results = {}
    for name, crop in (("whole", None), ("goal", "goal")):
        fitted = fit_reward_model(replace(model, crop=crop), cfg, folder=tmp_path / name, tensorboard=False)
        scored = score(tmp_path / "fresh", fitted.checkpoint, None, precision="fp32")
        results[name] = (fitted.checkpoint, scored["metrics"]["auc"])
    assert results["goal"][1] > results["whole"][1] and results["goal"][1] > 0.93
    settings = [
        "reward.use_reward_model=true",
        f"reward.model.checkpoint_path={results['goal'][0]}",
        "env.train.num_envs=4",
        "env.eval.num_envs=2",
        "+env.train.init_params.image_size=[64,64]",
        "+env.eval.init_params.image_size=[64,64]",
        "learner.eval_episodes=2",
        "learner.ppo.num_steps=60",
        "learner.total_steps=240",
        f"runner.logger.log_path={tmp_path / 'run'}",
        "runner.logger.backends=[]",
    ]
    _, summary = train(load_config("train", settings))
    assert summary["env_steps"] == 240
    with pytest.raises(ConfigError, match=r"image_keys is .*wrist_camera.* in the config"):
        train(load_config("train", [*settings, "reward.model.image_keys=[wrist_camera]"]))
