"""Random network distillation (Burda et al., 2018, arXiv:1810.12894).

A predictor learns the output of a fixed random network for visited observations. Its error is large for
rarely visited ones. The reward is the squared error, mean over the features,

    novelty(s, a, s') = mean_i (predictor(s')_i - target(s')_i) ** 2 >= 0, high where s' is new,

divided by the running deviation of its discounted sums. Observations are scaled by running statistics and
clipped; otherwise entries that vary little would hardly affect the random network.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.curiosity import CuriosityModel, CuriositySettings
from guerdon.rewards.zoo.networks import Distillation, in_blocks, relu


@dataclass(frozen=True, kw_only=True)
class RNDSettings(CuriositySettings):
    """`reward_model` of type `rnd`."""


class RND(CuriosityModel):
    """Rewards what was seldom reached."""

    Settings = RNDSettings
    cfg: RNDSettings
    network: Distillation

    def make_network(self) -> Distillation:
        """Both networks."""
        return Distillation((self.cfg.obs_size, *self.cfg.hidden, self.cfg.feature_size), relu)

    def sample_features(self, count: int) -> tuple[Tensor]:
        """Observations that the policy reached."""
        (next_obs,) = self.experience.sample_parts(count, self.generator, "next_obs")
        return (self.obs_features(next_obs),)

    def novelty(self, batch: StepBatch) -> Tensor:
        """The predictor's squared error, [*L]."""
        next_obs = batch.next_obs.flatten(0, len(batch.shape) - 1)
        return in_blocks(self.network, self.obs_features(next_obs)).view(batch.shape)
