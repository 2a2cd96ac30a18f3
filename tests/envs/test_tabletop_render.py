"""The pictures of the tabletop: success can be seen in one, nothing that matters is hidden or cut off."""

import itertools

import numpy as np
import pytest

from guerdon.core.errors import DataError
from guerdon.envs import ScriptedExpert, TabletopVectorEnv
from guerdon.envs.tabletop.camera import base_camera
from guerdon.envs.tabletop.render import AMBER, BLUE, GREEN
from guerdon.envs.tabletop.scene import (
    CUBE,
    CUBE_HALF,
    CUBE_RGB,
    DECOY,
    GOAL,
    GOAL_HEIGHTS,
    GOAL_TOLERANCE,
    GRASPED,
    GRIPPER,
    HAS_DECOY,
    OPENING,
    SPAWN_REACH,
    STILL,
    update_relations,
)

CAMERAS = ("base_camera", "wrist_camera")
LAMP = np.array([[-0.022], [0.0], [0.082]])


def make(num_envs=1, seed=0, **settings):
    env = TabletopVectorEnv(num_envs, autoreset_mode="Disabled", **settings)
    env.reset(seed=seed)
    return env


def hold_cube(env, offset=(0.0, 0.0, 0.0), goal=(0.02, 0.02, 0.09)):
    """Let the gripper hold the cube at `offset` from the goal, both [3] or [3, N]."""
    rows = env._rows
    rows[GOAL] = np.reshape(goal, (3, -1))
    rows[CUBE] = rows[GRIPPER] = rows[GOAL] + np.reshape(offset, (3, -1))
    rows[OPENING], rows[GRASPED] = 0.5, 1.0
    update_relations(rows)


def lamp_pixels(env, size=(64, 64)):
    """Where the lamp is in the images of `base_camera`: rows and columns [N]."""
    rows = env._rows
    u, v, _ = base_camera(rows, size).project(rows[GRIPPER] + LAMP)
    return np.clip(v, 2, size[0] - 3).astype(int), np.clip(u, 2, size[1] - 3).astype(int)


def nearest_lamp(colours):
    """True where colours [n, 3] are nearer to blue than to amber."""
    to_blue, to_amber = (np.abs(colours - np.array(lamp)).sum(axis=-1) for lamp in (BLUE, AMBER))
    return to_blue < to_amber


def difference(one, two):
    """How many pixels clearly differ."""
    return int((np.abs(one.astype(int) - two).max(axis=-1) > 20).sum())


