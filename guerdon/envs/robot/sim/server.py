"""The simulated robot: an arm whose time passes, a record of commands, faults, and its HTTP server.

The routes are those of SERL's robot server, and its own ones under `/sim/`. Programs on this machine use it
as they use SERL's server, without a token; web pages may not (`guerdon.web`).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from guerdon.config.build import build
from guerdon.config.schema_robot import FaultsConfig, RobotSimConfig, outside_box
from guerdon.core.errors import DataError
from guerdon.core.types import UInt8Array
from guerdon.envs.robot.poses import Vector, pose6, pose_fault
from guerdon.envs.robot.serl_http import GRIPPER_STEPS
from guerdon.envs.robot.sim.physics import TIME_STEP, PegArm
from guerdon.envs.robot.sim.render import CAMERAS, draw
from guerdon.web import Answer, HttpError, Request, WebServer, is_loopback

log = logging.getLogger("guerdon")

T = TypeVar("T")

_SETTLED = 200
"""Time steps without a command after which the arm has come to rest, however long nobody asked."""
_KEPT = 100
"""Violations that are kept in full."""
_REACH = 2.0
"""Metres along each axis; far beyond what the real arm has."""


def _numbers(what: str, values: Any, count: int) -> Vector:
    """float64 [count]; DataError unless `values` is a list of so many finite numbers."""
    plain = isinstance(values, list | tuple | np.ndarray) and len(values) == count
    if not plain or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise DataError(f"{what} must be {count} numbers, not {str(values)[:200]}")
    array = np.asarray(values, np.float64)
    if not np.isfinite(array).all():
        raise DataError(f"{what} must be {count} finite numbers, not {array.tolist()}")
    return array


def _check_camera(camera: str) -> None:
    if camera not in CAMERAS:
        raise DataError(f"there is no camera {camera!r}; there are {', '.join(CAMERAS)}")


@dataclass(kw_only=True)
class Shot:
    """What a camera shows."""

    image: UInt8Array
    taken_at: float
    """The robot's time."""
    frozen_until: float = 0.0


@dataclass(kw_only=True)
class Record:
    """What has happened since the beginning."""

    commands: int = 0
    outside: int = 0
    """Commands outside the safety box, if one was set."""
    violations: list[dict[str, Any]] = field(default_factory=list)
    """The first of them: the pose and what is wrong with it."""
    faults: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("drop", "latency", "controller_error", "freeze"), 0)
    )


