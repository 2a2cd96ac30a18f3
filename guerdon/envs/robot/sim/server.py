"""The simulated robot's HTTP server: the routes of SERL's robot server, and its own ones under `/sim/`.

| route | does |
|---|---|
| GET `/sim/info` | that it is simulated; cameras, time scale, target pose |
| GET `/sim/camera/NAME` | the newest picture, raw RGB, or as PNG with `?format=png` |
| POST `/sim/camera/NAME/open` | open the camera anew, which ends a freeze |
| GET `/sim/truth` | whether and how deep the peg is in the hole |
| POST `/sim/reset` `{"seed": 0}` | the scene as at the beginning |
| POST `/sim/box` `{"low": [6], "high": [6]}` | the safety box that commands are checked against |
| GET `/sim/record` | commands, how many were outside the box, faults so far |
| POST `/sim/faults` `{"drop_rate": 0.05}` | other faults from now on |
| POST `/sim/fail` and `/sim/camera/NAME/freeze` `{"seconds": 3}` | one fault now |
"""

from __future__ import annotations

import io
import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from PIL import Image

from guerdon.config.schema_robot import RobotSimConfig
from guerdon.envs.robot.sim.render import CAMERAS
from guerdon.envs.robot.sim.world import SimWorld
from guerdon.errors import ConfigError, GuerdonError

log = logging.getLogger("guerdon")

GRIPPER_STEPS = 255


