"""Random network distillation (Burda et al., 2018, arXiv:1810.12894).

A predictor learns to say what a fixed random network makes of the observations that were reached. Where it
has seldom been it is wrong: the reward is the squared error, mean over the features,

    novelty(s, a, s') = mean_i (predictor(s')_i - target(s')_i) ** 2 >= 0, high where s' is new,

divided by the running deviation of its discounted sums. Observations are scaled by running statistics and
limited; without that the random network sees next to nothing of parts that vary little.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from guerdon.rewards.curiosity import CuriosityModel, CuriositySettings
from guerdon.rewards.networks import Distillation
from guerdon.rewards.transitions import Transitions


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
        return Distillation((self.cfg.obs_size, *self.cfg.hidden, self.cfg.feature_size), nn.ReLU)

    def draw(self) -> tuple[Tensor]:
        """Observations that the policy reached."""
        drawn = self.experience.sample(self.cfg.batch_size, self.generator)
        return (self.obs_features(drawn.next_obs),)

    def novelty(self, batch: Transitions) -> Tensor:
        """The predictor's squared error, [*L]."""
        errors: Tensor = self.network(self.obs_features(batch.flat().next_obs))
        return errors.view(batch.shape)