class SimWorld:
    """One simulated robot; every method may be called from any thread."""

    def __init__(self, config: RobotSimConfig) -> None:
        self.config = config
        self.faults = config.faults
        self.record = Record()
        self._box: tuple[list[float], list[float]] | None = None
        self._lock = Lock()
        self._chance = np.random.default_rng([config.seed, 1])
        self._arm = PegArm(config.target_ee_pose, config.seed)
        self._shots: dict[str, Shot] = {}
        self._started = time.monotonic()
        self._time = 0.0

    def now(self) -> float:
        """The robot's time."""
        return (time.monotonic() - self._started) * self.config.time_scale

    @contextmanager
    def _arm_now(self) -> Iterator[PegArm]:
        """The arm as it is by now; everything of the world is locked meanwhile."""
        with self._lock:
            steps = int((self.now() - self._time) / TIME_STEP)
            self._arm.advance(min(steps, _SETTLED))
            self._time += steps * TIME_STEP
            yield self._arm

    def do(self, act: Callable[[PegArm], T]) -> T:
        """Measure or change the arm as it is by now."""
        with self._arm_now() as arm:
            return act(arm)

    def state(self) -> dict[str, Any]:
        """Everything that is measured."""
        return self.do(PegArm.state)

    def truth(self) -> dict[str, Any]:
        """What no sensor tells."""
        return self.do(lambda arm: {**arm.truth(), "time": self._time})

    def command(self, pose: Sequence[float]) -> None:
        """A pose command [7]; kept in the record if it is outside the box."""
        values = _numbers("a pose", pose, 7)
        if (fault := pose_fault(values)) is not None:
            raise DataError(f"that is no pose, {fault}: {values.tolist()}")
        if np.abs(values[:3]).max() > _REACH:
            raise DataError(f"the arm reaches {_REACH:g} m, and not to {values[:3].tolist()}")
        with self._arm_now() as arm:
            self.record.commands += 1
            if self._box is not None and (wrong := outside_box(pose6(values).tolist(), *self._box)):
                self.record.outside += 1
                if len(self.record.violations) < _KEPT:
                    self.record.violations.append({"pose": values.tolist(), "wrong": wrong})
            if self._happens("controller_error", self.faults.controller_error_rate):
                arm.fail()
            arm.command(values.tolist())

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """The stiffness of SERL's controller, where it is among the parameters."""
        for name in ("translational_stiffness", "rotational_stiffness"):
            if name in parameters and not 1.0 <= _numbers(name, [parameters[name]], 1)[0] <= 1e5:
                raise DataError(f"{name} must be between 1 and 1e5, not {parameters[name]!r}")
        with self._arm_now() as arm:
            arm.stiffness = float(parameters.get("translational_stiffness", arm.stiffness))
            arm.turn_stiffness = float(parameters.get("rotational_stiffness", arm.turn_stiffness))

    def shot(self, camera: str, freeze_seconds: float | None = None) -> Shot:
        """The newest picture of a camera, which repeats it from now on if it is to freeze."""
        _check_camera(camera)
        with self._arm_now() as arm:
            now, shot = self.now(), self._shots.get(camera)
            if shot is None or now >= shot.frozen_until:
                shot = self._shots[camera] = Shot(
                    image=draw(arm, camera, self.config.image_size), taken_at=now
                )
                if self._happens("freeze", self.faults.freeze_rate):
                    shot.frozen_until = now + self.faults.freeze_seconds
            if freeze_seconds is not None:
                shot.frozen_until = now + freeze_seconds
                self.record.faults["freeze"] += 1
            return shot

    def freeze_camera(self, camera: str, seconds: float) -> None:
        """From now on the camera repeats its picture, for so long or until it is opened again."""
        self.shot(camera, freeze_seconds=seconds)

    def open_camera(self, camera: str) -> None:
        """Open a camera again, which ends a freeze."""
        _check_camera(camera)
        with self._lock:
            self._shots.pop(camera, None)

    def reset_scene(self, seed: int) -> None:
        """Everything as at the beginning, except the record."""
        if seed < 0:
            raise DataError(f"a seed must not be negative, and this is {seed}")
        with self._arm_now() as arm:
            arm.reset(seed)
            self._chance = np.random.default_rng([seed, 1])
            self._shots.clear()

    def fail_controller(self) -> None:
        """A controller error now."""
        with self._arm_now() as arm:
            arm.fail()
            self.record.faults["controller_error"] += 1

    def set_box(self, low: Sequence[float], high: Sequence[float]) -> None:
        """The safety box that commands are checked against from now on, [6] each."""
        corners = [_numbers("a corner of the box", corner, 6).tolist() for corner in (low, high)]
        self._box = corners[0], corners[1]

    def set_faults(self, settings: Mapping[str, Any]) -> None:
        """Other faults from now on."""
        self.faults = build(FaultsConfig, settings, "faults")

    def happens(self, fault: str, rate: float) -> bool:
        """Whether a fault of that rate strikes now; counted if so."""
        with self._lock:
            return self._happens(fault, rate)

    def coin(self) -> bool:
        """Heads or tails."""
        with self._lock:
            return bool(self._chance.random() < 0.5)

    def _happens(self, fault: str, rate: float) -> bool:
        if rate <= 0.0 or self._chance.random() >= rate:
            return False
        self.record.faults[fault] += 1
        return True


def _value(content: Mapping[str, Any], name: str) -> Any:
    """An entry of the content that must be there."""
    if name not in content:
        raise DataError(f"the content has no {name!r}")
    return content[name]


