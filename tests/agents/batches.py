"""Random batches for tests of the learners that replay."""

import torch

from guerdon.core.batches import TrainBatch


def random_batch(
    actions: torch.Tensor, seed: int = 0, *, images: bool = False, reward_scale: float = 1.0, discount: float
) -> TrainBatch:
    """As many transitions as there are actions: states of 5 numbers, and pictures of 16x16 if asked for."""
    generator, count = torch.Generator().manual_seed(seed), len(actions)

    def obs() -> dict[str, torch.Tensor]:
        parts = {"state": torch.randn(count, 5, generator=generator)}
        if images:
            shape = (count, 16, 16, 3)
            parts["front"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return parts

    return TrainBatch(
        obs=obs(),
        next_obs=obs(),
        actions=actions,
        training_rewards=reward_scale * torch.randn(count, generator=generator),
        not_terminated=(torch.rand(count, generator=generator) > 0.3).float(),
        discount=torch.full((count,), discount),
    )
