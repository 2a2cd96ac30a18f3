"""Several replay buffers that are sampled as one, for environments that do not all step together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.agents.replay import ReplayBatch, ReplayBuffer
from guerdon.core.errors import DataError
from guerdon.core.types import display_path


class ReplayParts:
    """A ring holds environments that step together; here those of every worker have a ring of their own."""

    def __init__(
        self, parts: Sequence[ReplayBuffer], *, seed: int = 0, rng: np.random.Generator | None = None
    ) -> None:
        """Sample `parts` as one; `rng` is used instead of a generator of its own that begins with `seed`."""
        self.parts = list(parts)
        self.rng = np.random.default_rng(seed) if rng is None else rng
        """Shares a batch out among the parts; `save` leaves its state to the run's own."""

    def __len__(self) -> int:
        """StepBatch that are stored."""
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
        check_layout(path, len(self.parts))
        for place, part in zip(self._places(path), self.parts, strict=True):
            part.load(place)

    def _places(self, path: Path) -> list[Path]:
        return part_places(path, len(self.parts))


def part_places(path: Path, count: int) -> list[Path]:
    """The files of `count` parts; a single one is the file of a plain buffer."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}_{number}{path.suffix}") for number in range(count)]


def check_layout(path: Path, count: int) -> None:
    """Refuse the files of another number of buffers than `count`; what could be done is said."""
    others = set(path.parent.glob(f"{path.stem}*{path.suffix}")) - set(part_places(path, count))
    if path in others:
        raise DataError(
            f"{display_path(path.parent)} has one replay buffer for all environments, as a synchronous run "
            f"or a single env worker writes it; {count} env workers of an asynchronous run have one each: "
            "resume with asynchronous.enabled=false or with one env worker"
        )
    if others:
        raise DataError(
            f"{display_path(path.parent)} was written asynchronously with another number of env workers: "
            f"{count} now, but there is {sorted(others)[0].name}; a synchronous run counts as one"
        )
