"""The loop of DI-engine's page on reward models, written out: collect, train the reward, relabel, learn.

GAIL learns a reward from a script's demonstrations, and DQN learns from that reward alone. All episodes of
FixedCartPole have 200 steps, so that an episode's end tells nothing.
"""

import numpy as np
from gymnasium.spaces import Discrete

from guerdon.agents.dqn import DQN
from guerdon.agents.networks import ObsSpec
from guerdon.agents.replay import ReplayBuffer
from guerdon.config import CollectConfig, DQNConfig, EnvConfig, NetworkConfig, RewardConfig
from guerdon.core.episodes import EpisodeTracker
from guerdon.core.streams import EnvStream
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.training.env_worker import EnvWorker
from guerdon.training.evaluation import evaluate
from guerdon.training.experts import play_expert

ENV = EnvConfig(id="guerdon/FixedCartPole-v0", num_envs=8)


def main(reward: str = "gail", iterations: int = 150, num_steps: int = 32, seed: int = 0) -> float:
    """Train with the reward model `reward` (`zero` is a control).

    Returns:
        The mean return of evaluations in the last third, at most 200; GAIL's reward moves, and DQN with it.
    """
    collector = EnvWorker(ENV, RewardConfig(), CollectConfig())
    obs_space, action_space = collector.facts.spaces
    assert isinstance(action_space, Discrete)
    spec, cfg = ObsSpec.of(obs_space), DQNConfig(gamma=0.97, target_interval=50, epsilon_fraction=0.5)
    learner = DQN(spec, action_space, cfg, NetworkConfig(hidden=(64, 64)), seed=seed)
    replay_buffer = ReplayBuffer(spec, (), np.int64, ENV.num_envs, 20_000, seed=seed)
    stream = EnvStream(0, 0, ENV.num_envs, replay_buffer, EpisodeTracker(ENV.num_envs))

    section = {"type": reward, "obs_shape": 4, "action_size": 2, "seed": seed}
    if reward == "gail":
        section |= {"reward_form": "positive", "lr": 3e-3, "update_per_collect": 40}
    reward_model = create_reward_model(section, "cpu", None)
    play_expert(reward_model, ENV, expert="scripted", expert_episodes=10, expert_noise=None, seed=seed)

    returns: list[float] = []
    stream.reset(collector.reset(seed))
    for iteration in range(iterations):
        # Collect with the policy, and store.
        steps = []
        for _ in range(num_steps):
            chunk, _ = collector.step(learner.act(stream.obs, progress=iteration / iterations))
            stream.store(chunk, {})
            steps.append(chunk.steps(action_space))
        new_data = StepBatch.cat(steps)
        # Train the reward model.
        reward_model.collect_data(new_data)
        reward_model.train()
        reward_model.clear_data(iter=iteration)
        # Train the policy on the rewards that the model gives now.
        for _ in range(num_steps):
            train_data = replay_buffer.sample(64, gamma=cfg.gamma)
            train_data_augmented = reward_model.estimate(train_data.steps(action_space))
            learner.update(train_data.train_batch(train_data_augmented.env_rewards[:, None]))
        if iteration >= iterations * 2 // 3 and iteration % 10 == 0:
            result, _ = evaluate(lambda obs: learner.act(obs, deterministic=True), ENV, episodes=8, seed=seed)
            returns.append(result.env_return)
    collector.close()
    print(f"{reward}: return {np.mean(returns):.0f} of 200")
    return float(np.mean(returns))


if __name__ == "__main__":
    main("zero")
    main("gail")
