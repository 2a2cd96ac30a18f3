"""The tabletop environment: physics, seeding, auto-reset, registration, wrong input."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from guerdon.config.tabletop import TabletopConfig
from guerdon.envs import TABLETOP_ID, ScriptedExpert, TabletopEnv, TabletopVectorEnv
from guerdon.envs.tabletop_physics import STILL_SPEED
from guerdon.envs.tabletop_scene import (
    CUBE,
    CUBE_HALF,
    CUBE_TO_GOAL,
    DECOY,
    GOAL,
    GOAL_TOLERANCE,
    GRASPED,
    GRIPPER,
    GRIPPER_TO_CUBE,
    OPENING,
    SPAWN_REACH,
    STATE_NAMES,
    STATE_SIZE,
    VELOCITY,
    update_relations,
)
from guerdon.errors import ConfigError, DataError

MODES = list(AutoresetMode)
OPEN, CLOSE = 1.0, -1.0


def make(num_envs=1, seed=0, **settings):
    settings.setdefault("autoreset_mode", AutoresetMode.DISABLED)
    env = TabletopVectorEnv(num_envs, **settings)
    env.reset(seed=seed)
    return env


def put(env, **places):
    """Move things of a scene by hand; the gripper is then at rest."""
    rows = env._scene.rows
    for name, place in places.items():
        where = {"gripper": GRIPPER, "cube": CUBE, "goal": GOAL, "opening": OPENING}[name]
        rows[where] = np.reshape(place, (-1, 1))
    rows[VELOCITY] = 0.0
    update_relations(rows)


def act(env, *action, times=1):
    """Take the same action in all environments, some times; the last result."""
    for _ in range(times):
        result = env.step(np.tile(np.float32(action), (env.num_envs, 1)))
    return result


def grasp(env, goal=(0.05, 0.05, 0.1)):
    put(env, gripper=(0.0, 0.0, CUBE_HALF), cube=(0.0, 0.0, CUBE_HALF), goal=goal)
    *_, info = act(env, 0, 0, 0, CLOSE, times=4)
    assert info["is_grasped"].all()


class TestPhysics:
    def test_stopping_takes_a_step_or_two(self):
        env = make()
        put(env, gripper=(0.0, -0.1, 0.1))
        *_, info = act(env, 0, 1, 0, OPEN, times=4)
        assert not info["is_robot_static"].any()
        *_, info = act(env, 0, 0, 0, OPEN)
        assert not info["is_robot_static"].any()
        *_, info = act(env, 0, 0, 0, OPEN)
        assert info["is_robot_static"].all()
        assert np.linalg.norm(env.state()[0, VELOCITY]) < STILL_SPEED

    def test_a_cube_is_grasped_carried_and_dropped(self):
        env = make()
        grasp(env)
        act(env, 0.5, -0.5, 1, CLOSE, times=6)
        state = env.state()[0]
        assert state[CUBE][2] > 0.08
        np.testing.assert_allclose(state[CUBE], state[GRIPPER], atol=1e-6)
        obs, *_, info = act(env, 0, 0, 0, OPEN)
        assert not info["is_grasped"].any()
        falling = obs[0, CUBE][2]
        assert CUBE_HALF < falling < state[CUBE][2]
        obs, *_ = act(env, 0, 0, 0, OPEN, times=6)
        assert obs[0, CUBE][2] == np.float32(CUBE_HALF)
        assert obs[0, OPENING] == 1.0

    def test_closing_fingers_centre_the_cube(self):
        env = make()
        put(env, gripper=(0.0, 0.012, CUBE_HALF), cube=(0.005, 0.0, CUBE_HALF))
        obs, *_, info = act(env, 0, 0, 0, CLOSE, times=4)
        assert info["is_grasped"].all()
        np.testing.assert_allclose(obs[0, GRIPPER_TO_CUBE], [0.005, 0.0, 0.0], atol=1e-6)
        assert obs[0, OPENING] == 0.5  # as wide as the cube

    @pytest.mark.parametrize("offset", [(0.03, 0.0, 0.0), (0.0, 0.0, 0.05), (0.0, 0.09, 0.0)])
    def test_fingers_that_close_beside_the_cube_hold_nothing(self, offset):
        env = make()
        put(env, gripper=np.array([0.0, 0.0, CUBE_HALF]) + offset, cube=(0.0, 0.0, CUBE_HALF))
        obs, *_, info = act(env, 0, 0, 0, CLOSE, times=5)
        assert not info["is_grasped"].any()
        assert obs[0, OPENING] == 0.0

    def test_closed_fingers_rest_on_the_cube_and_do_not_enter_it(self):
        env = make()
        put(env, gripper=(0.0, 0.0, 0.1), cube=(0.0, 0.0, CUBE_HALF), opening=0.0)
        obs, *_ = act(env, 0, 0, -1, CLOSE, times=10)
        assert obs[0, GRIPPER][2] > 2 * CUBE_HALF
        np.testing.assert_allclose(obs[0, CUBE], [0.0, 0.0, CUBE_HALF], atol=1e-6)

    def test_fingers_push_a_cube_that_they_run_into(self):
        env = make()
        put(env, gripper=(-0.08, 0.0, CUBE_HALF), cube=(0.0, 0.0, CUBE_HALF), opening=0.0)
        obs, *_, info = act(env, 1, 0, 0, CLOSE, times=5)
        assert obs[0, CUBE][0] > 0.01
        assert obs[0, GRIPPER_TO_CUBE][0] > 0.015
        assert not info["is_grasped"].any()

    @pytest.mark.parametrize("distance, placed", [(0.0, True), (0.024, True), (0.026, False), (0.05, False)])
    @pytest.mark.parametrize("direction", np.eye(3).tolist())
    def test_success_means_near_the_goal_and_still(self, distance, placed, direction):
        env = make()
        grasp(env, goal=np.array([0.0, 0.0, CUBE_HALF]) + distance * np.array(direction))
        *_, info = act(env, 0, 0, 0, CLOSE)
        assert info["is_obj_placed"].all() == placed
        assert info["success"].all() == placed
        *_, info = act(env, 0, 0.25, 0, CLOSE)  # still within the tolerance, where it was well within
        assert not info["is_robot_static"].any()
        assert not info["success"].any()
        if distance == 0.0:
            assert info["is_obj_placed"].all()

    def test_a_released_cube_at_a_goal_on_the_table_is_a_success(self):
        env = make()
        grasp(env, goal=(0.0, 0.0, CUBE_HALF))
        *_, info = act(env, 0, 0, 0, OPEN, times=3)
        assert info["success"].all() and not info["is_grasped"].any()

    def test_nothing_leaves_the_world_under_random_actions(self):
        env = make(64)
        actions = np.random.default_rng(0).uniform(-1, 1, (40, 64, 4)).astype(np.float32)
        actions[:, 32:, 2] -= 0.5
        for action in actions:
            obs, *_ = env.step(action)
            assert env.observation_space.contains(obs)
            assert (obs[:, CUBE][:, 2] >= np.float32(CUBE_HALF)).all()

    def test_held_cube_is_not_pressed_into_the_table(self):
        env = make()
        put(env, gripper=(0.0, 0.0, 0.03), cube=(0.0, 0.0, CUBE_HALF))
        act(env, 0, 0, 0, CLOSE, times=4)
        obs, *_, info = act(env, 0, 0, -1, CLOSE, times=4)
        assert info["is_grasped"].all()
        assert obs[0, CUBE][2] >= np.float32(CUBE_HALF)

    def test_state_layout(self):
        env = make(3)
        state = env.state()
        assert state.shape == (3, STATE_SIZE) == (3, len(STATE_NAMES)) and state.dtype == np.float32
        np.testing.assert_allclose(state[:, GRIPPER_TO_CUBE], state[:, CUBE] - state[:, GRIPPER], atol=1e-6)
        np.testing.assert_allclose(state[:, CUBE_TO_GOAL], state[:, GOAL] - state[:, CUBE], atol=1e-6)
        assert STATE_NAMES[GRASPED] == "is_grasped" and STATE_NAMES[OPENING] == "opening"

    def test_first_moments_vary_and_none_is_a_success(self):
        env = make(4000)
        state = env.state()
        _, info = env.reset(seed=7)
        assert not info["success"].any() and not info["is_obj_placed"].any()
        on_table = state[:, GOAL][:, 2] == np.float32(CUBE_HALF)
        assert 0.2 < on_table.mean() < 0.3
        assert state[~on_table][:, GOAL][:, 2].min() > 0.05
        assert np.linalg.norm(state[:, CUBE_TO_GOAL], axis=1).min() > GOAL_TOLERANCE + 0.008
        assert np.abs(state[:, CUBE][:, :2]).max() <= SPAWN_REACH
        assert len(np.unique(state, axis=0)) == 4000


class TestEnvReward:
    def test_dense_rises_with_each_stage(self):
        env = make()
        put(env, gripper=(0.1, 0.1, 0.15), cube=(-0.05, 0.0, CUBE_HALF), goal=(0.03, 0.0, 0.1))
        far = act(env, 0, 0, 0, OPEN)[1]
        put(env, gripper=(-0.05, 0.0, 0.05))
        near = act(env, 0, 0, 0, OPEN)[1]
        put(env, gripper=(-0.05, 0.0, CUBE_HALF))
        grasped = act(env, 0, 0, 0, CLOSE, times=4)[1]
        put(env, goal=(-0.05, 0.01, CUBE_HALF))
        moving = act(env, 0, 0.3, 0, CLOSE)[1]
        success = act(env, 0, 0, 0, CLOSE, times=2)[1]
        assert 0.0 < far < near < grasped < moving < success == 1.0
        assert success.dtype == np.float32

    def test_sparse_is_success_and_none_is_zero(self):
        for kind, wanted in (("sparse", 1.0), ("none", 0.0)):
            env = make(reward=kind)
            assert act(env, 0, 0, 0, OPEN)[1] == 0.0
            grasp(env, goal=(0.0, 0.0, CUBE_HALF))
            assert act(env, 0, 0, 0, CLOSE)[1] == wanted

    def test_dense_stays_within_bounds(self):
        env, expert = make(128), ScriptedExpert(0.3, seed=1)
        values = []
        for _ in range(50):
            obs, env_reward, *_ = env.step(expert.act(env.state()))
            values.append(env_reward)
        assert np.min(values) >= 0.0 and np.max(values) == 1.0
        assert env.observation_space.contains(obs)


class TestSeeding:
    @pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
    def test_an_environment_among_others_does_what_it_does_alone(self, mode):
        settings = {"max_episode_steps": 4, "domain_randomization": 1.0, "decoy": True}
        many = TabletopVectorEnv(5, autoreset_mode=mode, **settings)
        alone = TabletopVectorEnv(1, autoreset_mode=mode, **settings)
        obs_many, _ = many.reset(seed=40)
        obs_alone, _ = alone.reset(seed=43)
        actions = np.random.default_rng(0).uniform(-1, 1, (18, 5, 4))
        np.testing.assert_array_equal(obs_many[3], obs_alone[0])
        for action in actions:
            results = many.step(action), alone.step(action[3:4])
            for left, right in zip(results[0][:4], results[1][:4], strict=True):
                np.testing.assert_array_equal(left[3], right[0])
            for camera in ("base_camera", "wrist_camera"):
                frames = [env.render_frames(camera, final=True) for env in (many, alone)]
                np.testing.assert_array_equal(frames[0][3], frames[1][0])
        assert results[0][4]["episode_index"][3] == results[1][4]["episode_index"][0] >= 3

    def test_single_environment_equals_its_place_in_a_vector(self):
        many, single = make(3, seed=10), TabletopEnv()
        obs, info = single.reset(seed=12)
        np.testing.assert_array_equal(obs, many.state()[2])
        assert info["env_seed"] == 12 and info["episode_index"] == 0
        action = np.float32([[0.3, -0.2, 0.1, -1.0]] * 3)
        np.testing.assert_array_equal(single.step(action[2])[0], many.step(action)[0][2])
        many.reset()
        np.testing.assert_array_equal(single.reset()[0], many.state()[2])  # the second episodes agree too

    def test_seeds(self):
        env = TabletopVectorEnv(3)
        by_number, _ = env.reset(seed=5)
        second, _ = env.reset()
        by_list, _ = env.reset(seed=[5, 6, 7])
        np.testing.assert_array_equal(by_number, by_list)
        assert not np.array_equal(by_number, second)
        mixed, info = env.reset(seed=[None, 6, None])
        np.testing.assert_array_equal(mixed[[0, 2]], second[[0, 2]])
        np.testing.assert_array_equal(mixed[1], by_number[1])
        assert info["episode_index"].tolist() == [1, 0, 1]

    def test_without_a_seed_environments_differ(self):
        one, two = TabletopVectorEnv(2), TabletopVectorEnv(2)
        states = np.concatenate([one.reset()[0], two.reset()[0]])
        assert len(np.unique(states, axis=0)) == 4

    def test_reset_mask_resets_only_its_environments(self):
        env = make(4, seed=1)
        before = act(env, 1, 0, 0, OPEN, times=3)[0]
        mask = np.array([False, True, False, True])
        obs, info = env.reset(seed=1, options={"reset_mask": mask})
        np.testing.assert_array_equal(obs[~mask], before[~mask])
        np.testing.assert_array_equal(obs[mask], make(4, seed=1).state()[mask])
        assert info["elapsed_steps"].tolist() == [3, 0, 3, 0]
        np.testing.assert_array_equal(info["_success"], mask)

    def test_a_decoy_changes_no_other_draw(self):
        plain, trapped = (
            make(50, domain_randomization=1.0, decoy=decoy)._scene.rows for decoy in (False, True)
        )
        changed = np.flatnonzero((plain != trapped).any(axis=1))
        assert changed.tolist() == [28]  # whether there is one


class TestAutoreset:
    @pytest.mark.parametrize("obs_mode", ["state", "state+rgb"])
    @pytest.mark.parametrize("mode", MODES)
    def test_agrees_with_gymnasium(self, mode, obs_mode):
        """A Gymnasium vector of single environments is the oracle for all three modes."""
        settings = {"max_episode_steps": 4, "obs_mode": obs_mode, "image_size": (16, 16)}
        settings["cameras"] = ("base_camera", "wrist_camera")
        ours = TabletopVectorEnv(3, autoreset_mode=mode, **settings)
        theirs = SyncVectorEnv([lambda: TabletopEnv(**settings)] * 3, autoreset_mode=mode)
        assert ours.metadata["autoreset_mode"] is mode
        assert ours.observation_space == theirs.observation_space
        results = [env.reset(seed=3) for env in (ours, theirs)]
        _assert_equal(*results)
        rng = np.random.default_rng(0)
        for step in range(11):
            action = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
            results = [env.step(action) for env in (ours, theirs)]
            _assert_equal(results[0][:4], results[1][:4])
            final = [result[4].pop("final_obs", None) for result in results]
            _assert_equal(results[0][4], results[1][4])
            assert (final[0] is None) == (final[1] is None)
            if final[0] is not None:
                assert mode is AutoresetMode.SAME_STEP and step % 4 == 3
                rows = final[0] if isinstance(final[0], np.ndarray) else None
                for i in range(3):
                    row = rows[i] if rows is not None else {key: value[i] for key, value in final[0].items()}
                    _assert_equal(row, final[1][i])
            if mode is AutoresetMode.DISABLED and results[0][3].any():
                options = {"reset_mask": results[0][3]}
                _assert_equal(*[env.reset(options=dict(options)) for env in (ours, theirs)])
        theirs.close()

    def test_the_final_frame_and_state_stay_available(self):
        settings = {"max_episode_steps": 3, "domain_randomization": 1.0}
        env = make(4, autoreset_mode=AutoresetMode.SAME_STEP, **settings)
        twin = make(4, **settings)
        env._elapsed[:] = twin._elapsed[:] = [0, 1, 0, 1]  # the second and the fourth end earlier
        for _ in range(2):
            result = act(env, 0.5, 0.5, -0.5, CLOSE)
            act(twin, 0.5, 0.5, -0.5, CLOSE)
        done = np.array([False, True, False, True])
        np.testing.assert_array_equal(result[3], done)
        for camera in ("base_camera", "wrist_camera"):
            ends = twin.render_frames(camera)
            np.testing.assert_array_equal(env.render_frames(camera, final=True), ends)
            np.testing.assert_array_equal(env.render_frames(camera, [3, 0], final=True), ends[[3, 0]])
            present = env.render_frames(camera)
            np.testing.assert_array_equal(present[~done], ends[~done])
            assert (present[done] != ends[done]).any(axis=(1, 2, 3)).all()
        np.testing.assert_array_equal(env.final_state(), twin.state())
        np.testing.assert_array_equal(env.final_state()[done], result[4]["final_obs"][done])
        twin.reset(options={"reset_mask": done})
        np.testing.assert_array_equal(env.render_frames(), twin.render_frames())
        np.testing.assert_array_equal(env.state(), twin.state())
        act(env, 0, 0, 0, OPEN)  # now the first and the third end
        np.testing.assert_array_equal(env.final_state()[done], env.state()[done])
        assert (env.final_state()[~done] != env.state()[~done]).any(axis=1).all()

    def test_next_step_ignores_the_action_that_resets(self):
        env = make(2, autoreset_mode="next_step", max_episode_steps=2)
        *_, truncated, info = act(env, 1, 0, 0, OPEN, times=2)
        assert truncated.all() and info["elapsed_steps"].tolist() == [2, 2]
        np.testing.assert_array_equal(env.final_state(), env.state())
        obs, env_reward, terminated, truncated, info = act(env, 1, 0, 0, OPEN)
        assert not (terminated | truncated).any() and (env_reward == 0.0).all()
        assert info["elapsed_steps"].tolist() == [0, 0]
        assert (obs[:, VELOCITY] == 0.0).all()

    def test_disabled_refuses_to_step_a_finished_episode(self):
        env = make(2, max_episode_steps=1)
        act(env, 0, 0, 0, OPEN)
        with pytest.raises(DataError, match="environment 0 is over"):
            act(env, 0, 0, 0, OPEN)

    def test_success_ends_episodes_only_if_asked_to(self):
        for ends in (False, True):
            env, expert = make(8, terminate_on_success=ends, autoreset_mode="SameStep"), ScriptedExpert()
            lengths = []
            for _ in range(50):
                _, _, terminated, truncated, info = env.step(expert.act(env.state()))
                done = terminated | truncated
                expert.reset(done)
                lengths += info["final_info"]["elapsed_steps"][done].tolist() if done.any() else []
                assert not terminated.any() or info["final_info"]["success"][terminated].all()
            assert (min(lengths) < 30) == ends


def _assert_equal(left, right):
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_equal(left[key], right[key])
    elif isinstance(left, tuple):
        for a, b in zip(left, right, strict=True):
            _assert_equal(a, b)
    else:
        np.testing.assert_array_equal(left, right)


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

    def test_render_follows_gymnasium(self):
        single = TabletopEnv(render_mode="rgb_array", render_size=(40, 50))
        single.reset(seed=0)
        assert single.render().shape == (40, 50, 3) and single.render().dtype == np.uint8
        frames = make(2, render_mode="rgb_array").render()
        assert isinstance(frames, tuple) and [frame.shape for frame in frames] == [(256, 256, 3)] * 2
        assert make().render() is None


class TestDecoy:
    def test_lies_beside_the_cube_and_away_from_the_goal(self):
        rows = make(3000, decoy=True)._scene.rows
        from_cube = np.linalg.norm(rows[DECOY] - rows[CUBE], axis=0)
        assert from_cube.min() > 0.03 and from_cube.max() <= 0.0601
        assert np.linalg.norm(rows[DECOY] - rows[GOAL], axis=0).min() > 2 * GOAL_TOLERANCE - 0.02
        assert np.abs(rows[DECOY][:2]).max() < SPAWN_REACH + 0.06

    def test_reaching_it_is_no_success(self):
        env = make(20, decoy=True, reward="sparse")
        rows = env._scene.rows
        rows[CUBE] = rows[GRIPPER] = rows[DECOY]
        update_relations(rows)
        *_, info = act(env, 0, 0, 0, CLOSE, times=4)
        assert info["is_grasped"].all() and info["is_robot_static"].all()
        assert not info["success"].any()


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
            ({"obs_mode": "stat"}, "unknown obs_mode 'stat'; did you mean 'state'"),
            ({"reward": "dens"}, "did you mean 'dense'"),
            ({"cameras": ["base_cam"]}, "unknown camera 'base_cam'; did you mean 'base_camera'"),
            ({"cameras": "base_camera"}, "cameras must be a list"),
            ({"cameras": []}, "at least one camera"),
            ({"image_size": (64, 8)}, "image_size"),
            ({"image_size": 64}, r"image_size must be \(height, width\)"),
            ({"max_episode_steps": 0}, "max_episode_steps"),
            ({"domain_randomization": 1.5}, "between 0 and 1"),
            ({"domain_randomization": float("nan")}, "between 0 and 1"),
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
