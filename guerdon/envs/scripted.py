"""What scripted policies have in common: episodes that are counted, each with habits of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, FloatArray


class ScriptedPolicy(ABC):
    """Acts from state vectors in N environments; N is that of the first states.

    Args:
        noise: 0 (none) to about 1 (most episodes fail).
        seed: what environment i does in its n-th episode depends on (seed, i, n) and the states alone.
    """

    _episodes: Any
    """int [N], how many episodes have ended in each."""
    intended: FloatArray | None = None
    """float32 [N, A]; what the last `act` would have been without noise, where the policy tells."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise <= 2.0:
            raise ConfigError(f"noise must lie between 0 and 2, not {noise!r}")
        if seed < 0:
            raise ConfigError(f"seed must not be negative, not {seed!r}")
        self.noise, self.seed = float(noise), int(seed)
        self._num_envs: int | None = None

    def reset(self, mask: BoolArray | None = None) -> None:
        """Say that new episodes have begun, in the environments of `mask` (bool [N]) or in all of them.

        Without a mask the count of episodes starts again, as if the policy were new.
        """
        if mask is None:
            self._num_envs = None
        elif self._num_envs is not None:
            if mask.shape != (self._num_envs,) or mask.dtype != np.bool_:
                raise DataError(f"mask must be bool [{self._num_envs}], not {mask.dtype} {list(mask.shape)}")
            self._episodes[mask] += 1
            self._begin(mask)

    def _check_state(self, state: FloatArray, size: int) -> None:
        """Refuse states that are not [N, size]; the first ones begin all episodes."""
        if state.ndim != 2 or state.shape[1] != size:
            raise DataError(f"state must have shape [N, {size}], not {list(state.shape)}")
        if self._num_envs is None:
            self._num_envs = len(state)
            self._allocate(len(state))
            self._begin(np.ones(len(state), np.bool_))
        if len(state) != self._num_envs:
            raise DataError(f"the expert plays {self._num_envs} environments, not {len(state)}; call reset()")

    @abstractmethod
    def _allocate(self, num_envs: int) -> None:
        """Make room for so many environments."""

    @abstractmethod
    def _begin(self, mask: BoolArray) -> None:
        """Draw the habits of the present episodes in the environments of `mask`, bool [N]."""
