"""The simulated robot's HTTP server: the routes of SERL's robot server, and its own ones under `/sim/`.

Programs on this machine use it as they use SERL's server, without a token; web pages may not
(`guerdon.web`).

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
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeAlias

from PIL import Image

from guerdon.config.schema_robot import RobotSimConfig
from guerdon.core.errors import DataError
from guerdon.envs.robot.sim.render import CAMERAS
from guerdon.envs.robot.sim.world import SimWorld
from guerdon.web import Answer, HttpError, Request, WebServer, is_loopback

log = logging.getLogger("guerdon")

GRIPPER_STEPS = 255


class SimServer(WebServer):
    """Serves one `SimWorld`; `with` starts it in a thread and ends it."""

    def __init__(self, config: RobotSimConfig) -> None:
        self.world = SimWorld(config)
        super().__init__(config.host, config.port, name="robot-sim", pages=False)
        if not is_loopback(config.host):
            log.warning("robot-sim: whoever reaches %s can move the simulated arm", self.url)

    def respond(self, request: Request) -> Answer | None:
        """The routes of a real server, questions about the simulation, and changes of it."""
        world, camera = self.world, ""
        parts = request.path.strip("/").split("/")
        route = request.path
        if parts[:2] == ["sim", "camera"] and len(parts) > 2:
            camera, route = parts[2], "/".join(["/sim/camera/NAME", *parts[3:]])
        act = _ROUTES.get((request.method, route))
        if act is None:
            raise HttpError(404, f"no such route: {request.method} {request.path[:80]}")
        lost = False
        if not route.startswith("/sim/"):
            if world.happens("latency", world.faults.latency_rate):
                time.sleep(world.faults.latency_seconds / world.config.time_scale)
            lost = world.happens("drop", world.faults.drop_rate)
            if lost and world.coin():
                return None
        answer = act(Call(world, request, camera))
        if lost:
            return None
        if isinstance(answer, Answer):
            return answer
        return Answer.of_text(answer, "text/html") if isinstance(answer, str) else Answer.of_json(answer)


class Call:
    """A request to the world, with what a route reads of it."""

    def __init__(self, world: SimWorld, request: Request, camera: str) -> None:
        self.world, self.request, self.camera = world, request, camera

    def value(self, name: str) -> Any:
        """An entry of the content that must be there."""
        if name not in self.request.content:
            raise DataError(f"the content has no {name!r}")
        return self.request.content[name]

    def number(self, name: str, default: float | None = None) -> float:
        """A number; `default` if it is left out."""
        value = self.value(name) if default is None else self.request.content.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{name} must be a number, not {value!r}")
        return float(value)


Route: TypeAlias = Callable[[Call], Any]
"""Returns a word, something for JSON, or an `Answer`."""


def _state(*names: str) -> Route:
    """A route that answers some parts of the state."""

    def ask(call: Call) -> dict[str, Any]:
        state = call.world.state()
        return {name: state[name] for name in names}

    return ask


def _do(word: str, act: Callable[[Call], object]) -> Route:
    """A route that does something and answers a word."""

    def handle(call: Call) -> str:
        act(call)
        return word

    return handle


def _info(call: Call) -> dict[str, Any]:
    config = call.world.config
    return {
        "simulated": True,
        "cameras": list(CAMERAS),
        "image_size": list(config.image_size),
        "time_scale": config.time_scale,
        "target_ee_pose": list(config.target_ee_pose),
    }


def _picture(call: Call) -> Answer:
    """The newest picture of a camera."""
    shot = call.world.shot(call.camera)
    headers = {"X-Shape": ",".join(map(str, shot.image.shape)), "X-Time": f"{shot.taken_at:.6f}"}
    if "format=png" not in call.request.query:
        return Answer(body=shot.image.tobytes(), kind="application/octet-stream", headers=headers)
    file = io.BytesIO()
    Image.fromarray(shot.image).save(file, "png")
    return Answer(body=file.getvalue(), kind="image/png", headers=headers)


_GET: dict[str, Route] = {
    "/sim/info": _info,
    "/sim/truth": lambda call: call.world.truth(),
    "/sim/record": lambda call: asdict(call.world.record),
    "/sim/camera/NAME": _picture,
}
_POST: dict[str, Route] = {
    "/getstate": lambda call: call.world.state(),
    "/getpos": _state("pose"),
    "/getvel": _state("vel"),
    "/getforce": _state("force"),
    "/gettorque": _state("torque"),
    "/getq": _state("q"),
    "/getdq": _state("dq"),
    "/getjacobian": _state("jacobian"),
    "/get_gripper": lambda call: {"gripper": call.world.state()["gripper_pos"]},
    "/pose": _do("Moved", lambda call: call.world.command(call.value("arr"))),
    "/jointreset": _do("Reset Joint", lambda call: call.world.joint_reset()),
    "/clearerr": _do("Clear", lambda call: call.world.clear_errors()),
    "/startimp": _do("Started impedance", lambda call: call.world.set_running(True)),
    "/stopimp": _do("Stopped impedance", lambda call: call.world.set_running(False)),
    "/open_gripper": _do("Opened", lambda call: call.world.set_gripper(1.0)),
    "/close_gripper": _do("Closed", lambda call: call.world.set_gripper(0.0)),
    "/activate_gripper": _do("Activated", lambda call: None),
    "/reset_gripper": _do("Reset", lambda call: None),
    "/move_gripper": _do(
        "Moved Gripper", lambda call: call.world.set_gripper(call.number("gripper_pos") / GRIPPER_STEPS)
    ),
    "/update_param": _do(
        "Updated compliance parameters", lambda call: call.world.set_parameters(call.request.content)
    ),
    "/sim/reset": _do("Reset", lambda call: call.world.reset_scene(int(call.number("seed", 0)))),
    "/sim/box": _do("Noted", lambda call: call.world.set_box(call.value("low"), call.value("high"))),
    "/sim/faults": _do("Noted", lambda call: call.world.set_faults(call.request.content)),
    "/sim/fail": _do("Failed", lambda call: call.world.fail_controller()),
    "/sim/camera/NAME/open": _do("Opened", lambda call: call.world.open_camera(call.camera)),
    "/sim/camera/NAME/freeze": _do(
        "Frozen", lambda call: call.world.freeze_camera(call.camera, call.number("seconds", 3.0))
    ),
}
_ROUTES: dict[tuple[str, str], Route] = {
    **{("GET", path): route for path, route in _GET.items()},
    **{("POST", path): route for path, route in _POST.items()},
}
