"""The servers of this package, and requests as they are, with nothing that a library would mend."""

import http.client
import json
import socket

import numpy as np
import pytest

from guerdon.cli.teleop_page import LiveView, Shown, ViewServer
from guerdon.config.schema_robot import TARGET_POSE, RobotSimConfig
from guerdon.envs.robot.poses import pose7
from guerdon.envs.robot.sim.server import SimServer

POSE = pose7(TARGET_POSE).tolist()
ANSWER_SECONDS = 60.0
"""Only against hanging."""


@pytest.fixture
def sim():
    with SimServer(RobotSimConfig(port=0, time_scale=20.0, image_size=(16, 16))) as server:
        yield server


@pytest.fixture
def view(tmp_path):
    live = LiveView(0.5, tmp_path / "wrong", "test")
    frames = {"front": np.zeros((8, 8, 3), np.uint8)}
    live.show(Shown(step=1, frames=frames, scored={"front": frames["front"][None]}, prob_success=0.7))
    server = ViewServer(live, 0)
    yield server
    server.stop()


@pytest.fixture(params=["sim", "view"])
def server(request):
    return request.getfixturevalue(request.param)


def connect(server):
    return socket.create_connection(server.server_address, timeout=ANSWER_SECONDS)


def read_answer(connection):
    """Status, headers and body of one answer; the connection must not just end."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.headers, answer.read()


def send(server, method, path, body=b"", **headers):
    """One request as it is, with nothing that a library would add or refuse to send."""
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    if "Host" not in headers:
        given["Host"] = f"127.0.0.1:{server.server_address[1]}"
    if body and "Content-Length" not in headers:
        given["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    with connect(server) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        return read_answer(connection)


def is_error(answer, status, words):
    assert answer[0] == status, answer
    assert answer[1]["Content-Type"] == "application/json"
    assert words in json.loads(answer[2])["error"]
    return True


def answers(server):
    """Whether the server is still there for those who behave."""
    path = "/sim/info" if isinstance(server, SimServer) else "/state.json"
    return send(server, "GET", path)[0] == 200


def pose_body(pose=POSE):
    return json.dumps({"arr": pose}).encode()
