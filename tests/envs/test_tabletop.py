"""The tabletop environment: physics, success, env rewards, the decoy."""

import numpy as np
import pytest

from guerdon.envs import ScriptedExpert
from guerdon.envs.tabletop.scene import (
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
    STILL_SPEED,
    VELOCITY,
    update_relations,
)
from tests.envs.moves import CLOSE, OPEN, act, grasp, make, put


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


class TestDecoy:
    def test_lies_beside_the_cube_and_away_from_the_goal(self):
        rows = make(3000, decoy=True)._rows
        from_cube = np.linalg.norm(rows[DECOY] - rows[CUBE], axis=0)
        assert from_cube.min() > 0.03 and from_cube.max() <= 0.0601
        assert np.linalg.norm(rows[DECOY] - rows[GOAL], axis=0).min() > 2 * GOAL_TOLERANCE - 0.02
        assert np.abs(rows[DECOY][:2]).max() < SPAWN_REACH + 0.06

    def test_reaching_it_is_no_success(self):
        env = make(20, decoy=True, reward="sparse")
        rows = env._rows
        rows[CUBE] = rows[GRIPPER] = rows[DECOY]
        update_relations(rows)
        *_, info = act(env, 0, 0, 0, CLOSE, times=4)
        assert info["is_grasped"].all() and info["is_robot_static"].all()
        assert not info["success"].any()
