"""What tests of the serial pipelines share: small runs that take a second."""

from __future__ import annotations

from typing import Any

FIXED_CARTPOLE, POINT_REACH = "guerdon/FixedCartPole-v0", "guerdon/PointReach-v0"


def small(algorithm: str = "ppo", env: str | None = None, **changes: Any) -> dict[str, Any]:
    """Settings of a run of 1,024 steps with checkpoints after 256, 512 and 768 of them."""
    env = env or (POINT_REACH if algorithm == "sac" else FIXED_CARTPOLE)
    return {
        "output_dir": None,
        "env": {"train": {"id": env, "num_envs": 4}, "eval": {"id": env, "num_envs": 4}},
        "reward_model": {"type": "gail", "update_per_collect": 2, "batch_size": 32, "hidden": [16]},
        "learner": {
            "algorithm": algorithm,
            "total_steps": 1024,
            "eval_interval": 512,
            "eval_episodes": 4,
            "save_interval": 256,
            "network": {"hidden": [16]},
            "ppo": {"num_steps": 32, "update_epochs": 2, "minibatch_size": 64},
            "dqn": {"learning_starts": 128, "batch_size": 32, "updates_per_step": 0.1},
            "sac": {"learning_starts": 128, "batch_size": 32, "updates_per_step": 0.1},
        },
        "steps_per_collect": 64,
        **changes,
    }
