"""What runs in a simulator process: some ManiSkill environments on a CPU, their results in shared memory.

The process ends when its connection does, and when its parent is killed.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError
from guerdon.core.parent_watch import end_with
from guerdon.core.types import FloatArray, UInt8Array
from guerdon.envs.maniskill.batch import ManiSkillBatch, TaskFacts
from guerdon.envs.maniskill.vulkan import set_driver_variables


@dataclass(frozen=True, kw_only=True)
class SharedArrays:
    """The arrays of all environments, one row each, in memory that parent and simulators share."""

    actions: FloatArray
    """float32 [N, A]"""
    state: FloatArray
    """float32 [N, S]"""
    env_reward: FloatArray
    """float32 [N]"""
    infos: FloatArray
    """float32 [N, F], in the order of `TaskFacts.info_names`"""
    goal_in_picture: FloatArray
    """float32 [N, 2]"""
    frames: UInt8Array
    """uint8 [N, H, W, 3]; N is 0 where no frames can be asked for"""

    @classmethod
    def open(cls, handle: int, num_envs: int, facts: TaskFacts, cfg: ManiSkillConfig) -> SharedArrays:
        """The arrays in the memory behind a file handle, which may be closed afterwards."""
        layout, size = _layout(num_envs, facts, cfg)
        memory = mmap.mmap(handle, size)
        arrays: dict[str, NDArray[Any]] = {
            name: np.frombuffer(memory, kind, int(np.prod(shape)), offset).reshape(shape)
            for name, (offset, shape, kind) in layout.items()
        }
        return cls(**arrays)


def allocate(num_envs: int, facts: TaskFacts, cfg: ManiSkillConfig) -> int:
    """A file handle to memory for `SharedArrays`; it has no name and ends with its last user."""
    size = _layout(num_envs, facts, cfg)[1]
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("guerdon-simulators")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle


def _layout(
    num_envs: int, facts: TaskFacts, cfg: ManiSkillConfig
) -> tuple[dict[str, tuple[int, tuple[int, ...], Any]], int]:
    """Name -> (offset, shape, type), and the size of all."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "actions": ((num_envs, len(facts.action_low)), np.float32),
        "state": ((num_envs, facts.state_size), np.float32),
        "env_reward": ((num_envs,), np.float32),
        "infos": ((num_envs, len(facts.info_names)), np.float32),
        "goal_in_picture": ((num_envs, 2), np.float32),
        "frames": ((num_envs if cfg.shows_images else 0, *cfg.image_size, 3), np.uint8),
    }
    layout, offset = {}, 0
    for name, (shape, kind) in shapes.items():
        layout[name] = (offset, shape, kind)
        offset += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // 64) * 64
    return layout, max(offset, 64)


def serve(
    connection: Connection, cfg: ManiSkillConfig, start: int, stop: int, total: int, drivers: dict[str, str]
) -> None:
    """Simulate the environments `start` to `stop` of `total` until the parent closes it or ends."""
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
            simulators = _Simulators(batches, SharedArrays.open(handle, total, batches[0].facts, cfg), start)
            os.close(handle)
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
    """The environments of this process; every method answers one command."""

    def __init__(self, batches: Sequence[ManiSkillBatch], shared: SharedArrays, start: int) -> None:
        self._batches, self._shared, self._start = batches, shared, start
        self._names = batches[0].facts.info_names

    def step(self) -> None:
        actions = torch.from_numpy(self._shared.actions)
        for place, batch in enumerate(self._batches):
            row = self._start + place
            batch.step(actions[row : row + 1])
            self._write(place)

    def reset(self, rows: Sequence[int], seeds: Sequence[int], keep_final: bool) -> None:
        for row, seed in zip(rows, seeds, strict=True):
            self._batches[row - self._start].reset([0], [seed], keep_final=keep_final)
            self._write(row - self._start)

    def render(
        self,
        rows: Sequence[int],
        final: Sequence[bool],
        size: tuple[int, int] | None,
        steps_back: Sequence[int],
    ) -> list[UInt8Array] | None:
        """Frames into `shared`; at another size than usual they are sent instead."""
        sent: list[UInt8Array] = []
        for row, ended, back in zip(rows, final, steps_back, strict=True):
            frame = self._batches[row - self._start].render(size, final=ended, steps_back=back)[0].numpy()
            if size is None:
                self._shared.frames[row] = frame
            else:
                sent.append(frame)
        return sent or None

    def keep_past(self, num_steps: int) -> None:
        for batch in self._batches:
            batch.keep_past(num_steps)

    def _write(self, place: int) -> None:
        batch, row = self._batches[place], self._start + place
        self._shared.state[row] = batch.state[0].numpy()
        self._shared.goal_in_picture[row] = batch.goal_in_picture[0].numpy()
        self._shared.env_reward[row] = float(batch.env_reward[0])
        self._shared.infos[row] = [float(batch.infos[name][0]) for name in self._names]
