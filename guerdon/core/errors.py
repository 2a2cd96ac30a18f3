"""Errors that a user can act on; the command prints them in a line or two, without a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GuerdonError(Exception):
    """Something is wrong that the user can put right; the message says what and where."""


class ConfigError(GuerdonError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class DataError(GuerdonError):
    """A file or an array does not hold what it should; the message names it."""


class UnsafeDataError(DataError):
    """A file asks for code to be run when it is read; it was refused."""


class StorageError(GuerdonError):
    """Writing failed (full disk, missing permission); what was finished before is safe."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C, after everything that going on needs was saved."""

    def __init__(self, step: int, checkpoint: str, setting: str) -> None:
        """Stopped after `step`; with the setting of that name, a run goes on from `checkpoint`."""
        super().__init__(step, checkpoint, setting)
        self.step, self.checkpoint, self.setting = step, checkpoint, setting

    def __str__(self) -> str:
        kept = f"{self.setting}={self.checkpoint} goes on from there"
        return f"interrupted at step {self.step}, which is saved; {kept}"


class WorkerError(GuerdonError):
    """A worker process failed, died or was never met; the message names it, a cause has its traceback."""


class WorkerLostError(GuerdonError):
    """A worker's process has gone or does not answer."""

    def __init__(self, role: str, rank: int, reason: str) -> None:
        super().__init__(role, rank, reason)
        self.role, self.rank, self.reason = role, rank, reason

    def __str__(self) -> str:
        return f"{self.role} worker {self.rank} is lost: {self.reason}"


class ClusterError(GuerdonError):
    """The machines that are there cannot do what the settings ask for."""


class RobotError(GuerdonError):
    """The robot, its controller or a camera does not do what it should; the message says which and how."""


class RobotUnreachableError(RobotError):
    """Nothing answers at the robot's address, or something that is no robot server."""


class StaleFrameError(RobotError):
    """A camera has no fresh picture."""


class EmergencyStopError(RobotError):
    """The arm was stopped, by the operator or because going on was not safe."""


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """One line that says `name` is not among `known` and gives the nearest one that is."""
    names = list(known)
    near = get_close_matches(str(name), names, n=1, cutoff=0.4)
    if near:
        return f"unknown {what} {name!r}; did you mean {near[0]!r}?"
    return f"unknown {what} {name!r}; known: {', '.join(sorted(names)[:30])}"