class SimServer(ThreadingHTTPServer):
    """Serves one `SimWorld`; `with` starts it in a thread and ends it."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, config: RobotSimConfig) -> None:
        self.world = SimWorld(config)
        self._open: set[socket.socket] = set()
        self._thread: Thread | None = None
        try:
            super().__init__((config.host, config.port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error

    @property
    def url(self) -> str:
        """Where it can be reached."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def start(self) -> SimServer:
        """Serve from a thread."""
        self._thread = Thread(target=self.serve_forever, args=(0.05,), daemon=True, name="robot-sim")
        self._thread.start()
        return self

    def __enter__(self) -> SimServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread and close all connections."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
            self._thread = None
        self.server_close()
        for connection in list(self._open):  # kept-alive ones would go on answering
            _hang_up(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember the connection so that `stop` can end it."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not worth a traceback."""
        log.debug("robot-sim: a connection from %s broke off", client_address, exc_info=True)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("robot-sim: a connection was closed already: %s", error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body leave together: the client's answer must not wait for a second packet
    server: SimServer

    def do_GET(self) -> None:
        """Questions about the simulation."""
        self._serve(_GET)

    def do_POST(self) -> None:
        """The routes of a real server, and changes of the simulation."""
        self._serve(_POST)

    def _serve(self, routes: dict[str, Callable[[_Handler, Any], Any]]) -> None:
        world = self.server.world
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        path, _, self.query = self.path.partition("?")
        parts = path.strip("/").split("/")
        self.camera = parts[2] if parts[:2] == ["sim", "camera"] and len(parts) > 2 else ""
        route = path if not self.camera else "/".join(["/sim/camera/NAME", *parts[3:]])
        handler = routes.get(route)
        if handler is None:
            self._answer(404, b"no such route", "text/plain")
            return
        lost = False
        if not route.startswith("/sim/"):
            if world.happens("latency", world.faults.latency_rate):
                time.sleep(world.faults.latency_seconds / world.config.time_scale)
            lost = world.happens("drop", world.faults.drop_rate)
            if lost and world.coin():
                self._drop()
                return
        try:
            answer = handler(self, json.loads(body) if body else {})
        except (GuerdonError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._answer(400, f"{type(error).__name__}: {error}".encode(), "text/plain")
            return
        if lost:
            self._drop()
        elif isinstance(answer, str):
            self._answer(200, answer.encode(), "text/html; charset=utf-8")
        elif answer is not None:
            self._answer(200, json.dumps(answer).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _drop(self) -> None:
        self.close_connection = True
        _hang_up(self.connection)

    def send_picture(self, _: Any) -> None:
        """The newest picture of a camera."""
        shot = self.server.world.shot(self.camera)
        headers = {"X-Shape": ",".join(map(str, shot.image.shape)), "X-Time": f"{shot.taken_at:.6f}"}
        if "format=png" in self.query:
            file = io.BytesIO()
            Image.fromarray(shot.image).save(file, "png")
            self._answer(200, file.getvalue(), "image/png", headers)
        else:
            self._answer(200, shot.image.tobytes(), "application/octet-stream", headers)

    def open_camera(self, _: Any) -> str:
        """End a freeze."""
        self.server.world.open_camera(self.camera)
        return "Opened"

    def freeze_camera(self, content: Any) -> str:
        """Begin one."""
        self.server.world.freeze_camera(self.camera, float(content.get("seconds", 3.0)))
        return "Frozen"

    def log_message(self, format: str, *args: Any) -> None:
        """Only for those who ask for details."""
        log.debug("robot-sim: " + format, *args)


def _state(*names: str) -> Callable[[_Handler, Any], Any]:
    """A route that answers some parts of the state."""
    return lambda handler, _: {name: handler.server.world.state()[name] for name in names}


def _do(word: str, act: Callable[[SimWorld, Any], object]) -> Callable[[_Handler, Any], Any]:
    """A route that does something and answers a word."""

    def handle(handler: _Handler, content: Any) -> str:
        act(handler.server.world, content)
        return word

    return handle


def _info(handler: _Handler, _: Any) -> dict[str, Any]:
    config = handler.server.world.config
    return {
        "simulated": True,
        "cameras": list(CAMERAS),
        "image_size": list(config.image_size),
        "time_scale": config.time_scale,
        "target_ee_pose": list(config.target_ee_pose),
    }


_GET: dict[str, Callable[[_Handler, Any], Any]] = {
    "/sim/info": _info,
    "/sim/truth": lambda handler, _: handler.server.world.truth(),
    "/sim/record": lambda handler, _: asdict(handler.server.world.record),
    "/sim/camera/NAME": _Handler.send_picture,
}
_POST: dict[str, Callable[[_Handler, Any], Any]] = {
    "/getstate": lambda handler, _: handler.server.world.state(),
    "/getpos": _state("pose"),
    "/getvel": _state("vel"),
    "/getforce": _state("force"),
    "/gettorque": _state("torque"),
    "/getq": _state("q"),
    "/getdq": _state("dq"),
    "/getjacobian": _state("jacobian"),
    "/get_gripper": lambda handler, _: {"gripper": handler.server.world.state()["gripper_pos"]},
    "/pose": _do("Moved", lambda world, content: world.command(content["arr"])),
    "/jointreset": _do("Reset Joint", lambda world, _: world.joint_reset()),
    "/clearerr": _do("Clear", lambda world, _: world.clear_errors()),
    "/startimp": _do("Started impedance", lambda world, _: world.set_running(True)),
    "/stopimp": _do("Stopped impedance", lambda world, _: world.set_running(False)),
    "/open_gripper": _do("Opened", lambda world, _: world.set_gripper(1.0)),
    "/close_gripper": _do("Closed", lambda world, _: world.set_gripper(0.0)),
    "/activate_gripper": _do("Activated", lambda world, _: None),
    "/reset_gripper": _do("Reset", lambda world, _: None),
    "/move_gripper": _do(
        "Moved Gripper",
        lambda world, content: world.set_gripper(float(content["gripper_pos"]) / GRIPPER_STEPS),
    ),
    "/update_param": _do(
        "Updated compliance parameters", lambda world, content: world.set_parameters(content)
    ),
    "/sim/reset": _do("Reset", lambda world, content: world.reset_scene(int(content.get("seed", 0)))),
    "/sim/box": _do("Noted", lambda world, content: world.set_box(content["low"], content["high"])),
    "/sim/faults": _do("Noted", lambda world, content: world.set_faults(content)),
    "/sim/fail": _do("Failed", lambda world, _: world.fail_controller()),
    "/sim/camera/NAME/open": _Handler.open_camera,
    "/sim/camera/NAME/freeze": _Handler.freeze_camera,
}
