"""A reward model of one's own: it rewards what the agent did not expect to see."""

from dataclasses import dataclass

from torch import Tensor

from guerdon.config.limits import PositiveFloat
from guerdon.rewards import RewardNetwork, StepBatch, ZooModel, ZooSettings
from guerdon.rewards.zoo.networks import perceptron


@dataclass(frozen=True, kw_only=True)
class SurpriseSettings(ZooSettings):
    """What can be set, beside what all models have."""

    scale: PositiveFloat = 1.0
    """Of the reward."""


class Forecast(RewardNetwork):
    """Predicts the next observation from observation and action."""

    def __init__(self, num_features: int, num_obs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = perceptron([num_features, *hidden, num_obs])

    def forward(self, features: Tensor) -> Tensor:
        """Features [N, F] -> predicted observations [N, S]."""
        ahead: Tensor = self.layers(features)
        return ahead

    def learn(self, features: Tensor, ahead: Tensor) -> Tensor:
        """The loss of one gradient step."""
        loss: Tensor = (self(features) - ahead).square().mean()
        return loss


class Surprise(ZooModel):
    """Rewards what was not expected."""

    Settings = SurpriseSettings

    def make_network(self) -> Forecast:
        """The network that is trained."""
        return Forecast(self.num_features(("obs", "action")), self.cfg.obs_size, self.cfg.hidden)

    def sample_batch(self) -> tuple[Tensor, Tensor]:
        """What `learn` gets in one gradient step."""
        batch = self.experience.sample(self.cfg.batch_size, self.generator)
        return self.features(batch, ("obs", "action")), self.obs_features(batch.next_obs)

    def rewards(self, batch: StepBatch) -> Tensor:
        """In the leading shape of the batch; changes nothing."""
        flat = batch.flat()
        errors = self.network(self.features(flat, ("obs", "action"))) - self.obs_features(flat.next_obs)
        surprise: Tensor = self.cfg.scale * errors.square().mean(1).view(batch.shape)
        return surprise