def _number(content: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number; `default` if it is left out."""
    value = _value(content, name) if default is None else content.get(name, default)
    return float(_numbers(name, [value], 1)[0])


_PARTS = {
    "getpos": "pose", "getvel": "vel", "getforce": "force", "gettorque": "torque", "getq": "q", "getdq": "dq",
    "getjacobian": "jacobian",
}  # fmt: skip
"""Route -> the part of the state that it answers."""
_COMMANDS: dict[str, tuple[str, Callable[[PegArm], None]]] = {
    "jointreset": ("Reset Joint", PegArm.rest),
    "clearerr": ("Clear", PegArm.clear),
    "startimp": ("Started impedance", PegArm.start),
    "stopimp": ("Stopped impedance", PegArm.stop),
    "open_gripper": ("Opened", lambda arm: arm.set_gripper(1.0)),
    "close_gripper": ("Closed", lambda arm: arm.set_gripper(0.0)),
    "activate_gripper": ("Activated", lambda arm: None),
    "reset_gripper": ("Reset", lambda arm: None),
}
"""Route -> its answer, and what it does to the arm."""


class SimServer(WebServer):
    """Serves one `SimWorld`; `with` starts it in a thread and ends it."""

    def __init__(self, config: RobotSimConfig) -> None:
        self.world = SimWorld(config)
        super().__init__(config.host, config.port, name="robot-sim", pages=False)
        if not is_loopback(config.host):
            log.warning("robot-sim: whoever reaches %s can move the simulated arm", self.url)

    def respond(self, request: Request) -> Answer | None:
        """The routes of a real server, questions about the simulation, and changes of it."""
        world, lost = self.world, False
        if not request.path.startswith("/sim/"):
            if world.happens("latency", world.faults.latency_rate):
                time.sleep(world.faults.latency_seconds / world.config.time_scale)
            lost = world.happens("drop", world.faults.drop_rate)
            if lost and world.coin():
                return None
        answer = self._answer(request)
        if lost:
            return None
        if isinstance(answer, Answer):
            return answer
        return Answer.of_text(answer, "text/html") if isinstance(answer, str) else Answer.of_json(answer)

    def _answer(self, request: Request) -> Any:
        """A word, something for JSON, or an `Answer`."""
        world, content = self.world, request.content
        match [request.method, *request.path.strip("/").split("/")]:
            case ["GET", "sim", "info"]:
                names = ("image_size", "time_scale", "target_ee_pose")
                known = {name: getattr(world.config, name) for name in names}
                return {"simulated": True, "cameras": CAMERAS, **known}
            case ["GET", "sim", "truth"]:
                return world.truth()
            case ["GET", "sim", "record"]:
                return asdict(world.record)
            case ["GET", "sim", "camera", camera]:
                return _picture(world.shot(camera), png="format=png" in request.query)
            case ["POST", "getstate"]:
                return world.state()
            case ["POST", "get_gripper"]:
                return {"gripper": world.state()["gripper_pos"]}
            case ["POST", route] if route in _PARTS:
                return {_PARTS[route]: world.state()[_PARTS[route]]}
            case ["POST", route] if route in _COMMANDS:
                word, act = _COMMANDS[route]
                world.do(act)
                return word
            case ["POST", "pose"]:
                world.command(_value(content, "arr"))
                return "Moved"
            case ["POST", "move_gripper"]:
                opening = _number(content, "gripper_pos") / GRIPPER_STEPS
                world.do(lambda arm: arm.set_gripper(opening))
                return "Moved Gripper"
            case ["POST", "update_param"]:
                world.set_parameters(content)
                return "Updated compliance parameters"
            case ["POST", "sim", "reset"]:
                world.reset_scene(int(_number(content, "seed", 0)))
                return "Reset"
            case ["POST", "sim", "box"]:
                world.set_box(_value(content, "low"), _value(content, "high"))
                return "Noted"
            case ["POST", "sim", "faults"]:
                world.set_faults(content)
                return "Noted"
            case ["POST", "sim", "fail"]:
                world.fail_controller()
                return "Failed"
            case ["POST", "sim", "camera", camera, "open"]:
                world.open_camera(camera)
                return "Opened"
            case ["POST", "sim", "camera", camera, "freeze"]:
                world.freeze_camera(camera, _number(content, "seconds", 3.0))
                return "Frozen"
        raise HttpError(404, f"no such route: {request.method} {request.path[:80]}")


def _picture(shot: Shot, *, png: bool) -> Answer:
    headers = {"X-Shape": ",".join(map(str, shot.image.shape)), "X-Time": f"{shot.taken_at:.6f}"}
    if not png:
        return Answer(body=shot.image.tobytes(), kind="application/octet-stream", headers=headers)
    file = io.BytesIO()
    Image.fromarray(shot.image).save(file, "png")
    return Answer(body=file.getvalue(), kind="image/png", headers=headers)
