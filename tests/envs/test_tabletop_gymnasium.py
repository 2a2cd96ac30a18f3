"""The tabletop as Gymnasium sees it: rendering, registration, wrong input."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from guerdon.config.tabletop import TabletopConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs import TABLETOP_ID, TabletopEnv, TabletopVectorEnv
from tests.envs.moves import OPEN, act, make


class TestRendering:
    def test_frames_are_rendered_only_when_asked_for(self):
        env = make(8)
        act(env, 0, 0, 0, OPEN, times=5)
        assert env.renderer.num_frames == 0
        env.render_frames("wrist_camera", [2, 5])
        assert env.renderer.num_frames == 2
        env.render_frames(env_ids=[])
        assert env.renderer.num_frames == 2

    def test_rgb_observations_render_each_camera_once_a_step(self):
        env = make(3, obs_mode="rgb", cameras=["wrist_camera"], image_size=(32, 48))
        obs, *_ = act(env, 0, 0, 0, OPEN)
        assert env.renderer.num_frames == 6
        assert list(obs) == ["wrist_camera"] and obs["wrist_camera"].shape == (3, 32, 48, 3)
        np.testing.assert_array_equal(obs["wrist_camera"], env.render_frames("wrist_camera"))

    @pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
    def test_observed_images_may_have_another_size_than_frames(self, mode):
        settings = {"obs_mode": "rgb", "max_episode_steps": 2, "autoreset_mode": mode}
        env, small = (
            make(3, **settings, **size)
            for size in ({"image_size": (32, 32), "obs_image_size": (16, 24)}, {"image_size": (16, 24)})
        )
        assert not env.frames_in_obs and small.frames_in_obs
        for _ in range(5):
            (obs, *_, info), (expected, *_, infos) = (act(each, 1, 0, 0, OPEN) for each in (env, small))
            assert env.observation_space.contains(obs)
            np.testing.assert_array_equal(obs["base_camera"], expected["base_camera"])
            assert ("final_obs" in info) == ("final_obs" in infos)
            if "final_obs" in info:
                np.testing.assert_array_equal(
                    info["final_obs"]["base_camera"], infos["final_obs"]["base_camera"]
                )
            assert env.render_frames(final=True).shape == (3, 32, 32, 3)

    def test_render_follows_gymnasium(self):
        single = TabletopEnv(render_mode="rgb_array", render_size=(40, 50))
        single.reset(seed=0)
        assert single.render().shape == (40, 50, 3) and single.render().dtype == np.uint8
        frames = make(2, render_mode="rgb_array").render()
        assert isinstance(frames, tuple) and [frame.shape for frame in frames] == [(256, 256, 3)] * 2
        assert make().render() is None


class TestGymnasium:
    @pytest.mark.parametrize("obs_mode", ["state", "rgb", "state+rgb"])
    def test_check_env_has_nothing_to_say(self, obs_mode):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env = gym.make(TABLETOP_ID, obs_mode=obs_mode, render_mode="rgb_array", domain_randomization=0.5)
            check_env(env.unwrapped)

    def test_make_truncates_once_and_by_itself(self):
        env = gym.make(TABLETOP_ID)
        env.reset(seed=0)
        flags = [env.step(np.zeros(4, np.float32))[2:4] for _ in range(50)]
        assert flags == [(False, False)] * 49 + [(False, True)]
        short = gym.make(TABLETOP_ID, config=TabletopConfig(max_episode_steps=2))
        _, info = short.reset(seed=0)
        assert info["success"] is False and info["elapsed_steps"] == 0
        short.step(np.zeros(4, np.float32))
        assert short.step(np.zeros(4, np.float32))[3] is True

    @pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, "NextStep", "disabled"])
    def test_make_vec(self, mode):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env = gym.make_vec(
                TABLETOP_ID, 6, "vector_entry_point", autoreset_mode=mode, obs_mode="rgb", max_episode_steps=7
            )
        assert isinstance(env, TabletopVectorEnv) and env.config.max_episode_steps == 7
        assert isinstance(env.metadata["autoreset_mode"], AutoresetMode)
        obs, _ = env.reset(seed=1)
        assert env.observation_space.contains(obs)
        assert env.spec.id == TABLETOP_ID
        assert TabletopVectorEnv.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP  # not changed for all

    def test_info_becomes_a_list_in_gymnasiums_wrapper(self):
        env = gym.wrappers.vector.DictInfoToList(make(2, max_episode_steps=1, autoreset_mode="SameStep"))
        env.reset(seed=0)
        infos = env.step(np.zeros((2, 4), np.float32))[4]
        assert infos[1]["final_info"]["elapsed_steps"] == 1 and infos[1]["elapsed_steps"] == 0


class TestWrongInput:
    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"obs_mode": "stat"}, r"obs_mode must be one of .*, not 'stat' \(did you mean 'state'"),
            ({"reward": "dens"}, "did you mean 'dense'"),
            (
                {"cameras": ["base_cam"]},
                r"cameras\[0\] must be .*, not 'base_cam' \(did you mean 'base_camera'",
            ),
            ({"cameras": "base_camera"}, "cameras must be a list"),
            ({"cameras": []}, "at least one camera"),
            ({"image_size": (64, 8)}, r"image_size\[1\] must be a whole number from 16 to 2048"),
            ({"image_size": 64}, "image_size must be a list of 2 entries"),
            ({"obs_image_size": (64, 8)}, r"obs_image_size\[1\] must be a whole number from 16 to 2048"),
            ({"max_episode_steps": 0}, "max_episode_steps"),
            ({"domain_randomization": 1.5}, "domain_randomization must be a number from 0 to 1"),
            ({"domain_randomization": float("nan")}, "domain_randomization must be a number, not nan"),
            ({"decoy": "yes"}, "decoy must be true or false"),
            ({"obsmode": "rgb"}, "unknown Tabletop setting 'obsmode'; did you mean 'obs_mode'"),
            ({"autoreset_mode": "samestep"}, "did you mean 'SameStep'|did you mean 'same_step'"),
            ({"render_mode": "human"}, "unknown render_mode 'human'"),
            ({"num_envs": 0}, "num_envs"),
        ],
    )
    def test_settings(self, settings, message):
        with pytest.raises(ConfigError, match=message) as caught:
            TabletopVectorEnv(**settings)
        assert "\n" not in str(caught.value)

    def test_settings_from_yaml_become_tuples(self):
        config = TabletopConfig(cameras=["wrist_camera"], image_size=[32, 32])
        assert config.cameras == ("wrist_camera",) and config.image_size == (32, 32)
        assert TabletopConfig.from_settings({"decoy": True}, config).image_size == (32, 32)

    @pytest.mark.parametrize(
        "action, message",
        [
            (np.zeros((2, 3)), r"shape \[2, 4\], not \[2, 3\]"),
            (np.zeros(4), r"shape \[2, 4\]"),
            (np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]), "environment 1 is not finite"),
            (np.full((2, 4), np.inf), "environment 0 is not finite"),
            (np.full((2, 4), "up"), "real numbers"),
        ],
    )
    def test_actions(self, action, message):
        env = make(2)
        before = env.state()
        with pytest.raises(DataError, match=message):
            env.step(action)
        np.testing.assert_array_equal(env.state(), before)

    def test_actions_beyond_their_range_are_clipped(self):
        one, two = make(), make()
        np.testing.assert_array_equal(act(one, 9, -9, 0, 7)[0], act(two, 1, -1, 0, 1)[0])

    def test_single_environment(self):
        env = TabletopEnv()
        with pytest.raises(DataError, match="reset"):
            env.step(np.zeros(4))
        env.reset(seed=0)
        with pytest.raises(DataError, match=r"shape \[4\]"):
            env.step(np.zeros((1, 4)))

    @pytest.mark.parametrize("seed", [-1, [1, -2], [1], 2**62, [1, 0.5]])
    def test_seeds(self, seed):
        with pytest.raises((DataError, gym.error.Error)):
            TabletopVectorEnv(2).reset(seed=seed)

    def test_reset_options(self):
        env = make(2)
        with pytest.raises(ConfigError, match="did you mean 'reset_mask'"):
            env.reset(options={"reset_masks": np.ones(2, bool)})
        for mask in (np.zeros(2, bool), np.ones(3, bool), np.ones(2)):
            with pytest.raises(DataError, match="reset_mask"):
                env.reset(options={"reset_mask": mask})

    def test_rendering(self):
        env = make(2)
        with pytest.raises(ConfigError, match="did you mean 'wrist_camera'"):
            env.render_frames("wrist")
        for ids in ([2], [-1], [[0]], [0.5]):
            with pytest.raises(DataError, match="env_ids"):
                env.render_frames(env_ids=ids)
        with pytest.raises(ConfigError, match="size"):
            env.render_frames(size=(0, 64))
        with pytest.raises(DataError, match="reset"):
            TabletopVectorEnv(1).render_frames()
