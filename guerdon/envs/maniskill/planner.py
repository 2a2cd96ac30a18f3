"""ManiSkill's own motion planner as a policy: it plans an episode from its seed, and the plan is followed.

The planner (mplib) runs in a process of its own: versions of it that do not fit the installed NumPy end their
process without a word, and that must not be ours.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np
import torch

from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.parent_watch import end_with
from guerdon.core.types import BoolArray, FloatArray
from guerdon.envs.maniskill.task import make_task
from guerdon.envs.maniskill.vulkan import driver_variables, set_driver_variables

log = logging.getLogger("guerdon")

CONTROL_MODES = ("pd_joint_pos", "pd_joint_pos_vel")
PLAN_SECONDS = 120.0
_HINT = (
    "ManiSkill's motion planner does not work here ({}); mplib 0.1.1 needs numpy below 2. "
    "Use collect.policy: scripted, or recorded trajectories"
)

Planner: TypeAlias = Callable[[int], FloatArray]
"""The seed of an episode -> actions float32 [T, A]; T is 0 if there is no plan."""


class MotionPlanner:
    """Follows a plan in each environment, and holds still at its end.

    Args:
        env: a `ManiSkillVectorEnv`, or anything with its `num_envs`, `facts`, `config` and `episode_seeds`.
        planner: who plans; None: ManiSkill's planner in a process.
    """

    def __init__(self, env: Any, planner: Planner | None = None) -> None:
        if env.facts.control_mode not in CONTROL_MODES:
            raise ConfigError(
                f"the motion planner needs control_mode {' or '.join(CONTROL_MODES)}, "
                f"not {env.facts.control_mode!r}"
            )
        self._env = env
        self._planner = PlannerProcess(env.config) if planner is None else planner
        self._plans: dict[int, FloatArray] = {}
        self._steps = np.zeros(env.num_envs, np.int64)

    def act(self, states: FloatArray) -> FloatArray:
        """The next action of each plan, float32 [N, A]."""
        actions = []
        for env, step in enumerate(self._steps.tolist()):
            if env not in self._plans:
                self._plans[env] = self._plan(env)
            actions.append(self._plans[env][min(step, len(self._plans[env]) - 1)])
        self._steps += 1
        return np.array(actions, np.float32)

    def reset(self, mask: BoolArray) -> None:
        """New episodes start in the environments of `mask`, bool [N]."""
        self._steps[mask] = 0
        for env in np.flatnonzero(mask).tolist():
            self._plans.pop(env, None)

    def _plan(self, env: int) -> FloatArray:
        plan = self._planner(int(self._env.episode_seeds()[env]))
        limit = self._env.max_episode_steps
        if len(plan) == 0:
            raise DataError(f"the motion planner found no way to solve {self._env.config.id}")
        if limit is not None and len(plan) > limit:
            log.warning("a plan of %d steps is truncated at max_episode_steps=%d", len(plan), limit)
        return plan


class PlannerProcess:
    """Plans with ManiSkill's solution of a task, in a process that ends with its connection."""

    def __init__(self, cfg: ManiSkillConfig) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, cfg, driver_variables()), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, seed: int) -> FloatArray:
        """Plan the episode with that seed."""
        try:
            self._connection.send(seed)
            if not self._connection.poll(PLAN_SECONDS):
                self._process.kill()
                raise ConfigError(_HINT.format(f"no plan within {PLAN_SECONDS:g} s"))
            kind, content = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            raise ConfigError(
                _HINT.format(f"its process ended with exit code {self._process.exitcode}")
            ) from error
        if kind == "error":
            raise ConfigError(content)
        plan: FloatArray = content
        return plan


def _serve(connection: Connection, cfg: ManiSkillConfig, drivers: dict[str, str]) -> None:
    """Answer seeds with plans until the connection ends."""
    parent: Any = multiprocessing.parent_process()
    end_with(parent.pid)
    set_driver_variables(drivers)
    torch.set_num_threads(1)
    try:
        try:
            from mani_skill.examples.motionplanning.panda.run import MP_SOLUTIONS
        except ImportError as error:
            connection.send(("error", _HINT.format(error)))
            return
        if cfg.id not in MP_SOLUTIONS:
            known = ", ".join(sorted(MP_SOLUTIONS))
            connection.send(("error", f"ManiSkill has no planned solution of {cfg.id}; it has {known}"))
            return
        task = make_task(dataclasses.replace(cfg, render_mode=None, obs_mode="state"), 1, "cpu")
        while True:
            recorded = _RecordedTask(task)
            MP_SOLUTIONS[cfg.id](recorded, seed=connection.recv(), debug=False, vis=False)
            connection.send(("ok", np.array(recorded.actions, np.float32)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has gone
    except ConfigError as error:
        connection.send(("error", str(error)))


class _RecordedTask:
    """A task that records its actions; the rest is the task's."""

    def __init__(self, task: Any) -> None:
        self.unwrapped = task
        self.actions: list[FloatArray] = []

    def step(self, action: Any) -> Any:
        self.actions.append(np.asarray(action, np.float32))
        return self.unwrapped.step(action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwrapped, name)
