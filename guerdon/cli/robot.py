"""`guerdon robot-sim`, and `guerdon teleop`: drive a robot by hand, with the learned reward on a local page.

The page shows the pictures, the probability over the last steps and the threshold. One key (`w`, on the page
or in the terminal) saves what is shown as a wrong call: a frame with the label that the model did not give,
in a store that the next fit can read.
"""

from __future__ import annotations

import argparse
import logging
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.cli.teleop_page import LiveView, Shown, ViewServer
from guerdon.cli.verb import Result, config_of, next_command, print_result
from guerdon.config import EnvConfig, RewardConfig, build
from guerdon.config.schema_robot import RobotSimConfig
from guerdon.core.errors import ConfigError, EmergencyStopError
from guerdon.core.images import stack_episode
from guerdon.core.types import UInt8Array, display_path, with_control_mode
from guerdon.envs.robot import Intervention, Operator, RobotEnv
from guerdon.envs.robot.driver import RobotState
from guerdon.envs.robot.sim.server import SimServer
from guerdon.envs.robot.vector import LearnerNames, control_mode, make_operator, robot_config
from guerdon.rewards.image.scorer import RewardManager

log = logging.getLogger("guerdon")

WRONG_KEY, QUIT_KEY = "w", "q"


def robot_sim_verb(arguments: argparse.Namespace) -> None:
    """Serve a simulated robot until Ctrl-C."""
    faults = dict(item.partition("=")[::2] for item in arguments.faults.split(",") if item)
    settings = {name: getattr(arguments, name) for name in ("host", "port", "seed", "time_scale")}
    settings |= {"image_size": [arguments.image_size] * 2, "faults": faults}
    server = SimServer(build(RobotSimConfig, settings))
    values = {"url": server.url, "time_scale": arguments.time_scale, "faults": faults}
    where = f"simulated robot at {server.url} (time x{arguments.time_scale:g}); end it with Ctrl-C"
    print_result(arguments, Result(values, [where]))  # now: a program that started us waits for the address
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        log.info("the simulated robot has ended")
    finally:
        server.server_close()


def teleop_verb(arguments: argparse.Namespace) -> Result:
    """Drive a robot by hand."""
    config = config_of(arguments)
    reward = config.reward
    reward = replace(reward, model=replace(reward.model, checkpoint_path=str(arguments.checkpoint)))
    result = teleop(
        config.env.eval,
        reward,
        port=arguments.port,
        save_dir=arguments.save_dir,
        max_steps=arguments.steps,
        seed=config.seed,
    )
    line = f"{result['steps']} steps, {result['wrong_calls']} wrong calls -> {result['save_dir']}"
    collected = next_command("data", "convert", result["save_dir"], "YOUR_DATA", "--to", "native")
    steps = [f"{collected}  # adds them to your episodes; then fit again"] if result["wrong_calls"] else []
    return Result(result, [f"{line} ({result['reason']})"], next_steps=steps)


class _Listener:
    """An operator whose keys `w` and `q` are ours."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.pressed: list[str] = []

    def reset(self) -> None:
        """A new episode begins."""
        self._operator.reset()

    def read(self, state: RobotState) -> Intervention | None:
        """What is steered now."""
        return self._operator.read(state)

    def keys(self) -> list[str]:
        """The others."""
        keys = self._operator.keys()
        self.pressed += [key for key in keys if key in (WRONG_KEY, QUIT_KEY)]
        return [key for key in keys if key not in (WRONG_KEY, QUIT_KEY)]

    def close(self) -> None:
        """Go."""
        self._operator.close()


def teleop(
    env_cfg: EnvConfig,
    reward: RewardConfig,
    *,
    port: int = 8765,
    save_dir: Path = Path("wrong_calls"),
    max_steps: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Drive until `q`, Ctrl-C or `max_steps`; the page is at 127.0.0.1.

    Args:
        env_cfg: a section with `env_type: robot`; its `operator` drives.
        reward: the `reward` section; its checkpoint judges.
        port: of the page; 0 takes a free one.
        save_dir: a native store that wrong calls are added to.
        max_steps: end after so many steps.
        seed: of where episodes begin, and of a scripted operator.
    """
    if env_cfg.operator == "none":
        raise ConfigError("nobody drives the robot: set env.eval.operator to keyboard or spacemouse")
    manager = RewardManager(reward)
    robot = robot_config(env_cfg, standalone=False)
    source = with_control_mode(f"teleop {robot.driver}", control_mode(robot))
    operator = make_operator(env_cfg, robot, seed)
    assert operator is not None
    listener = _Listener(operator)
    try:
        env = LearnerNames(RobotEnv(robot, operator=listener))
    except BaseException:
        listener.close()
        raise
    view = LiveView(manager.threshold, save_dir, source)
    try:
        server = ViewServer(view, port)
    except BaseException:
        env.close()
        raise
    log.info("the page is at %s/; w saves a wrong call, q ends", server.url)
    steps, reason = 0, "ended"
    try:
        steps = _drive(env, listener, manager, view, seed, max_steps)
    except KeyboardInterrupt:
        reason = "interrupted"
    except EmergencyStopError as error:
        reason = str(error)
    finally:
        server.stop()
        env.close()
    return {
        "steps": steps,
        "wrong_calls": view.num_wrong,
        "save_dir": display_path(save_dir),
        "reason": reason,
    }


def _drive(
    env: LearnerNames,
    listener: _Listener,
    manager: RewardManager,
    view: LiveView,
    seed: int,
    max_steps: int | None,
) -> int:
    """Step and score, one episode after another; returns the steps."""
    steps, count = 0, manager.facts.contract.num_frames
    rest = np.zeros(env.env.config.action_size, np.float32)
    cameras = [camera.name for camera in env.env.config.cameras]
    latest: dict[str, deque[UInt8Array]] = {}
    over, episode = True, 0
    while max_steps is None or steps < max_steps:
        if over:
            env.reset(seed=seed if episode == 0 else None)
            latest = {name: deque(maxlen=count) for name in cameras}
            episode += 1
        obs, _, terminated, truncated, _ = env.step(rest)
        over = terminated or truncated
        pressed, listener.pressed = listener.pressed, []
        for key in pressed:  # by somebody who looked at the step before
            if key == QUIT_KEY:
                return steps
            log.info(view.save_wrong())
        steps += 1
        for name in cameras:
            latest[name].append(obs[name])
        shown = {name: np.stack(frames) for name, frames in latest.items()}
        stacks = {name: stack_episode(shown[name], count)[-1:] for name in manager.image_keys}
        prob = float(manager.score(stacks).prob_success[0])
        scored = {name: frames if count > 1 else frames[-1:] for name, frames in shown.items()}
        view.show(
            Shown(
                step=steps,
                frames={name: obs[name] for name in cameras},
                scored=scored,
                prob_success=prob,
            )
        )
    return steps