class TestSuccessIsVisible:
    @pytest.mark.parametrize("camera", CAMERAS)
    def test_the_lamp_tells_still_from_moving(self, camera):
        env = make()
        hold_cube(env)
        still = env.render_frames(camera)[0]
        env._rows[STILL] = 0.0
        moving = env.render_frames(camera)[0]
        changed = np.abs(still.astype(int) - moving).max(axis=-1) > 20
        assert 12 <= changed.sum() <= 90  # the lamp and nothing but the lamp
        red, _, blue = (still.astype(int) - moving)[changed].mean(axis=0)
        assert red < -60 and blue > 60

    def test_the_lamp_is_right_and_in_sight_in_every_frame(self):
        env = make(24, domain_randomization=1.0, decoy=True)
        expert = ScriptedExpert(0.5, seed=1)
        for _ in range(50):
            *_, info = env.step(expert.act(env.state()))
            frames = env.render_frames().astype(int)
            colours = frames[(np.arange(24), *lamp_pixels(env))]
            np.testing.assert_array_equal(nearest_lamp(colours), info["is_robot_static"])

    def test_the_goal_does_not_hide_the_lamp(self):
        env = make()
        rows = env._rows
        before = env.render_frames()[0][tuple(np.concatenate(lamp_pixels(env)))]
        rows[GOAL] = rows[GRIPPER] + LAMP
        after = env.render_frames()[0][tuple(np.concatenate(lamp_pixels(env)))]
        np.testing.assert_array_equal(before, after)

    def test_a_near_miss_looks_different_whatever_its_direction(self):
        directions = np.array(list(itertools.product((-1, 0, 1), repeat=3)), float)
        directions = directions[np.abs(directions).sum(axis=1) > 0]
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        env = make(1 + len(directions))
        hold_cube(env, np.concatenate([np.zeros((1, 3)), 0.035 * directions]).T)
        frames = env.render_frames()
        assert min(difference(frames[0], frame) for frame in frames[1:]) >= 30
        # Seen alone, without the gripper's help, the cube inside the ball still tells near from far.
        u, v, _ = (
            np.rint(a[0]).astype(int) for a in base_camera(env._rows, (64, 64)).project(env._rows[GOAL])
        )
        balls = frames[:, v - 4 : v + 5, u - 4 : u + 5]
        assert min(difference(balls[0], ball) for ball in balls[1:]) >= 12

    def test_depth_along_the_line_of_sight_is_visible(self):
        env = make(3)
        camera = base_camera(env._rows, (64, 64))
        hold_cube(env, camera.forward * np.array([0.0, 0.035, -0.035]))
        inside, behind, in_front = env.render_frames().astype(int)
        u, v, _ = (np.rint(a[0]).astype(int) for a in camera.project(env._rows[GOAL]))
        greenness = [frame[v, u, 1] - frame[v, u, 0] for frame in (behind, in_front)]
        assert greenness[0] > 100 and greenness[1] < 0  # the ball is before the cube, or the cube before it
        assert difference(inside, behind) > 20 and difference(inside, in_front) > 20

    def test_the_tolerance_spans_enough_pixels(self):
        env = make()
        camera = base_camera(env._rows, (64, 64))
        corners = _corners(SPAWN_REACH, (CUBE_HALF, GOAL_HEIGHTS[1]))
        _, _, depth = camera.project(corners)
        assert (GOAL_TOLERANCE * camera.focal / depth).min() >= 4.0

    @pytest.mark.parametrize("amount", [0.0, 1.0])
    def test_whatever_matters_is_in_the_picture(self, amount):
        env = make(200, domain_randomization=amount)
        camera = base_camera(env._rows, (64, 64))
        for corners, margin in (
            (_corners(SPAWN_REACH, (CUBE_HALF,)), 2.0),
            (_corners(SPAWN_REACH, GOAL_HEIGHTS), 2.0),
        ):
            u, v, _ = camera.project(corners)
            assert u.min() > margin and u.max() < 64 - margin
            assert v.min() > margin and v.max() < 64 - margin

    def test_a_millimetre_can_be_seen(self):
        env = make(2)
        rows = env._rows
        rows[:, 1] = rows[:, 0]
        rows[CUBE][1, 1] += 0.001
        one, two = env.render_frames().astype(int)
        assert np.abs(one - two).max() >= 8


def _corners(reach, heights):
    """[3, k, 1]."""
    return np.array(list(itertools.product((-reach, reach), (-reach, reach), heights))).T[:, :, None]


class TestLooks:
    def test_without_randomization_all_episodes_look_alike(self):
        env = make(2)
        rows = env._rows
        rows[:29, 1] = rows[:29, 0]
        one, two = env.render_frames()
        np.testing.assert_array_equal(one, two)

    @pytest.mark.parametrize("camera", CAMERAS)
    def test_randomization_changes_colours_light_and_pose(self, camera):
        env = make(40, domain_randomization=1.0)
        env._rows[:29] = env._rows[:29, :1]  # the same scene, in 40 looks
        frames = env.render_frames(camera).astype(float)
        assert frames.std(axis=0).mean() > 15
        half = make(40, domain_randomization=0.3)
        half._rows[:29] = half._rows[:29, :1]
        assert 2 < half.render_frames(camera).astype(float).std(axis=0).mean() < frames.std(axis=0).mean()

    def test_the_cube_cannot_be_taken_for_the_goal_or_a_lamp(self):
        rgb = make(2000, domain_randomization=1.0)._rows[CUBE_RGB].T
        for other in (GREEN, BLUE, AMBER):
            assert np.linalg.norm(rgb - np.array(other), axis=1).min() > 70
        assert (rgb[:, 0] > 1.8 * rgb[:, 1]).all()  # never green

    def test_the_picture_of_the_table_follows_the_episode(self):
        env = make(3, domain_randomization=1.0)
        env.render_frames()
        env.reset()
        fresh = make(3, domain_randomization=1.0)
        fresh.reset()
        np.testing.assert_array_equal(env.render_frames(), fresh.render_frames())
        np.testing.assert_array_equal(env.render_frames(env_ids=[2]), fresh.render_frames()[2:])

    def test_pictures_too_large_to_be_kept_are_the_same(self, monkeypatch):
        frames = make(4, domain_randomization=1.0).render_frames()
        monkeypatch.setattr("guerdon.envs.tabletop.render._MAX_KEPT_BYTES", 1000)
        env = make(4, domain_randomization=1.0)
        np.testing.assert_array_equal(env.render_frames(), frames)
        assert not env.renderer._own

    def test_a_decoy_looks_exactly_like_the_goal(self):
        env = make(2, decoy=True)
        rows = env._rows
        rows[:, 1] = rows[:, 0]
        rows[CUBE] = np.array([[0.0], [0.09], [CUBE_HALF]])
        rows[GRIPPER] = np.array([[0.1], [0.09], [0.15]])
        rows[GOAL] = np.array([[-0.06, 0.05], [-0.07, 0.0], [CUBE_HALF, CUBE_HALF]])
        rows[DECOY] = rows[GOAL][:, ::-1]
        swapped = env.render_frames()
        np.testing.assert_array_equal(swapped[0], swapped[1])
        rows[HAS_DECOY] = 0.0
        alone = env.render_frames()
        assert difference(alone[0], swapped[0]) > 20

    @pytest.mark.parametrize("camera", CAMERAS)
    def test_cube_goal_and_gripper_are_all_drawn(self, camera):
        env = make()
        rows = env._rows
        rows[GRIPPER] = np.array([[0.0], [0.0], [0.12]])
        rows[CUBE] = np.array([[0.03], [0.03], [CUBE_HALF]])
        rows[GOAL] = np.array([[0.02], [-0.03], [CUBE_HALF]])
        frame = env.render_frames(camera)[0].astype(int)
        red, green, blue = frame.transpose(2, 0, 1)
        assert ((red > 150) & (green < 90)).sum() >= 20  # the cube
        assert ((green > red + 60) & (green > blue + 60)).sum() >= 20  # the goal
        assert ((blue > red + 80) & (blue > 150)).sum() >= 8  # the lamp
        rows[GRIPPER][1] += 0.05
        assert difference(frame, env.render_frames(camera)[0]) > 100


