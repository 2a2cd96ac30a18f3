"""Simulator processes as their parent sees them: one set of environments; processes that die are replaced."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any

import numpy as np

from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError, WorkerError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.envs.maniskill.batch import TaskFacts
from guerdon.envs.maniskill.process import SharedArrays, allocate, serve
from guerdon.envs.maniskill.vulkan import choose_driver, driver_variables

log = logging.getLogger("guerdon")

START_SECONDS, CLOSE_SECONDS = 300.0, 10.0


@dataclass(kw_only=True)
class _Member:
    """One simulator process and the environments it has."""

    start: int
    stop: int
    process: BaseProcess
    connection: Connection


class _Lost(Exception):
    """A process has gone or does not answer."""


class SimulatorPool:
    """N environments in some processes.

    If a process is lost it is replaced, and its environments are marked in `lost` until they are reset: their
    episodes are over, and nothing else is.
    """

    def __init__(self, cfg: ManiSkillConfig, num_envs: int) -> None:
        self.cfg, self.num_envs = cfg, num_envs
        self.lost: BoolArray = np.zeros(num_envs, np.bool_)
        self.restarts = 0
        self._num_past = 0
        choose_driver()
        # A server that has the simulator imported and nothing started, from which processes are forked: they
        # are there in no time, and are no copies of this process with all that it has open.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["mani_skill.envs", "guerdon.envs.maniskill.process"])
        count = min(num_envs, cfg.num_processes or _num_cores())
        edges = [num_envs * rank // count for rank in range(count + 1)]
        self._members: list[_Member] = []
        try:
            self._members = [self._start(a, b) for a, b in itertools.pairwise(edges)]
            facts: list[TaskFacts] = [self._answer(member, START_SECONDS) for member in self._members]
            self.facts = facts[0]
            self._handle = allocate(num_envs, self.facts, cfg)
            self.shared = SharedArrays.open(self._handle, num_envs, self.facts, cfg)
            for member in self._members:
                self._share(member)
        except _Lost as error:
            self.close()
            raise WorkerError(
                f"a simulator process of {cfg.id} did not start: {error}. It imports the script that "
                "starts it: what that does must stand under `if __name__ == '__main__':`"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that are there now."""
        return [int(member.process.pid or 0) for member in self._members]

    def step(self, actions: FloatArray) -> None:
        """Take one action in each environment, float32 [N, A]; results are in `shared`."""
        self.shared.actions[:] = actions
        self._all(self._members, "step", [()] * len(self._members))

    def reset(self, env_ids: IntArray, seeds: Sequence[int], *, keep_final: bool) -> None:
        """Start new episodes in `env_ids` (int [n]), also if processes are lost meanwhile."""
        by_id = dict(zip(env_ids.tolist(), seeds, strict=True))
        todo = [member for member in self._members if any(member.start <= i < member.stop for i in by_id)]
        while todo:
            arguments = []
            for member in todo:
                rows = [row for row in by_id if member.start <= row < member.stop]
                arguments.append((rows, [by_id[row] for row in rows], keep_final))
            gone = self._all(todo, "reset", arguments)
            for member, (rows, _, _) in zip(todo, arguments, strict=True):
                if member.start not in gone:
                    self.lost[rows] = False
            todo = [member for member in self._members if member.start in gone]

    def read(self, name: str) -> FloatArray:
        """A copy of `state` [N, S], `env_reward` [N] or `goal_in_picture` [N, 2], float32.

        Lost environments keep what they had before they were lost.
        """
        array: FloatArray = getattr(self.shared, name).copy()
        return array

    def info(self, name: str) -> FloatArray:
        """One of the infos, float32 [N]."""
        return self.shared.infos[:, self.facts.info_names.index(name)].copy()

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what was before each of the last `num_steps` steps."""
        self._num_past = num_steps
        self._all(self._members, "keep_past", [(num_steps,)] * len(self._members))

    def render(
        self, env_ids: IntArray, final: BoolArray, size: tuple[int, int] | None, steps_back: IntArray
    ) -> UInt8Array:
        """Frames, made by the processes that own the scenes; lost episodes show what is now.

        Args:
            env_ids: int [n], which environments.
            final: bool [n], whether to show what was before the last reset.
            size: (H, W); None: `image_size`.
            steps_back: int [n], how many steps before the last one's outcome; 0: the outcome itself.

        Returns:
            uint8 [n, H, W, 3].
        """
        other = None if size in (None, self.cfg.image_size) else size
        frames = np.empty((len(env_ids), *(size or self.cfg.image_size), 3), np.uint8)
        todo = list(self._members)
        while todo:
            shares = [np.flatnonzero((env_ids >= each.start) & (env_ids < each.stop)) for each in todo]
            todo = [member for member, places in zip(todo, shares, strict=True) if len(places)]
            shares = [places for places in shares if len(places)]
            arguments = [
                (env_ids[places].tolist(), final[places].tolist(), other, steps_back[places].tolist())
                for places in shares
            ]
            sent: dict[int, Any] = {}
            gone = self._all(todo, "render", arguments, sent)
            for member, places in zip(todo, shares, strict=True):
                if member.start not in gone:
                    frames[places] = (
                        np.stack(sent[member.start]) if other else self.shared.frames[env_ids[places]]
                    )
            todo = [member for member in self._members if member.start in gone]
        return frames

    def close(self) -> None:
        """End all processes; may be called again."""
        for member in self._members:
            try:
                member.connection.send(("close", ()))
            except OSError as error:
                log.debug("a simulator process has gone before it was closed: %s", error)
            member.connection.close()
        for member in self._members:
            _end(member.process, CLOSE_SECONDS)
        self._members = []
        if hasattr(self, "_handle"):
            os.close(self._handle)
            del self._handle

    # Processes

    def _start(self, start: int, stop: int) -> _Member:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self.cfg, start, stop, self.num_envs, driver_variables())
        process = self._context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Member(start=start, stop=stop, process=process, connection=ours)

    def _share(self, member: _Member) -> None:
        try:
            send_handle(member.connection, self._handle, member.process.pid)
        except OSError as error:
            raise _Lost(str(error)) from error

    def _all(
        self,
        members: Sequence[_Member],
        command: str,
        arguments: Sequence[tuple[Any, ...]],
        answers: dict[int, Any] | None = None,
    ) -> set[int]:
        """Ask all at the same time; returns the first environments of those that were lost and replaced."""
        gone: dict[int, str] = {}
        for member, given in zip(members, arguments, strict=True):
            try:
                member.connection.send((command, given))
            except OSError as error:
                gone[member.start] = str(error)
        for member in members:
            if member.start in gone:
                continue
            try:
                answer = self._answer(member)
            except _Lost as error:
                gone[member.start] = str(error)
                continue
            if answers is not None:
                answers[member.start] = answer
        for member in members:
            if member.start in gone:
                self._replace(member, command, gone[member.start])
        return set(gone)

    def _answer(self, member: _Member, seconds: float | None = None) -> Any:
        seconds = self.cfg.timeout_seconds if seconds is None else seconds
        try:
            if not member.connection.poll(seconds):
                raise _Lost(f"no answer for {seconds:g} s")
            kind, content = member.connection.recv()
        except (EOFError, OSError) as error:
            member.process.join(CLOSE_SECONDS)
            raise _Lost(f"it ended with exit code {member.process.exitcode}") from error
        if kind == "config_error":
            raise ConfigError(content)
        if kind == "error":
            raise WorkerError(f"a simulator process of {self.cfg.id} failed:\n{content}")
        return content

    def _replace(self, member: _Member, command: str, reason: str) -> None:
        """Put a new process in the place of a lost one, in the list of members too."""
        place = self._members.index(member)
        del self._members[place]
        member.connection.close()
        _end(member.process, 0.0)
        self.lost[member.start : member.stop] = True
        while True:
            self.restarts += 1
            if self.restarts > self.cfg.max_restarts:
                raise WorkerError(
                    f"simulator processes of {self.cfg.id} were lost {self.restarts} times, lastly during "
                    f"{command} ({reason}); max_restarts is {self.cfg.max_restarts}"
                )
            log.warning(
                "the simulator process of environments %d to %d was lost during %s (%s): their episodes are "
                "over, a new process goes on",
                member.start, member.stop - 1, command, reason,
            )  # fmt: skip
            new = self._start(member.start, member.stop)
            try:
                self._answer(new, START_SECONDS)
                self._share(new)
                if self._num_past:
                    new.connection.send(("keep_past", (self._num_past,)))
                    self._answer(new)
                self._members.insert(place, new)
                return
            except _Lost as error:
                reason = str(error)
                new.connection.close()
                _end(new.process, 0.0)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end(process: BaseProcess, seconds: float) -> None:
    """Wait for a process, then kill it."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
