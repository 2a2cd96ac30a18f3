"""Whose requests are answered: foreign pages and foreign names get nowhere, programs need no token."""

import http.client
import json
import socket

import pytest

from guerdon.config.schema_robot import RobotSimConfig
from guerdon.envs.robot.sim.server import SimServer
from guerdon.web import TOKEN_HEADER
from tests.web.conftest import ANSWER_SECONDS, POSE, is_error, pose_body, send


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Content_Type": "text/plain"},
        {"Origin": "http://evil.example", "Content_Type": "application/json"},
        {"Origin": "null", "Content_Type": "application/json"},
        {"Origin": "http://localhost:3000", "Content_Type": "application/json"},
        {"Sec_Fetch_Site": "cross-site", "Content_Type": "application/json"},
        {"Sec_Fetch_Site": "same-site", "Content_Type": "application/json"},
    ],
    ids=["text", "json", "null", "another port", "no origin", "same site"],
)
def test_a_foreign_page_cannot_move_the_simulated_arm(sim, headers):
    assert is_error(send(sim, "POST", "/pose", pose_body(), **headers), 403, "web pages may not use")
    assert sim.world.record.commands == 0
    assert send(sim, "POST", "/pose", pose_body(), Content_Type="application/json")[2] == b"Moved"
    assert sim.world.record.commands == 1


def test_a_body_that_is_not_called_json_is_refused(sim):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        assert is_error(send(sim, "POST", "/pose", pose_body(), Content_Type=kind), 415, "application/json")
    assert sim.world.record.commands == 0


def test_a_pages_preflight_is_refused(server):
    headers = {"Origin": "http://evil.example", "Access_Control_Request_Method": "POST"}
    answer = send(server, "OPTIONS", "/pose", **headers)
    assert is_error(answer, 405, "only GET and POST")
    assert not [name for name in answer[1] if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:5000", "127.0.0.1.evil.example", "localhost@evil", "192.0.2.7", ""],
)
def test_a_foreign_name_that_was_pointed_here_leads_nowhere(server, host):
    """DNS rebinding: the page's name leads to 127.0.0.1, and the browser takes us for its own server."""
    for path in ("/", "/state.json", "/sim/info"):
        assert is_error(send(server, "GET", path, Host=host), 403, "is not this server")
    assert is_error(send(server, "POST", "/getstate", Host=host, Origin=f"http://{host}"), 403, "not this")


def test_a_request_without_a_host_or_with_two_is_refused(server):
    assert is_error(send(server, "GET", "/", Host=None), 400, "one Host")
    assert is_error(send(server, "GET", "/", Host="127.0.0.1\r\nHost: evil.example"), 400, "one Host")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_the_page_works_under_every_name_of_this_machine(view, name):
    host = f"{name}:{view.server_address[1]}"
    text = send(view, "GET", "/", Host=host, Sec_Fetch_Site="none")[2].decode()
    assert f'TOKEN = ["{TOKEN_HEADER}", "{view.token}"]' in text
    headers = {"Host": host, "Origin": f"http://{host.lower()}", "Sec_Fetch_Site": "same-origin"}
    status, _, body = send(view, "POST", "/wrong", **headers, **{TOKEN_HEADER: view.token})
    assert status == 200 and b"step 1 saved as failure" in body and view.view.num_wrong == 1


def test_the_pages_key_needs_the_pages_token(view):
    for token in (None, "", "wrong", view.token[:-1], "ü"):
        answer = send(view, "POST", "/wrong", **{TOKEN_HEADER: token})
        assert is_error(answer, 403, "token")
    right = {TOKEN_HEADER: view.token}
    foreign = send(view, "POST", "/wrong", Origin="http://evil.example", **right)
    assert is_error(foreign, 403, "may not use this server")
    assert view.view.num_wrong == 0
    assert send(view, "POST", "/wrong", **right)[0] == 200 and view.view.num_wrong == 1


def test_other_sites_cannot_show_pictures_or_the_page(server):
    path = "/sim/camera/front_camera" if isinstance(server, SimServer) else "/frame/front"
    assert is_error(send(server, "GET", path, Sec_Fetch_Site="cross-site"), 403, "may not use this server")
    headers = send(server, "GET", path)[1]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Frame-Options"] == "DENY" and headers["X-Content-Type-Options"] == "nosniff"


def test_a_server_for_other_machines_still_knows_its_names(caplog):
    with SimServer(RobotSimConfig(host="0.0.0.0", port=0, image_size=(16, 16))) as server:
        assert "whoever reaches http://0.0.0.0" in caplog.text
        for host in ("127.0.0.1", "192.0.2.7:5000", socket.gethostname()):
            assert send(server, "POST", "/getstate", Host=host)[0] == 200
        assert is_error(send(server, "POST", "/getstate", Host="evil.example"), 403, "not this server")


def test_programs_as_serls_own_clients_need_no_token(sim):
    connection = http.client.HTTPConnection(*sim.server_address, timeout=ANSWER_SECONDS)
    for route, content in (("/getstate", None), ("/pose", {"arr": POSE}), ("/jointreset", None)):
        body = None if content is None else json.dumps(content)
        headers = {"User-Agent": "python-requests/2.32", "Accept": "*/*", "Connection": "keep-alive"}
        connection.request("POST", route, body, {**headers, "Content-Type": "application/json"})
        assert (answer := connection.getresponse()).status == 200 and answer.read()
    assert sim.world.record.commands == 1
    connection.close()
