"""The peg, the hole and the board."""

import numpy as np
import pytest

from guerdon.config.schema_robot import TARGET_POSE
from guerdon.envs.robot.poses import (
    between,
    euler_from_quat,
    multiply,
    pose7,
    quat_from_euler,
    rotvec_from_quat,
)
from guerdon.envs.robot.sim.physics import HOLE_DEPTH, STIFFNESS, PegArm
from guerdon.envs.robot.sim.render import CAMERAS, draw

ON_BOARD = HOLE_DEPTH
"""Height over the target at which the tip touches the board."""


def go(arm, x=0.0, y=0.0, z=0.0, rx=0.0, ry=0.0, steps=100):
    offset = np.array([x, y, z, rx, ry, 0.0])
    arm.command(pose7(np.array(TARGET_POSE) + offset))
    arm.advance(steps)
    return np.array(arm.position) - TARGET_POSE[:3]


def test_a_peg_over_the_hole_goes_in():
    arm = PegArm(TARGET_POSE)
    go(arm, z=0.05)
    assert arm.depth() < 0 and not arm.inserted()
    go(arm)
    assert arm.inserted() and arm.depth() == pytest.approx(HOLE_DEPTH, abs=1e-4)
    go(arm, z=0.05)
    assert not arm.inserted() and arm.inserted_once


@pytest.mark.parametrize(("x", "y"), [(0.006, 0.0), (0.0, -0.02), (0.03, 0.03)])
def test_a_peg_beside_the_hole_stays_on_the_board(x, y):
    arm = PegArm(TARGET_POSE)
    go(arm, x, y, 0.05)
    here = go(arm, x, y, 0.0)
    assert here[2] == pytest.approx(ON_BOARD, abs=1e-4)
    assert arm.force[2] == pytest.approx(STIFFNESS * ON_BOARD, rel=0.02)
    assert not arm.inserted_once


def test_friction_holds_a_peg_that_is_pressed_on():
    pressed, light = PegArm(TARGET_POSE), PegArm(TARGET_POSE)
    for arm, z in ((pressed, 0.0), (light, ON_BOARD - 0.002)):
        go(arm, 0.03, 0.0, 0.05)
        go(arm, 0.03, 0.0, z)
    assert go(pressed, 0.022, 0.0, 0.0)[0] == pytest.approx(0.03, abs=1e-3)
    assert go(light, 0.022, 0.0, ON_BOARD - 0.002)[0] < 0.024


def test_the_slope_leads_a_peg_in_that_is_a_little_off():
    arm = PegArm(TARGET_POSE)
    go(arm, 0.003, 0.0, 0.05)
    here = go(arm, 0.003, 0.0, 0.0)
    assert arm.depth() > 0.02 and abs(here[0]) < 0.0015
    assert arm.force[0] < -1.0, "the wall does not push"


def test_a_peg_that_leans_does_not_go_in():
    arm = PegArm(TARGET_POSE)
    go(arm, z=0.05, rx=0.2)
    go(arm, y=-0.05 * np.sin(0.2), rx=0.2)  # the tip is over the hole
    assert arm.depth() < 0.005


def test_the_hole_keeps_the_peg_from_moving_aside():
    arm = PegArm(TARGET_POSE)
    go(arm, z=0.05)
    go(arm)
    here = go(arm, x=0.01)
    assert abs(here[0]) < 0.0015 and arm.force[0] == pytest.approx(-STIFFNESS * 0.009, rel=0.1)


def test_an_open_hand_lets_the_peg_go_where_it_is():
    arm = PegArm(TARGET_POSE)
    go(arm, z=0.05)
    go(arm)
    arm.gripper_target = 1.0
    go(arm)
    go(arm, z=0.06)
    assert arm.inserted() and not arm.held
    go(arm)
    arm.gripper_target = 0.0
    go(arm)
    assert arm.held
    go(arm, z=0.06)
    assert not arm.inserted()


def test_a_failed_controller_stands_until_cleared():
    arm = PegArm(TARGET_POSE)
    before = go(arm, z=0.06)
    arm.fail()
    np.testing.assert_allclose(go(arm, z=0.08), before)
    arm.clear()
    assert go(arm, z=0.08)[2] == pytest.approx(0.08, abs=1e-3)


@pytest.mark.parametrize("camera", CAMERAS)
def test_pictures_show_how_deep_the_peg_is(camera):
    arm = PegArm(TARGET_POSE)
    pictures = []
    for z in (0.05, 0.02, 0.0):
        go(arm, z=z)
        image = draw(arm, camera, (64, 64)).astype(int)
        red = (image[..., 0] > 130) & (image[..., 1] < 90)
        pictures.append(int(red.sum()))
    assert pictures[0] > pictures[1] > 1.3 * pictures[2] > 0, pictures


def test_no_two_pictures_are_the_same():
    arm = PegArm(TARGET_POSE)
    first, second = (draw(arm, "front_camera", (32, 48)) for _ in range(2))
    assert first.shape == (32, 48, 3) and first.dtype == np.uint8
    assert not np.array_equal(first, second)
    assert np.abs(first.astype(int) - second).mean() < 5


def test_rotations_agree_with_scipy():
    from scipy.spatial.transform import Rotation

    turns = Rotation.random(50, rng=0)
    first = turns[0].as_quat()
    for turn in turns:
        quat = turn.as_quat()
        np.testing.assert_allclose(euler_from_quat(quat), turn.as_euler("xyz"), atol=1e-9)
        assert abs(quat_from_euler(turn.as_euler("xyz")) @ quat) == pytest.approx(1)
        np.testing.assert_allclose(rotvec_from_quat(quat), turn.as_rotvec(), atol=1e-9)
        product = (turn * turns[0]).as_quat()
        assert abs(multiply(quat, first) @ product) == pytest.approx(1)
        start, end = np.concatenate([[0, 0, 0], first]), np.concatenate([[1, 2, 3], quat])
        middle = between(start, end, 0.5)
        np.testing.assert_allclose(middle[:3], [0.5, 1, 1.5])
        halves = [
            Rotation.from_quat(middle[3:]) * turns[0].inv(),
            turn * Rotation.from_quat(middle[3:]).inv(),
        ]
        assert halves[0].magnitude() == pytest.approx(halves[1].magnitude(), abs=1e-6)
