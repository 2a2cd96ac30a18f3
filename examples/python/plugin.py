"""A reward model of your own: check it, use it, and publish it as a package (`plugin_package/`).

After `pip install examples/python/plugin_package` the line with `register_reward_model` is not needed.
"""

import sys
from pathlib import Path

import guerdon as gd
from guerdon.rewards import register_reward_model

sys.path.insert(0, str(Path(__file__).parent / "plugin_package"))
from surprise_reward import Surprise


def main(steps: int = 4_000, num_envs: int = 8) -> int:
    """Check the model and train PPO on it; returns the environment steps."""
    print(gd.check_reward_model(Surprise))  # shapes, purity, saving and loading, devices
    register_reward_model("surprise", Surprise)
    model = gd.reward_model("surprise", "guerdon/FixedCartPole-v0", scale=2.0, hidden=(32,))
    with gd.PPO(
        "guerdon/FixedCartPole-v0",
        reward=model,
        num_envs=num_envs,
        combine_mode="weighted",
        env_reward_weight=1.0,
        reward_weight=0.01,
        net_arch=(64, 64),
    ) as agent:
        agent.learn(steps)
        print(agent.evaluate(8))
        return agent.num_steps


if __name__ == "__main__":
    main()
