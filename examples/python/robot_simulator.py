"""The simulated robot: record demonstrations over its network protocol, fit a reward model to its cameras.

A real arm differs in the address alone; see the robot tutorial in the docs.
"""

from pathlib import Path

import guerdon as gd
from guerdon.config import CollectConfig, EnvConfig
from guerdon.config.schema_robot import RobotSimConfig
from guerdon.data.collect.robot import collect_robot
from guerdon.data.datasets.cleaning import process
from guerdon.envs.robot.sim.server import SimServer


def main(out: Path = Path("runs/robot"), episodes: int = 8, epochs: int = 16, size: int = 32) -> float:
    """Record, clean, fit; returns the area under the curve on held-out episodes."""
    # A server that speaks the protocol of SERL's robot server, with an arm, a peg and two cameras behind it.
    with SimServer(RobotSimConfig(port=0, time_scale=20.0, image_size=(size, size))) as server:
        robot = EnvConfig(
            env_type="robot",
            operator="scripted",  # on a real arm: keyboard or spacemouse
            operator_params={"failure_rate": 0.4},
            override_cfg={
                "url": server.url,  # on a real arm: robot_ip
                "time_scale": 20.0,
                "image_size": [size, size],
                "success_hold_steps": 5,
                "max_episode_steps": 40,
            },
        )
        recording = CollectConfig(save_dir=str(out / "recording"), format="realworld-pkl")
        print(collect_robot(robot, recording, num_episodes=episodes, seed=3))
    # Leave out frames that prove nothing: before motion, duplicates, doubtful ones.
    process(out / "recording", out / "data", "native")
    data = gd.read(out / "data")
    reward = gd.fit_reward(
        data, epochs=epochs, width=8, image_size=(3, size, size), learning_rate=3e-3, out=out / "reward"
    )
    print(data, reward, sep="\n")
    return reward.metrics["auc"]


if __name__ == "__main__":
    main()
