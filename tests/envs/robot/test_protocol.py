"""The simulated robot answers as SERL's robot server does, over one kept-alive connection."""

import http.client
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import numpy as np
import pytest

from guerdon.config.schema_robot import TARGET_POSE
from guerdon.core.errors import RobotError, RobotUnreachableError
from guerdon.envs.robot.driver import RobotState
from guerdon.envs.robot.poses import pose7
from guerdon.envs.robot.serl_http import SerlHttpDriver
from tests.envs.robot.conftest import wait_for


@pytest.fixture
def ask(server):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.connect()
    socket = connection.sock

    def post(route, content=None, method="POST"):
        body = None if content is None else json.dumps(content)
        connection.request(method, route, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert connection.sock is socket, "the connection was not kept"
        return answer.status, text

    yield post
    connection.close()


@pytest.mark.parametrize(
    ("route", "key", "size"),
    [
        ("/getpos", "pose", 7),
        ("/getvel", "vel", 6),
        ("/getforce", "force", 3),
        ("/gettorque", "torque", 3),
        ("/getq", "q", 7),
        ("/getdq", "dq", 7),
        ("/getjacobian", "jacobian", 42),
        ("/get_gripper", "gripper", 1),
    ],
)
def test_every_query_has_its_answer(ask, route, key, size):
    status, body = ask(route)
    answer = json.loads(body)
    assert status == 200 and list(answer) == [key]
    assert np.size(answer[key]) == size


@pytest.mark.parametrize(
    ("route", "content", "word"),
    [
        ("/pose", {"arr": pose7(TARGET_POSE).tolist()}, b"Moved"),
        ("/jointreset", None, b"Reset Joint"),
        ("/clearerr", None, b"Clear"),
        ("/startimp", None, b"Started impedance"),
        ("/stopimp", None, b"Stopped impedance"),
        ("/open_gripper", None, b"Opened"),
        ("/close_gripper", None, b"Closed"),
        ("/move_gripper", {"gripper_pos": 128}, b"Moved Gripper"),
        ("/update_param", {"translational_stiffness": 1500}, b"Updated compliance parameters"),
    ],
)
def test_every_command_is_answered_with_a_word(ask, route, content, word):
    assert ask(route, content) == (200, word)


def test_the_state_has_all_parts_and_they_fit(ask):
    _, body = ask("/getstate")
    answer = json.loads(body)
    assert list(answer) == ["pose", "vel", "force", "torque", "q", "dq", "jacobian", "gripper_pos"]
    state = RobotState.from_answer(answer)
    np.testing.assert_allclose(state.jacobian @ state.dq, state.vel, atol=1e-9)
    assert np.linalg.norm(state.pose[3:]) == pytest.approx(1.0)


def test_nonsense_is_refused_and_the_server_goes_on(ask, server):
    assert ask("/nowhere")[0] == 404
    for content in ({"arr": [1, 2]}, {"arr": [float("nan")] * 7}, {}, [1]):
        assert ask("/pose", content)[0] == 400
    assert ask("/sim/camera/no_camera", method="GET")[0] == 400
    assert ask("/sim/faults", {"drop_rat": 0.1})[0] == 400
    assert server.world.record.commands == 0
    assert ask("/getstate")[0] == 200


def test_a_command_outside_the_box_is_noticed_at_the_server(ask, server):
    ask("/pose", {"arr": pose7(TARGET_POSE).tolist()})
    assert server.world.record.outside == 0
    beyond = [*TARGET_POSE]
    beyond[0] += 0.0601
    turned = [*TARGET_POSE]
    turned[4] += 0.26
    for pose in (beyond, turned):
        ask("/pose", {"arr": pose7(pose).tolist()})
    assert server.world.record.outside == 2
    assert ["x = " in found["wrong"] for found in server.world.record.violations] == [True, False]


def test_the_driver_moves_the_arm_and_reads_it_back(server):
    driver = SerlHttpDriver(server.url)
    goal = driver.state().pose.copy()
    goal[:3] += [0.01, -0.02, 0.01]
    driver.move(goal)
    wait_for(lambda: np.abs(driver.state().pose - goal).max() < 1e-3)
    driver.open_gripper()
    wait_for(lambda: driver.state().gripper_pos > 0.99)
    driver.move_gripper(0.5)
    wait_for(lambda: abs(driver.state().gripper_pos - 0.5) < 0.01)
    driver.stop()
    driver.move([*goal[:2], 0.15, *goal[3:]])
    before = driver.state().pose
    driver.reset()
    assert abs(driver.state().pose[2] - before[2]) > 0.005
    driver.close()


def test_lost_answers_are_asked_for_again(server):
    driver = SerlHttpDriver(server.url, retries=6)
    server.world.set_faults({"drop_rate": 0.3})
    for _ in range(40):
        driver.state()
        driver.move(driver.state().pose)
    assert driver.connection.num_retries >= server.world.record.faults["drop"] > 10
    server.world.set_faults({"drop_rate": 1.0})
    with pytest.raises(RobotUnreachableError, match="7 tries"):
        driver.state()
    driver.close()


class _OldServer(BaseHTTPRequestHandler):
    """Like Flask's own server: HTTP/1.0, every connection is closed after its answer."""

    answers = b"{}"

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answers)

    def log_message(self, *args):
        pass


@pytest.fixture
def old_server(server):
    class Handler(_OldServer):
        answers = json.dumps(server.world.state()).encode()

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running, Handler
        running.shutdown()
        thread.join()


def test_servers_that_close_every_connection_are_fine(old_server):
    running, _ = old_server
    driver = SerlHttpDriver(f"http://127.0.0.1:{running.server_address[1]}")
    poses = [driver.state().pose for _ in range(5)]
    assert len(poses) == 5 and driver.connection.num_retries == 0
    driver.close()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"<html>", "no JSON"),
        (b"[1]", "no object"),
        (b'{"pose": 1}', "makes no sense"),
        (b"{}", "has no 'pose'"),
    ],
)
def test_answers_that_make_no_sense_are_errors(old_server, answer, complaint):
    running, handler = old_server
    handler.answers = answer
    driver = SerlHttpDriver(f"http://127.0.0.1:{running.server_address[1]}")
    with pytest.raises(RobotError, match=complaint):
        driver.state()
    driver.close()
