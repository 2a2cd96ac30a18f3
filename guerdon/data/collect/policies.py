"""Policies that data can be collected with: random, scripted, or loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, FloatArray, display_path
from guerdon.data.files.bounds import one_line, read_json

ACTIVATIONS = {"tanh": "Tanh", "relu": "ReLU", "gelu": "GELU"}
"""Names in `policy.json` -> modules of `torch.nn`."""


class Policy(Protocol):
    """Chooses actions for a batch of environments."""

    def act(self, states: FloatArray) -> FloatArray:
        """States [N, S] -> actions [N, A]."""

    def reset(self, mask: BoolArray) -> None:
        """New episodes begin in the environments of `mask` (bool [N])."""


class RandomPolicy:
    """Actions drawn uniformly from the action space."""

    takes_observations = True

    def __init__(self, space: gym.Space[Any], seed: int) -> None:
        self._space, self._rng = space, np.random.default_rng(seed)
        self._batch: gym.Space[Any] | None = None

    def act(self, observations: Any) -> Any:
        """Independent of the observations [N, ...], whatever they are."""
        count = _batch_size(observations)
        space = self._space
        if isinstance(space, gym.spaces.Box) and space.is_bounded() and space.dtype.kind == "f":
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            return low + self._rng.random((count, *space.shape), np.float32) * (high - low)
        if self._batch is None:
            self._batch = batch_space(space, count)
            self._batch.seed(int(self._rng.integers(1 << 31)))
        return self._batch.sample()

    def reset(self, mask: BoolArray) -> None:
        """Nothing to do."""


def _batch_size(observations: Any) -> int:
    if isinstance(observations, Mapping):
        return _batch_size(next(iter(observations.values())))
    return _batch_size(observations[0]) if isinstance(observations, tuple) else len(observations)


class CheckpointPolicy:
    """A multi-layer perceptron read from a directory with `policy.json` and `policy.safetensors`.

    `policy.json` has `{"kind": "mlp", "activation": "tanh" | "relu" | "gelu", "squash": true | false}`; the
    weights are named `<layer>.weight` and `<layer>.bias` with layers counted from 0. With `squash` the output
    passes through tanh. Nothing in the directory can run code.
    """

    def __init__(self, path: Path | str, *, noise: float = 0.0, seed: int = 0) -> None:
        import torch  # the other policies do without, and start a second or two earlier
        from safetensors.torch import load_file

        path = Path(path)
        try:
            description = read_json(path / "policy.json")
            weights = load_file(path / "policy.safetensors")
        except Exception as error:  # hostile bytes can fail in any way
            raise DataError(f"no policy can be read from {display_path(path)}: {one_line(error)}") from error
        if not isinstance(description, dict):
            raise DataError(f"{display_path(path / 'policy.json')} is no JSON object")
        kind, activation = description.get("kind"), description.get("activation")
        if kind != "mlp" or not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise DataError(
                f"{display_path(path / 'policy.json')} describes kind={one_line(kind)!r}, "
                f"activation={one_line(activation)!r}; "
                f"known are kind='mlp' and activation in {sorted(ACTIVATIONS)}"
            )
        make_activation = getattr(torch.nn, ACTIVATIONS[activation])
        layers: list[torch.nn.Module] = []
        try:
            for number in range(len(weights) // 2):
                linear = torch.nn.Linear(1, 1)
                for part in ("weight", "bias"):
                    parameter = torch.nn.Parameter(weights[f"{number}.{part}"].float(), requires_grad=False)
                    setattr(linear, part, parameter)
                layers += [linear, make_activation()]
            self._network = torch.nn.Sequential(*layers[:-1]).eval()
            self._size = int(weights["0.weight"].shape[1])
            self._network(torch.zeros(1, self._size))  # layers that do not fit each other
        except Exception as error:  # hostile bytes can fail in any way
            raise DataError(
                f"{display_path(path / 'policy.safetensors')} does not fit an mlp: {one_line(error)}"
            ) from error
        if description.get("squash"):
            self._network.append(torch.nn.Tanh())
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def act(self, states: FloatArray) -> FloatArray:
        """The network's output, with Gaussian noise if asked for, clipped to [-1, 1]."""
        if states.shape[1] != self._size:
            raise DataError(
                f"the policy was trained on states of size {self._size}, these have {states.shape[1]}"
            )
        import torch

        with torch.no_grad():
            actions: FloatArray = self._network(torch.from_numpy(states)).numpy()
        noise = self._noise * self._rng.standard_normal(actions.shape, np.float32)
        return np.clip(actions + noise, -1.0, 1.0)

    def reset(self, mask: BoolArray) -> None:
        """Nothing to do: the policy has no memory."""
