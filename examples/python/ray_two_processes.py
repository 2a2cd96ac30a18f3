"""The same agent with its environments in two processes of Ray.

Needs: pip install 'guerdon[ray]'. Rewards, policies and numbers are those of a run in one process; only who
steps the environments changes.
"""

import guerdon as gd


def main(steps: int = 4_000, num_envs: int = 8) -> int:
    """Train with two env workers; returns the environment steps."""
    with gd.PPO(
        "guerdon/Tabletop-v0",  # an id, because the workers make the environments themselves
        num_envs=num_envs,
        env_kwargs={"max_episode_steps": 50},
        engine="ray",
        placement={"env": "0-1"},  # a worker on each of the first two cores
        n_steps=50,
        net_arch=(64, 64),
    ) as agent:
        agent.learn(steps, callbacks=lambda step: print(step.env_steps, step.metrics["env/return"]))
        return agent.num_steps


if __name__ == "__main__":
    main()