class TestFrames:
    @pytest.mark.parametrize("camera", CAMERAS)
    def test_a_frame_does_not_depend_on_the_others(self, camera):
        env = make(30, domain_randomization=1.0, decoy=True)
        expert = ScriptedExpert(0.4)
        for step in range(40):
            env.step(expert.act(env.state()))
            if step % 6 == 0:
                frames = env.render_frames(camera)
                for ids in ([0], [7, 29, 3], np.arange(10, 20)):
                    np.testing.assert_array_equal(env.render_frames(camera, ids), frames[ids])

    def test_many_large_frames_come_out_as_single_ones_do(self):
        env = make(5, domain_randomization=0.5)  # more than are drawn at once at this size
        frames = env.render_frames(size=(600, 640))
        np.testing.assert_array_equal(frames[4:], env.render_frames(env_ids=[4], size=(600, 640)))

    def test_frames_are_repeatable_and_fresh(self):
        env = make(2)
        one, two = env.render_frames(), env.render_frames()
        np.testing.assert_array_equal(one, two)
        one[:] = 0
        np.testing.assert_array_equal(env.render_frames(), two)

    @pytest.mark.parametrize("size", [(16, 16), (48, 80), (100, 60), (128, 128)])
    @pytest.mark.parametrize("camera", CAMERAS)
    def test_any_size(self, camera, size):
        env = make(3)
        frames = env.render_frames(camera, size=size)
        assert frames.shape == (3, *size, 3) and frames.dtype == np.uint8
        assert frames.std() > 20

    def test_a_larger_picture_shows_the_same(self):
        env = make(4)
        small, large = env.render_frames(), env.render_frames(size=(256, 256))
        shrunk = large.reshape(4, 64, 4, 64, 4, 3).mean(axis=(2, 4))
        assert np.abs(small - shrunk).mean() < 5

    def test_out_is_written_in_place(self):
        env = make(3)
        history = np.zeros((3, 4, 64, 64, 3), np.uint8)  # as a collector keeps it: [N, T, H, W, C]
        result = env.render_frames(out=history[:, 2])
        assert np.shares_memory(result, history)
        np.testing.assert_array_equal(history[:, 2], env.render_frames())
        assert not history[:, [0, 1, 3]].any()
        env.render_frames("wrist_camera", [1], out=history[1:2, 0])
        np.testing.assert_array_equal(history[1, 0], env.render_frames("wrist_camera")[1])

    def test_out_must_fit(self):
        env = make(2)
        locked = np.zeros((2, 64, 64, 3), np.uint8)
        locked.flags.writeable = False
        for out in (
            np.zeros((2, 64, 64, 3), np.float32),
            np.zeros((1, 64, 64, 3), np.uint8),
            np.zeros((2, 64, 128, 3), np.uint8)[:, :, ::2],
            np.zeros((2, 3, 64, 64), np.uint8).transpose(0, 2, 3, 1),
            locked,
        ):
            with pytest.raises(DataError, match="out must"):
                env.render_frames(out=out)
