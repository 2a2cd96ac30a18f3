"""The simulated robot as its server sees it: time that passes, a record of commands, and faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from guerdon.config.build import build
from guerdon.config.schema_robot import FaultsConfig, RobotSimConfig, outside_box
from guerdon.core.errors import DataError
from guerdon.core.types import UInt8Array
from guerdon.envs.robot.poses import Vector, pose6, pose_fault
from guerdon.envs.robot.sim.physics import TIME_STEP, PegArm
from guerdon.envs.robot.sim.render import CAMERAS, draw

T = TypeVar("T")

_SETTLED = 200
"""Time steps without a command after which the arm has come to rest, however long nobody asked."""
_KEPT = 100
"""Violations that are kept in full."""
_REACH = 2.0
"""Metres along each axis; far beyond what the real arm has."""


def _numbers(what: str, values: Sequence[float], count: int) -> Vector:
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
    """What has happened since the last reset of the record."""

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

    def _arm_now(self) -> PegArm:
        """The arm as it is by now; only with the lock held."""
        steps = int((self.now() - self._time) / TIME_STEP)
        self._arm.advance(min(steps, _SETTLED))
        self._time += steps * TIME_STEP
        return self._arm

    def do(self, act: Callable[[PegArm], T]) -> T:
        """Measure or change the arm as it is by now."""
        with self._lock:
            return act(self._arm_now())

    def state(self) -> dict[str, Any]:
        """Everything that is measured."""
        return self.do(PegArm.state)

    def command(self, pose: Sequence[float]) -> None:
        """A pose command [7]; kept in the record if it is outside the box."""
        values = _numbers("a pose", pose, 7)
        if (fault := pose_fault(values)) is not None:
            raise DataError(f"that is no pose, {fault}: {values.tolist()}")
        if np.abs(values[:3]).max() > _REACH:
            raise DataError(f"the arm reaches {_REACH:g} m, and not to {values[:3].tolist()}")
        with self._lock:
            arm = self._arm_now()
            self.record.commands += 1
            if self._box is not None and (wrong := outside_box(pose6(values).tolist(), *self._box)):
                self.record.outside += 1
                if len(self.record.violations) < _KEPT:
                    self.record.violations.append({"pose": values.tolist(), "wrong": wrong})
            if self._happens("controller_error", self.faults.controller_error_rate):
                arm.fail()
            arm.command(values.tolist())

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Settings of the controller."""
        for name in ("translational_stiffness", "rotational_stiffness"):
            if name in parameters and not 1.0 <= _numbers(name, [parameters[name]], 1)[0] <= 1e5:
                raise DataError(f"{name} must be between 1 and 1e5, not {parameters[name]!r}")
        self.do(lambda arm: arm.set_stiffness(dict(parameters)))

    def shot(self, camera: str) -> Shot:
        """The newest picture of a camera."""
        _check_camera(camera)
        with self._lock:
            arm, now = self._arm_now(), self.now()
            last = self._shots.get(camera)
            if last is not None and now < last.frozen_until:
                return last
            shot = Shot(image=draw(arm, camera, self.config.image_size), taken_at=now)
            if self._happens("freeze", self.faults.freeze_rate):
                shot.frozen_until = now + self.faults.freeze_seconds
            self._shots[camera] = shot
            return shot

    def open_camera(self, camera: str) -> None:
        """Open a camera again, which ends a freeze."""
        _check_camera(camera)
        with self._lock:
            self._shots.pop(camera, None)

    def truth(self) -> dict[str, Any]:
        """What no sensor tells."""
        return self.do(lambda arm: {**arm.truth(), "time": self._time})

    def reset_scene(self, seed: int) -> None:
        """Everything as at the beginning, except the record."""
        if seed < 0:
            raise DataError(f"a seed must not be negative, and this is {seed}")
        with self._lock:
            self._arm_now().reset(seed)
            self._chance = np.random.default_rng([seed, 1])
            self._shots.clear()

    def fail_controller(self) -> None:
        """A controller error now."""
        with self._lock:
            self._arm_now().fail()
            self.record.faults["controller_error"] += 1

    def freeze_camera(self, camera: str, seconds: float) -> None:
        """From now on the camera repeats its picture, for so long or until it is opened again."""
        shot = self.shot(camera)
        with self._lock:
            shot.frozen_until = self.now() + seconds
            self.record.faults["freeze"] += 1

    def set_box(self, low: Sequence[float], high: Sequence[float]) -> None:
        """The safety box that commands are checked against from now on, [6] each."""
        corners = [_numbers("a corner of the box", corner, 6).tolist() for corner in (low, high)]
        with self._lock:
            self._box = corners[0], corners[1]

    def set_faults(self, settings: Mapping[str, Any]) -> None:
        """Other faults from now on."""
        faults = build(FaultsConfig, settings, "faults")
        with self._lock:
            self.faults = faults

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
