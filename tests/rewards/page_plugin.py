"""A reward model as the page on adding one describes it, and nothing that the page does not have.

A network learns to tell the environment's reward from observation and action; its answer is the reward.
"""

import torch
from torch import nn

from guerdon.rewards import BaseRewardModel


class RewardNetwork(nn.Module):
    def __init__(self, obs_size, hidden_size):
        super().__init__()
        self.feature = nn.Sequential(nn.Linear(obs_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1))

    def forward(self, data):
        return self.feature(data)

    def learn(self, data, rewards):
        return (self.forward(data).squeeze(-1) - rewards).pow(2).mean()


class PageRewardModel(BaseRewardModel):
    def __init__(self, config, device, tb_logger):
        self.cfg = config
        self.device = device
        self.tb_logger = tb_logger
        self.reward_model = RewardNetwork(config.obs_size, config.hidden_size).to(device)
        self.opt = torch.optim.Adam(self.reward_model.parameters(), config.learning_rate)
        self.train_data = []
        self.train_iter = 0

    def collect_data(self, data):
        for item in data:
            assert {"obs", "next_obs", "action", "reward"} <= item.keys()
        self.train_data.extend(data)

    def clear_data(self, iter):
        assert hasattr(self.cfg, "clear_buffer_per_iters"), "clear failed"
        if iter % self.cfg.clear_buffer_per_iters == 0:
            self.train_data.clear()

    def _train(self):
        obs = torch.stack([item["obs"] for item in self.train_data]).to(self.device)
        rewards = torch.stack([item["reward"] for item in self.train_data]).to(self.device)
        loss = self.reward_model.learn(obs, rewards)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()

    def train(self):
        for _ in range(self.cfg.update_per_collect):
            loss = self._train()
            self.tb_logger.add_scalar("reward_model/reward_loss", loss, self.train_iter)
            self.train_iter += 1

    def estimate(self, data):
        train_data_augmented = [{**item} for item in data]
        res = torch.stack([item["obs"] for item in data]).to(self.device)
        with torch.no_grad():
            reward = self.reward_model.forward(res).squeeze(-1).cpu()
        for item, rew in zip(train_data_augmented, reward, strict=True):
            item["reward"] = rew
        return train_data_augmented


class InPlaceRewardModel(PageRewardModel):
    """Its estimate edits the items that it is given."""

    def estimate(self, data):
        for item, changed in zip(data, super().estimate(data), strict=True):
            item["reward"] = changed["reward"]
        return data


SETTINGS = {
    "obs_size": 4,
    "hidden_size": 16,
    "learning_rate": 1e-2,
    "update_per_collect": 5,
    "clear_buffer_per_iters": 1,
}
