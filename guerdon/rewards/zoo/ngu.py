"""Never give up (Badia et al., 2020, arXiv:2002.06038): novelty in the episode times novelty in the run.

Within an episode, the features of all states so far are remembered (those of an inverse model, as in ICM). A
state is new if its k nearest neighbours among them are far:

    episodic = 1 / (sqrt(sum of K over the k nearest) + c), with K = eps / (max(d2 / d2_mean - xi, 0) + eps),

where d2 are squared distances and d2_mean is a running mean of them; 0 if that sum is above `max_similarity`.
Missing neighbours count as if they were at the mean distance. Over the whole run, the error
of random network distillation (RND) measures how new a state is, in deviations from its mean:

    novelty(s, a, s') = episodic(s') * clip(1 + (error(s') - mean) / deviation, 1, max_modulation) >= 0.

It depends on the episode so far: each step is scored once, with the memory of the running episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from guerdon.config.limits import NonNegativeFloat, PositiveFloat, PositiveInt
from guerdon.core.running_stats import Statistics
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.curiosity import CuriosityModel, CuriositySettings, tracked
from guerdon.rewards.zoo.icm import InverseFeatures
from guerdon.rewards.zoo.networks import Distillation, in_blocks, relu

BLOCK = 64
"""Steps that are compared with their past at once."""
FOLLOWING = 0.1
"""How fast the mean distance of neighbours follows the features, for each collection."""


@dataclass(frozen=True, kw_only=True)
class NGUSettings(CuriositySettings):
    """`reward_model` of type `ngu`."""

    num_neighbours: PositiveInt = 10
    """k."""
    memory_size: PositiveInt = 1000
    """Latest states of an episode that are remembered."""
    kernel_epsilon: PositiveFloat = 1e-3
    """eps: how close neighbours must be to count as the same."""
    cluster_distance: NonNegativeFloat = 8e-3
    """xi: relative squared distances below it count as zero."""
    pseudo_count: PositiveFloat = 1e-3
    """c: keeps the reward of the entirely new finite."""
    max_similarity: PositiveFloat = 8.0
    """A state that is more like its past than this gets nothing."""
    error_horizon: PositiveInt = 10_000
    """Mean and deviation of the errors are those of about so many latest steps: errors shrink over a run."""
    max_modulation: PositiveFloat = 5.0
    """L: how much at most the novelty in life adds to that in the episode."""


@dataclass(frozen=True, kw_only=True)
class EpisodicMemory:
    """Features of the latest steps of N streams, M of them at most."""

    keys: Tensor
    """float32 [N, M, F]."""
    valid: Tensor
    """bool [N, M]; whether a step belongs to the episode that is running."""


class EpisodicFeatures(InverseFeatures):
    """Features for the memory, and random network distillation beside them."""

    def __init__(self, cfg: CuriositySettings) -> None:
        super().__init__(cfg)
        self.lifelong = Distillation((cfg.obs_size, *cfg.hidden, cfg.feature_size), relu)

    def learn(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        """Losses of the inverse model and of the distillation; they share no weights."""
        return super().learn(obs, actions, next_obs) + self.lifelong.learn(next_obs)


class NGU(CuriosityModel):
    """Rewards what is new in the episode, and more what is new at all."""

    Settings = NGUSettings
    history_dependent = True
    saved = (*CuriosityModel.saved, "error_statistics", "mean_distance")
    cfg: NGUSettings
    network: EpisodicFeatures

    def setup(self) -> None:
        """Statistics of errors and distances too."""
        super().setup()
        self.error_statistics = Statistics(horizon=self.cfg.error_horizon).to(self.device)
        self.mean_distance = torch.zeros((), device=self.device)
        """d2_mean; 0 before the first neighbours."""

    def make_network(self) -> EpisodicFeatures:
        """Encoder, inverse model, and distillation."""
        return EpisodicFeatures(self.cfg)

    def initial_state(self, num_streams: int) -> EpisodicMemory:
        """Nothing is remembered where episodes begin."""
        keys = torch.zeros(num_streams, 0, self.cfg.feature_size, device=self.device)
        return EpisodicMemory(keys=keys, valid=keys.new_zeros((num_streams, 0), dtype=torch.bool))

    def stream_rewards(self, batch: StepBatch, state: EpisodicMemory) -> tuple[Tensor, EpisodicMemory]:
        """Rewards [T, N] of streams that go on from the memory `state`, and the memory after them."""
        features = self.obs_features(batch.flat().next_obs)
        nearest, state = self._neighbours(features, batch, state)
        return self.scaled(self._novelty(features, nearest).view(batch.shape)), state

    def novelty(self, batch: StepBatch) -> Tensor:
        """Of streams that begin here, before scaling, [*L]."""
        features = self.obs_features(batch.flat().next_obs)
        nearest, _ = self._neighbours(features, batch.streams(), self.initial_state(batch.streams().shape[1]))
        return self._novelty(features, nearest).view(batch.shape)

    def _neighbours(
        self, features: Tensor, streams: StepBatch, memory: EpisodicMemory
    ) -> tuple[Tensor, EpisodicMemory]:
        """Squared distances of scaled observations [T * N, S] to their neighbours in the episode."""
        phi = in_blocks(self.network, features).view(*streams.shape, -1)
        return nearest_in_episode(phi, streams.done, memory, self.cfg.num_neighbours, self.cfg.memory_size)

    def _novelty(self, features: Tensor, nearest: Tensor) -> Tensor:
        """Episodic times lifelong, float32 [T * N]."""
        errors = in_blocks(self.network.lifelong, features)
        in_life = 1.0 + (errors - self.error_statistics.mean.float()) / self.error_statistics.deviation
        modulation: Tensor = in_life.clamp(min=1.0).clamp(max=self.cfg.max_modulation)
        novelty: Tensor = self._episodic(nearest.flatten(0, 1)) * modulation
        return novelty

    def _episodic(self, nearest: Tensor) -> Tensor:
        """From squared distances [R, k], infinite where there is no neighbour, float32 [R]."""
        cfg = self.cfg
        relative = nearest / self.mean_distance if self.mean_distance > 0.0 else nearest
        relative = torch.where(torch.isinf(nearest), 1.0, relative)
        kernel = cfg.kernel_epsilon / ((relative - cfg.cluster_distance).clamp(min=0.0) + cfg.kernel_epsilon)
        similarity = kernel.sum(1).sqrt() + cfg.pseudo_count
        return torch.where(similarity > cfg.max_similarity, 0.0, 1.0 / similarity)

    @torch.no_grad()
    def update_statistics(self, batch: StepBatch) -> None:
        """Bring the mean distance, the statistics of the errors and the deviation up to date."""
        if not len(batch):
            return
        some = tracked(batch)
        features = self.obs_features(some.flat().next_obs)
        self.error_statistics.update(self.network.lifelong(features))
        nearest, _ = self._neighbours(features, some, self.initial_state(some.shape[1]))
        found = nearest[torch.isfinite(nearest)]
        if len(found):
            rate = FOLLOWING if self.mean_distance > 0.0 else 1.0
            self.mean_distance = torch.lerp(self.mean_distance, found.mean(), rate)
        super().update_statistics(batch)


def nearest_in_episode(
    phi: Tensor, done: Tensor, memory: EpisodicMemory, num_neighbours: int, memory_size: int
) -> tuple[Tensor, EpisodicMemory]:
    """Squared distances of each step to the nearest earlier ones of its episode, and the memory after.

    Args:
        phi: features, [T, N, F].
        done: whether an episode ended with the step, bool [T, N].
        memory: of the steps before the first.
        num_neighbours: k; where there are fewer the distance is infinite.
        memory_size: steps to keep.

    Returns:
        float32 [T, N, k], from the nearest on, and the memory.
    """
    found: list[Tensor] = [phi.new_zeros(0, phi.shape[1], num_neighbours)]
    for some, ended in zip(torch.split(phi, BLOCK), torch.split(done, BLOCK), strict=True):
        own, ended = some.transpose(0, 1), ended.T.long()
        keys = torch.cat([memory.keys, own], 1)
        episode = ended.cumsum(1) - ended  # how many episodes ended before the step
        mine = torch.cat(
            [
                memory.valid[:, None] & (episode == 0)[:, :, None],
                ((episode[:, :, None] == episode[:, None]).tril(-1)),
            ],
            2,
        )
        apart = torch.cdist(own, keys, compute_mode="donot_use_mm_for_euclid_dist").square()
        apart = apart.masked_fill(~mine, torch.inf)
        nearest = apart.topk(min(num_neighbours, keys.shape[1]), largest=False).values
        missing = (0, num_neighbours - nearest.shape[2])
        found.append(torch.nn.functional.pad(nearest, missing, value=torch.inf).transpose(0, 1))
        over = ended.sum(1, keepdim=True)
        valid = torch.cat([memory.valid & (over == 0), episode == over], 1)
        memory = EpisodicMemory(keys=keys[:, -memory_size:], valid=valid[:, -memory_size:])
    return torch.cat(found), memory
