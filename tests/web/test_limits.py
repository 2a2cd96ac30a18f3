"""Hostile, slow and broken requests get an answer and take nothing from others."""

import json
import logging
import socket
import threading
import time

import numpy as np
import pytest

from guerdon.cli.teleop_page import Shown
from guerdon.web import TOKEN_HEADER, Answer, WebServer
from tests.web.conftest import ANSWER_SECONDS, answers, connect, is_error, pose_body, read_answer, send

# How much


def test_a_huge_body_is_refused_before_it_is_read(server):
    size = 1_500_000_000
    with connect(server) as connection:
        head = f"POST /pose HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{TOKEN_HEADER}: "
        connection.sendall(
            f"{head}{server.token}\r\nContent-Length: {size}\r\n\r\n".encode() + b"[" * 200_000
        )
        assert is_error(read_answer(connection), 413, f"this one has {size}")
    assert answers(server)


def test_a_body_is_not_asked_for_if_it_would_be_refused(sim):
    with connect(sim) as connection:
        head = "POST /pose HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\nContent-Length: "
        connection.sendall(f"{head}99999999\r\n\r\n".encode())
        assert is_error(read_answer(connection), 413, "must not exceed")
    with connect(sim) as connection:
        body = pose_body()
        connection.sendall(f"{head}{len(body)}\r\nContent-Type: application/json\r\n\r\n".encode())
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_answer(connection)[2] == b"Moved"


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "", "²", "9" * 400, "5\r\nContent-Length: 6"])
def test_lengths_that_are_none(server, length):
    answer = send(server, "GET", "/", Content_Length=length)
    assert is_error(answer, 400, "Content-Length must be one whole number")
    assert answers(server)


def test_chunks_are_refused(server):
    answer = send(
        server, "GET", "/", b"5\r\nhello\r\n0\r\n\r\n", Transfer_Encoding="chunked", Content_Length=None
    )
    assert is_error(answer, 411, "Content-Length")


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n", 414, "request line"),
        (b"GET / HTTP/1.1\r\n" + b"X-Y: " + b"a" * 200_000 + b"\r\n", 431, ""),
        (b"GET / HTTP/1.1\r\n" + b"X-Y: 1\r\n" * 20_000, 431, ""),
        (b"\r\n\r\n", 400, "empty"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, ""),
        (b"GET / HTTP/9.9\r\n\r\n", 505, ""),
        (b"BREW / HTTP/1.1\r\n\r\n", 405, "only GET and POST"),
    ],
    ids=["long line", "long header", "many headers", "nothing", "TLS", "version", "method"],
)
def test_heads_that_make_no_sense(server, text, status, words):
    with connect(server) as connection:
        connection.sendall(text)
        assert is_error(read_answer(connection), status, words)
    assert answers(server)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"arr": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b'{"arr": [1e999, 0, 0, 0, 0, 0, 1]}', "too large a number"),
        (b'{"arr": [NaN, 0, 0, 0, 0, 0, 1]}', "NaN is no number"),
        (b'{"arr": [-Infinity, 0, 0, 0, 0, 0, 1]}', "-Infinity is no number"),
        (b'{"arr": [' + b"9" * 5000 + b", 0, 0, 0, 0, 0, 1]}", "too large a number"),
        (b'{"arr": [0.5, 0, 0.1, 0, 0, 0, 0]}', "no unit quaternion"),
        (b'{"arr": [0.5, 0, 0.1, 0, 0, 0, 1e-200]}', "no unit quaternion"),
        (b'{"arr": [0.5, 0, 0.1, 0, 0, 0, 1e300]}', "no unit quaternion"),
        (b'{"arr": [1e300, 0, 0.1, 0, 0, 0, 1]}', "the arm reaches 2 m"),
        (b'{"arr": ["nan", 0, 0.1, 0, 0, 0, 1]}', "7 numbers"),
        (b'{"arr": {"a": 1}}', "7 numbers"),
        (b'{"arr": null}', "7 numbers"),
        (b"{}", "no 'arr'"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"\xff\xfe{\x00", "no JSON"),
        (b'{"arr": [1,', "no JSON"),
    ],
)
def test_poses_that_are_none_are_refused_with_words(sim, body, words):
    assert is_error(send(sim, "POST", "/pose", body, Content_Type="application/json"), 400, words)
    assert sim.world.record.commands == 0
    assert answers(sim)


