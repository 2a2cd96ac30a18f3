"""The simulated robot's HTTP server: the routes of SERL's robot server, and its own ones under `/sim/`.

Programs on this machine use it as they use SERL's server, without a token; web pages may not
(`guerdon.web`).

| route | does |
|---|---|
| GET `/sim/info` | that it is simulated; cameras, time scale, target pose |
| GET `/sim/camera/NAME` | the newest picture, raw RGB, or as PNG with `?format=png` |
| POST `/sim/camera/NAME/open` | open the camera again, which ends a freeze |
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
from guerdon.envs.robot.sim.physics import PegArm
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


def _move_gripper(call: Call) -> None:
    opening = call.number("gripper_pos") / GRIPPER_STEPS
    call.world.do(lambda arm: arm.set_gripper(opening))


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


def _command(word: str, act: Callable[[PegArm], None]) -> Route:
    """A route that changes the arm and answers a word."""
    return _do(word, lambda call: call.world.do(act))


_ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/sim/info"): _info,
    ("GET", "/sim/truth"): lambda call: call.world.truth(),
    ("GET", "/sim/record"): lambda call: asdict(call.world.record),
    ("GET", "/sim/camera/NAME"): _picture,
    ("POST", "/getstate"): lambda call: call.world.state(),
    ("POST", "/getpos"): _state("pose"),
    ("POST", "/getvel"): _state("vel"),
    ("POST", "/getforce"): _state("force"),
    ("POST", "/gettorque"): _state("torque"),
    ("POST", "/getq"): _state("q"),
    ("POST", "/getdq"): _state("dq"),
    ("POST", "/getjacobian"): _state("jacobian"),
    ("POST", "/get_gripper"): lambda call: {"gripper": call.world.state()["gripper_pos"]},
    ("POST", "/pose"): _do("Moved", lambda call: call.world.command(call.value("arr"))),
    ("POST", "/jointreset"): _command("Reset Joint", PegArm.rest),
    ("POST", "/clearerr"): _command("Clear", PegArm.clear),
    ("POST", "/startimp"): _command("Started impedance", PegArm.start),
    ("POST", "/stopimp"): _command("Stopped impedance", PegArm.stop),
    ("POST", "/open_gripper"): _command("Opened", lambda arm: arm.set_gripper(1.0)),
    ("POST", "/close_gripper"): _command("Closed", lambda arm: arm.set_gripper(0.0)),
    ("POST", "/move_gripper"): _do("Moved Gripper", _move_gripper),
    ("POST", "/activate_gripper"): _do("Activated", lambda call: None),
    ("POST", "/reset_gripper"): _do("Reset", lambda call: None),
    ("POST", "/update_param"): _do(
        "Updated compliance parameters", lambda call: call.world.set_parameters(call.request.content)
    ),
    ("POST", "/sim/reset"): _do("Reset", lambda call: call.world.reset_scene(int(call.number("seed", 0)))),
    ("POST", "/sim/box"): _do(
        "Noted", lambda call: call.world.set_box(call.value("low"), call.value("high"))
    ),
    ("POST", "/sim/faults"): _do("Noted", lambda call: call.world.set_faults(call.request.content)),
    ("POST", "/sim/fail"): _do("Failed", lambda call: call.world.fail_controller()),
    ("POST", "/sim/camera/NAME/open"): _do("Opened", lambda call: call.world.open_camera(call.camera)),
    ("POST", "/sim/camera/NAME/freeze"): _do(
        "Frozen", lambda call: call.world.freeze_camera(call.camera, call.number("seconds", 3.0))
    ),
}
