"""Simulator processes on a CPU, as one set of environments; processes that die are replaced.

Each process has some ManiSkill environments and writes their results into memory that it shares with its
parent. It ends when its connection does, and when its parent is killed.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError, WorkerError
from guerdon.core.parent_watch import end_with
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.envs.maniskill.batch import ManiSkillBatch, TaskFacts
from guerdon.envs.maniskill.vulkan import choose_driver, driver_variables, set_driver_variables

log = logging.getLogger("guerdon")

START_SECONDS, CLOSE_SECONDS = 300.0, 10.0


def _layout(facts: TaskFacts, cfg: ManiSkillConfig) -> np.dtype[Any]:
    """One environment's row of the shared memory: actions, `ManiSkillBatch.values` and a frame."""
    fields: list[Any] = [
        ("actions", np.float32, (len(facts.action_low),)),
        ("state", np.float32, (facts.state_size,)),
        ("env_reward", np.float32),
        ("goal_in_picture", np.float32, (2,)),
        *((f"info/{name}", np.float32) for name in facts.info_names),
        ("frames", np.uint8, (*cfg.image_size, 3) if cfg.shows_images else (0,)),
    ]
    return np.dtype(fields, align=True)


def _allocate(size: int) -> int:
    """A file handle to memory; it has no name and ends with its last user."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("guerdon-simulators")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle


def _open(handle: int, facts: TaskFacts, cfg: ManiSkillConfig) -> NDArray[Any]:
    """The rows of all environments in the memory behind a handle, which may be closed afterwards."""
    return np.frombuffer(mmap.mmap(handle, 0), _layout(facts, cfg))


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
        self.cfg = cfg
        self.lost: BoolArray = np.zeros(num_envs, np.bool_)
        self.restarts = 0
        self._num_past = 0
        choose_driver()
        # A server that has the simulator imported and nothing started, from which processes are forked: they
        # are there in no time, and are no copies of this process with all that it has open.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["mani_skill.envs", "guerdon.envs.maniskill.pool"])
        count = min(num_envs, cfg.num_processes or _num_cores())
        edges = [num_envs * rank // count for rank in range(count + 1)]
        self._members: list[_Member] = []
        try:
            self._members = [self._start(a, b) for a, b in itertools.pairwise(edges)]
            facts: list[TaskFacts] = [self._answer(member, START_SECONDS) for member in self._members]
            self.facts = facts[0]
            self._handle = _allocate(num_envs * _layout(self.facts, cfg).itemsize)
            self._shared = _open(self._handle, self.facts, cfg)
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
        """Take one action in each environment, float32 [N, A]."""
        self._shared["actions"] = actions
        self._ask(self._members, "step", [()] * len(self._members))

    def reset(self, env_ids: IntArray, seeds: Sequence[int], *, keep_final: bool) -> None:
        """Start new episodes in `env_ids` (int [n]), also if processes are lost meanwhile."""
        self._ask_owners("reset", env_ids, [np.asarray(seeds, np.int64)], keep_final)
        self.lost[env_ids] = False

    def read(self, name: str) -> FloatArray:
        """A copy of one of `ManiSkillBatch.values`; lost environments keep what they had before."""
        array: FloatArray = self._shared[name].copy()
        return array

    def keep_past(self, num_steps: int) -> None:
        """From now on remember what was before each of the last `num_steps` steps."""
        self._num_past = num_steps
        self._ask(self._members, "keep_past", [(num_steps,)] * len(self._members))

    def render_envs(
        self, env_ids: IntArray, final: BoolArray, size: tuple[int, int] | None, steps_back: IntArray
    ) -> torch.Tensor:
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
        for places, sent in self._ask_owners("render", env_ids, [final, steps_back], other):
            frames[places] = np.stack(sent) if other else self._shared["frames"][env_ids[places]]
        return torch.from_numpy(frames)

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
        arguments = (theirs, self.cfg, start, stop, driver_variables())
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Member(start=start, stop=stop, process=process, connection=ours)

    def _share(self, member: _Member) -> None:
        try:
            send_handle(member.connection, self._handle, member.process.pid)
        except OSError as error:
            raise _Lost(str(error)) from error

    def _ask_owners(
        self, command: str, env_ids: IntArray, columns: Sequence[NDArray[Any]], *more: Any
    ) -> list[tuple[IntArray, Any]]:
        """Have those that own `env_ids` [n] do something, and their successors if they are lost meanwhile.

        Each gets its rows of `env_ids` and of `columns` [n]. Returns which of the n it did, and its answer.
        """
        done: list[tuple[IntArray, Any]] = []
        left = np.arange(len(env_ids))
        while len(left):
            ids = env_ids[left]
            shares = [(each, left[(ids >= each.start) & (ids < each.stop)]) for each in self._members]
            asked = [(member, places) for member, places in shares if len(places)]
            arguments = [
                (*(column[places].tolist() for column in (env_ids, *columns)), *more) for _, places in asked
            ]
            answers = self._ask([member for member, _ in asked], command, arguments)
            done += [(places, answers[each.start]) for each, places in asked if each.start in answers]
            left = np.concatenate([left[:0], *(p for each, p in asked if each.start not in answers)])
        return done

    def _ask(
        self, members: Sequence[_Member], command: str, arguments: Sequence[tuple[Any, ...]]
    ) -> dict[int, Any]:
        """Ask all at the same time; answers by first environment, without those that were lost."""
        answers: dict[int, Any] = {}
        gone: dict[int, str] = {}
        for member, given in zip(members, arguments, strict=True):
            try:
                member.connection.send((command, given))
            except OSError as error:
                gone[member.start] = str(error)
        for member in members:
            try:
                if member.start not in gone:
                    answers[member.start] = self._answer(member)
            except _Lost as error:
                gone[member.start] = str(error)
        for member in list(members):
            if member.start in gone:
                self._replace(member, command, gone[member.start])
        return answers

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
        self.lost[member.start : member.stop] = True
        while True:
            member.connection.close()
            _end(member.process, 0.0)
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
            member = self._start(member.start, member.stop)
            try:
                self._answer(member, START_SECONDS)
                self._share(member)
                if self._num_past:
                    member.connection.send(("keep_past", (self._num_past,)))
                    self._answer(member)
                self._members.insert(place, member)
                return
            except _Lost as error:
                reason = str(error)


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


def _serve(
    connection: Connection, cfg: ManiSkillConfig, start: int, stop: int, drivers: dict[str, str]
) -> None:
    """What runs in a process: the environments `start` to `stop`, until the parent closes it or ends."""
    parent: Any = multiprocessing.parent_process()
    end_with(parent.pid)
    set_driver_variables(drivers)  # as in the parent now; this was forked from an older server
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
    torch.set_num_threads(1)
    try:
        # Inference mode alone makes a step a fifth faster: it is all small tensor operations.
        with torch.inference_mode():
            try:
                batches = [ManiSkillBatch(cfg, 1, "cpu") for _ in range(start, stop)]
            except ConfigError as error:
                connection.send(("config_error", str(error)))
                return
            connection.send(("ok", batches[0].facts))
            handle = recv_handle(connection)
            shared = _open(handle, batches[0].facts, cfg)[start:stop]
            os.close(handle)
            simulators = _Simulators(batches, shared, start)
            while True:
                command, arguments = connection.recv()
                if command == "close":
                    return
                connection.send(("ok", getattr(simulators, command)(*arguments)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has gone
    except Exception:  # whatever it is, the parent has to know what happened here
        connection.send(("error", traceback.format_exc()))


class _Simulators:
    """The environments of a process; every method answers one command."""

    def __init__(self, batches: Sequence[ManiSkillBatch], shared: NDArray[Any], start: int) -> None:
        self._batches, self._start = batches, start
        self._shared: dict[str, NDArray[Any]] = {name: shared[name] for name in shared.dtype.names or ()}
        self._names = [name for name in self._shared if name not in ("actions", "frames")]
        self._actions = torch.from_numpy(shared["actions"])

    def step(self) -> None:
        for place, batch in enumerate(self._batches):
            batch.step(self._actions[place : place + 1])
            self._write(place)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], keep_final: bool) -> None:
        for env, seed in zip(env_ids, seeds, strict=True):
            self._batches[env - self._start].reset([0], [seed], keep_final=keep_final)
            self._write(env - self._start)

    def render(
        self,
        env_ids: Sequence[int],
        final: Sequence[bool],
        steps_back: Sequence[int],
        size: tuple[int, int] | None,
    ) -> list[UInt8Array]:
        """Frames into `shared`; at another size than usual they are sent instead."""
        sent: list[UInt8Array] = []
        for env, ended, back in zip(env_ids, final, steps_back, strict=True):
            place = env - self._start
            frame = self._batches[place].render(size, final=ended, steps_back=back)[0].numpy()
            if size is None:
                self._shared["frames"][place] = frame
            else:
                sent.append(frame)
        return sent

    def keep_past(self, num_steps: int) -> None:
        for batch in self._batches:
            batch.keep_past(num_steps)

    def _write(self, place: int) -> None:
        values = self._batches[place].values
        for name in self._names:
            self._shared[name][place] = values[name][0].numpy()