@pytest.mark.parametrize(
    ("route", "content"),
    [
        ("/move_gripper", {"gripper_pos": "nan"}),
        ("/move_gripper", {}),
        ("/update_param", {"translational_stiffness": 0}),
        ("/update_param", {"rotational_stiffness": "inf"}),
        ("/sim/reset", {"seed": -1}),
        ("/sim/box", {"low": [1], "high": [2]}),
        ("/sim/faults", {"drop_rate": "nan"}),
        ("/sim/camera/front_camera/freeze", {"seconds": [3]}),
    ],
)
def test_other_nonsense_is_refused_with_words(sim, route, content):
    body = json.dumps(content).encode()
    assert is_error(send(sim, "POST", route, body, Content_Type="application/json"), 400, "Error: ")
    state = json.loads(send(sim, "POST", "/getstate")[2])
    assert np.isfinite(np.concatenate([np.ravel(value) for value in state.values()])).all()


def test_no_page_is_told_nan(view):
    frames = {"front": np.zeros((8, 8, 3), np.uint8)}
    for prob in (float("nan"), float("inf"), 0.25):
        view.view.show(Shown(step=2, frames=frames, scored={}, prob_success=prob))

    def no_constant(text):
        raise AssertionError(f"{text} is no JSON")

    state = json.loads(send(view, "GET", "/state.json")[2], parse_constant=no_constant)
    assert state["curve"] == [0.7, None, None, 0.25]


# How long


def test_a_request_that_trickles_in_is_given_up(server):
    server.request_seconds = 0.4
    began = time.monotonic()
    with connect(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        stop = threading.Event()

        def trickle():
            while not stop.wait(0.05):  # a time-out that starts anew with every byte never strikes
                try:
                    connection.sendall(b"X")
                except OSError:
                    return

        slow = threading.Thread(target=trickle)
        slow.start()
        try:
            assert is_error(read_answer(connection), 408, "0.4 s")
        finally:
            stop.set()
            slow.join()
    assert time.monotonic() - began >= 0.4


def test_a_body_that_does_not_come_is_given_up(sim):
    sim.request_seconds = 0.2
    answer = send(sim, "POST", "/pose", Content_Length="100", Content_Type="application/json")
    assert is_error(answer, 408, "0.2 s")


def test_silent_connections_are_closed(server):
    server.request_seconds = 0.1
    with connect(server) as silent:
        assert silent.recv(1) == b""
    server.request_seconds, server.idle_seconds = 10.0, 0.1
    with connect(server) as kept:
        kept.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert read_answer(kept)[0] in (200, 404)
        assert kept.recv(1) == b""


def num_threads():
    return len([thread for thread in threading.enumerate() if "process_request_thread" in thread.name])


def test_half_open_connections_do_not_pile_up_and_keep_nobody_out(server):
    held = []
    try:
        before = num_threads()
        for _ in range(4 * server.max_connections):
            connection = connect(server)
            connection.sendall(b"POST /pose HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            held.append(connection)
        for _ in range(5):
            assert answers(server)
        until = time.monotonic() + ANSWER_SECONDS
        while num_threads() - before > server.max_connections:  # those of the closed ones are ending
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(server._open) <= server.max_connections
    finally:
        for connection in held:
            connection.close()


def test_when_all_are_busy_more_are_refused():
    going, release = threading.Semaphore(0), threading.Event()

    class Busy(WebServer):
        max_connections = 2

        def respond(self, request):
            going.release()
            assert release.wait(ANSWER_SECONDS)
            return Answer.of_text("done")

    with Busy("127.0.0.1", 0, name="busy", pages=False) as server:
        held = [connect(server) for _ in range(2)]
        for connection in held:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert going.acquire(timeout=ANSWER_SECONDS)
        with connect(server) as third:
            assert is_error(read_answer(third), 503, "try again")
        release.set()
        for connection in held:
            assert read_answer(connection)[2] == b"done"
            connection.close()


# Clients that go away, and bugs of ours


def test_clients_that_hang_up_leave_no_traceback(server, caplog, capfd):
    with caplog.at_level(logging.INFO):
        for text in (
            b"",
            b"GET / HT",
            b"POST /wrong HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le",
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            for _ in range(3):
                connection = connect(server)
                connection.sendall(text)
                # an RST, as of a program that is killed, while the answer is written
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()
        assert answers(server)
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())
    assert not [record for record in caplog.records if record.exc_info]


def test_a_bug_is_answered_too(caplog):
    class Broken(WebServer):
        def respond(self, request):
            return Answer.of_json({"value": float("nan")}) if request.path == "/nan" else 1 / 0

    with Broken("127.0.0.1", 0, name="broken", pages=False) as server:
        assert is_error(send(server, "GET", "/"), 500, "ZeroDivisionError")
        assert is_error(send(server, "GET", "/nan"), 500, "not JSON compliant")
    assert "broken: GET / failed" in caplog.text
