"""Several replay buffers that are sampled as one, for environments that do not all step together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.errors import DataError
from guerdon.learn.replay import ReplayBatch, ReplayBuffer
from guerdon.types import display_path


class ReplayParts:
    """A ring holds environments that step together; here those of every worker have a ring of their own."""

    def __init__(self, parts: Sequence[ReplayBuffer], *, seed: int) -> None:
        self.parts = list(parts)
        self.rng = np.random.default_rng(seed)
        """Shares a batch out among the parts; `save` leaves its state to the run's own."""

    def __len__(self) -> int:
        """Transitions that are stored."""
        return sum(len(part) for part in self.parts)

    def sample(self, batch_size: int, *, gamma: float, num_n_steps: int = 1) -> ReplayBatch:
        """Draw transitions with replacement, each of all parts equally often; see `ReplayBuffer.sample`."""
        if len(self.parts) == 1:
            return self.parts[0].sample(batch_size, gamma=gamma, num_n_steps=num_n_steps)
        sizes = np.array([part.num_complete for part in self.parts], np.float64)
        if not sizes.any():
            raise DataError("the replay buffer has no complete transition to sample yet")
        counts = self.rng.multinomial(batch_size, sizes / sizes.sum())
        return ReplayBatch.cat(
            [
                part.sample(int(count), gamma=gamma, num_n_steps=num_n_steps)
                for part, count in zip(self.parts, counts, strict=True)
                if count
            ]
        )

    def cut(self, final_obs: Sequence[Any]) -> None:
        """The running episodes of all parts will not go on; `final_obs` are those of each part."""
        for part, obs in zip(self.parts, final_obs, strict=True):
            part.cut(obs)

    def save(self, path: Path) -> None:
        """Write a file for each part; a single one is the file of a plain buffer."""
        for place, part in zip(self._places(path), self.parts, strict=True):
            part.save(place)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote with as many parts."""
        places = self._places(path)
        others = set(path.parent.glob(f"{path.stem}*{path.suffix}")) - set(places)
        if others:
            raise DataError(
                f"{display_path(path.parent)} was written with another number of env workers: "
                f"{len(self.parts)} now, but there is {sorted(others)[0].name}"
            )
        for place, part in zip(places, self.parts, strict=True):
            part.load(place)

    def _places(self, path: Path) -> list[Path]:
        if len(self.parts) == 1:
            return [path]
        return [path.with_name(f"{path.stem}_{number}{path.suffix}") for number in range(len(self.parts))]
