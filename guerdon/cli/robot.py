"""`guerdon robot-sim` and `guerdon teleop`."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from guerdon.cli.common import Verbs, add_config, print_result

log = logging.getLogger("guerdon")


def add_robot(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    """`guerdon robot-sim` and `guerdon teleop`."""
    robot = verbs.add_parser(
        "robot-sim", parents=[common], help="a simulated robot that speaks SERL's protocol"
    )
    robot.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)")
    robot.add_argument("--port", type=int, default=5000, metavar="P", help="port; 0 takes a free one (5000)")
    robot.add_argument("--seed", type=int, default=0, metavar="S", help="of noise and faults")
    robot.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="X times real time (1)")
    robot.add_argument("--image-size", type=int, default=64, metavar="N", help="of square pictures (64)")
    robot.add_argument(
        "--faults", default="", metavar="NAME=X,...", help="such as drop_rate=0.05,latency_rate=0.02"
    )
    robot.set_defaults(handler=_robot_sim)

    drive = verbs.add_parser(
        "teleop", parents=[common], help="drive a robot by hand, the model's verdict live on a page"
    )
    add_config(drive, default="teleop")
    drive.add_argument("--checkpoint", type=Path, required=True, metavar="C", help="the reward model")
    drive.add_argument("--port", type=int, default=8765, metavar="P", help="of the page (8765)")
    drive.add_argument(
        "--save-dir", type=Path, default=Path("wrong_calls"), metavar="DIR", help="store for wrong calls"
    )
    drive.add_argument("--steps", type=int, metavar="N", help="end after so many steps")
    drive.set_defaults(handler=_teleop)


def _robot_sim(arguments: argparse.Namespace) -> int:
    from guerdon.config.build import build
    from guerdon.config.schema_robot import RobotSimConfig
    from guerdon.envs.robot.sim.server import SimServer

    faults = dict(item.partition("=")[::2] for item in arguments.faults.split(",") if item)
    settings = {
        "host": arguments.host, "port": arguments.port, "seed": arguments.seed,
        "time_scale": arguments.time_scale, "image_size": [arguments.image_size] * 2, "faults": faults,
    }  # fmt: skip
    server = SimServer(build(RobotSimConfig, settings))
    result = {"url": server.url, "time_scale": arguments.time_scale, "faults": faults}
    where = f"simulated robot at {server.url} (time x{arguments.time_scale:g}); end it with Ctrl-C"
    print_result(arguments, result, [where])
    sys.stdout.flush()  # whoever started us in the background waits for the address
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        log.info("the simulated robot has ended")
    finally:
        server.server_close()
    return 0


def _teleop(arguments: argparse.Namespace) -> int:
    from guerdon.cli.teleop import teleop
    from guerdon.config import load_config

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
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
    print_result(arguments, result, [f"{line} ({result['reason']})"])
    return 0
