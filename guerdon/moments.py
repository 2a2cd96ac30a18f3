"""Running mean and deviation: the one place that knows how two sets of numbers are taken together."""

from __future__ import annotations

from typing import Any, NamedTuple


class Moments(NamedTuple):
    """Of a set of numbers; each part may be a float, or a tensor with one entry for each column."""

    count: Any
    mean: Any
    spread: Any
    """Sum of squared distances from the mean."""

    def merged(self, other: Moments) -> Moments:
        """Of both sets together, without looking at the numbers again (Chan et al., 1983)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.spread + other.spread + delta * delta * (self.count * other.count / count),
        )
