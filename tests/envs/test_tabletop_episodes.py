"""Episodes of the tabletop: what seeds decide, and how they end and begin again."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from guerdon.core.errors import DataError
from guerdon.envs import ScriptedExpert, TabletopEnv, TabletopVectorEnv
from guerdon.envs.tabletop.scene import CUBE_TO_GOAL, GRASPED, GRIPPER_TO_CUBE, VELOCITY
from tests.envs.moves import CLOSE, OPEN, act, make

MODES = list(AutoresetMode)


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
        plain, trapped = (make(50, domain_randomization=1.0, decoy=decoy)._rows for decoy in (False, True))
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


class TestEasyStarts:
    def test_a_share_of_episodes_starts_part_way_and_the_others_as_always(self):
        usual, some, all_easy = (make(400, easy_starts=share).state() for share in (0.0, 0.3, 1.0))
        changed = (usual != some).any(axis=1)
        assert 0.2 < changed.mean() < 0.4
        np.testing.assert_array_equal(
            some[changed], all_easy[changed]
        )  # the same start, if it is an easy one
        assert (usual != all_easy).any(axis=1).all()
        held = all_easy[:, GRASPED] > 0.5
        assert 0.15 < held.mean() < 0.35 and not usual[:, GRASPED].any()
        over = all_easy[~held, GRIPPER_TO_CUBE]
        assert np.abs(over[:, :2]).max() < 1e-6 and over[:, 2].max() <= 0.0 and over[:, 2].min() > -0.11

    def test_a_cube_that_is_held_stays_so_and_is_anywhere_up_to_the_goal(self):
        env = make(400, easy_starts=1.0)
        held = env.state()[:, GRASPED] > 0.5
        info = act(env, 0.0, 0.0, 0.0, CLOSE)[-1]
        assert info["is_grasped"][held].all()
        assert not info["success"][~held].any()
        missing = np.linalg.norm(env.state()[held, CUBE_TO_GOAL], axis=1)
        assert (missing > 0.025).mean() > 0.5  # most are still to be carried
        assert (missing < 0.025).any() and (missing > 0.1).any()
