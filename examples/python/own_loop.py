"""A training loop of your own, in the style of CleanRL, on a learned reward.

`gd.wrap` gives vector environments whose rewards come from a model of the zoo; the loop does not know it.
"""

import gymnasium as gym
import torch
from torch import nn

import guerdon as gd


def main(num_envs: int = 8, num_steps: int = 32, iterations: int = 60, seed: int = 0) -> float:
    """Train a policy with REINFORCE on random network distillation (curiosity); returns the last reward."""
    torch.manual_seed(seed)
    envs = gym.make_vec(
        "CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}
    )
    curiosity = gd.reward_model("rnd", envs, hidden=(32,), seed=seed)
    # The model learns from the steps that it scores; environment and learned rewards are added.
    envs = gd.wrap(envs, curiosity, train_every=num_envs * num_steps, combine_mode="add")
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    obs, _ = envs.reset(seed=seed)
    mean_reward = 0.0
    for iteration in range(iterations):
        log_probs, rewards, alive = [], [], []
        for _ in range(num_steps):
            choice = torch.distributions.Categorical(logits=policy(torch.as_tensor(obs, dtype=torch.float32)))
            actions = choice.sample()
            obs, reward, terminated, truncated, info = envs.step(actions.numpy())
            log_probs.append(choice.log_prob(actions))
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            alive.append(torch.as_tensor(~(terminated | truncated)))
        # Returns from the end of the rollout backwards; an episode's end cuts them off.
        returns: list[torch.Tensor] = []
        total = torch.zeros(num_envs)
        for reward, goes_on in zip(reversed(rewards), reversed(alive), strict=True):
            total = reward + 0.98 * total * goes_on
            returns.insert(0, total)
        advantages = torch.stack(returns)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        loss = -(torch.stack(log_probs) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_reward = float(torch.stack(rewards).mean())
        if iteration % 20 == 0:
            learned = float(info["learned_reward"].mean())
            print(f"iteration {iteration}: reward {mean_reward:.3f}, of which learned {learned:.3f}")
    envs.close()
    return mean_reward


if __name__ == "__main__":
    main()
