"""Networks of the learners: observations in, features out, and multilayer perceptrons on top.

An observation is a batch of state vectors, or a mapping with `state` (optional) and images of cameras, as the
environments give them. Inside the learners it is always a mapping of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from guerdon.config import NetworkConfig
from guerdon.core.batches import STATE as STATE
from guerdon.core.batches import Obs as Obs
from guerdon.core.errors import ConfigError
from guerdon.rewards.image.encoders import SmallCNN, make_encoder
from guerdon.rewards.image.hf_encoder import HFEncoder, load_hf_encoder


@dataclass(frozen=True, kw_only=True)
class ObsSpec:
    """What an observation holds."""

    state_size: int
    """S; 0 without state vectors."""
    images: tuple[tuple[str, tuple[int, int, int]], ...] = ()
    """(camera, (H, W, C)) of each image."""

    @classmethod
    def of(cls, space: gym.Space[Any]) -> ObsSpec:
        """From the observation space of a single environment."""
        if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
            return cls(state_size=space.shape[0])
        if not isinstance(space, gym.spaces.Dict):
            raise ConfigError(f"the learners take state vectors and images of cameras, not {space}")
        size, images = 0, []
        for name, part in space.spaces.items():
            if isinstance(part, gym.spaces.Box) and len(part.shape) == 1 and name == STATE:
                size = part.shape[0]
            elif isinstance(part, gym.spaces.Box) and len(part.shape) == 3 and part.dtype == np.uint8:
                images.append((name, (part.shape[0], part.shape[1], part.shape[2])))
            else:
                raise ConfigError(f"the learners do not know what to do with the observation {name}: {part}")
        return cls(state_size=size, images=tuple(images))


def to_obs(observation: Any, device: torch.device | str = "cpu") -> Obs:
    """An environment's batch of observations as tensors; arrays that are float32 or uint8 are not copied."""
    parts = observation if isinstance(observation, Mapping) else {STATE: observation}
    tensors: Obs = {}
    for name, part in parts.items():
        array = np.asarray(part)
        wanted = np.uint8 if array.dtype == np.uint8 and array.ndim > 2 else np.float32
        tensors[name] = torch.from_numpy(np.ascontiguousarray(array, wanted)).to(device)
    return tensors


def num_rows(obs: Mapping[str, Tensor]) -> int:
    """N."""
    return len(next(iter(obs.values())))


def shift_images(images: Tensor, moves: Tensor) -> Tensor:
    """Move each image: [N, H, W, C], int64 [N, 2, 1] (down, right) -> [N, H, W, C].

    Repeating the border is the same as holding the index of a pixel within the image.
    """
    count, height, width, channels = images.shape
    rows = (torch.arange(height, device=images.device) - moves[:, 0]).clamp_(0, height - 1)
    columns = (torch.arange(width, device=images.device) - moves[:, 1]).clamp_(0, width - 1)
    first = torch.arange(count, device=images.device)[:, None] * height
    pixels = ((first + rows) * width)[:, :, None] + columns[:, None, :]
    return images.reshape(-1, channels).index_select(0, pixels.reshape(-1)).view(images.shape)


class ObsEncoder(nn.Module):
    """Features of an observation: the state as it is, beside what an encoder sees in the images.

    The encoder is a small CNN, or a frozen one of `network.encoder`.
    """

    def __init__(self, spec: ObsSpec, cfg: NetworkConfig) -> None:
        super().__init__()
        self.spec = spec
        self.num_features = spec.state_size + (cfg.image_features if spec.images else 0)
        if cfg.encoder is not None and not spec.images:
            raise ConfigError("learner.network.encoder looks at images, and the observations have none")
        self.cnn = self.frozen = None
        if spec.images and cfg.encoder is not None:
            self.frozen = FrozenEncoder(spec.images, cfg.encoder, cfg.image_features)
        elif spec.images:
            self.cnn = _cnn(spec.images, cfg.image_features)

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """-> float32 [N, num_features]."""
        parts = [obs[STATE]] if self.spec.state_size else []
        if self.cnn is not None:
            stacked = torch.cat([obs[name] for name, _ in self.spec.images], dim=-1)
            parts.append(self.cnn(stacked.permute(0, 3, 1, 2).float().div_(255.0).sub_(0.5)))
        elif self.frozen is not None:
            parts.append(self.frozen([obs[name] for name, _ in self.spec.images]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class FrozenEncoder(nn.Module):
    """The averaged features of a frozen `hf:` encoder, camera by camera, and a trained layer over them.

    Its weights are in no checkpoint of a policy, which names their hash instead: a policy that was trained
    on other features is refused. Copies share them.

    Args:
        images: (camera, (H, W, C)) of each; C is 1, or 3 for each stacked frame.
        name: `hf:FOLDER` or `hf:OWNER/NAME`.
        num_features: what the trained layer makes of all cameras.
    """

    def __init__(
        self, images: Sequence[tuple[str, tuple[int, int, int]]], name: str, num_features: int
    ) -> None:
        super().__init__()
        encoder = load_hf_encoder(name)
        encoder.freeze()
        size = 0
        for camera, (height, width, channels) in images:
            if channels != 1 and channels % 3:
                raise ConfigError(f"the encoder {name} takes colours: {camera} has {channels} channels")
            encoder.output_size(height, width)  # an error if they are too small
            size += encoder.num_features * max(1, channels // 3)
        self._shared = _Shared(encoder)
        self.project = nn.Sequential(
            _orthogonal(nn.Linear(size, num_features), math.sqrt(2)), nn.LayerNorm(num_features), nn.Tanh()
        )

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """uint8 [N, H, W, C] of each camera -> float32 [N, num_features]."""
        with torch.no_grad():
            features = torch.cat([self._features(each) for each in images], dim=-1)
        projected: Tensor = self.project(features)
        return projected

    def _features(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, C] -> float32 [N, F], the frames of a stack side by side."""
        encoder = self._shared.encoder
        count, height, width, channels = images.shape
        pixels = images.permute(0, 3, 1, 2).float().div_(255.0)
        pixels = pixels.expand(-1, 3, -1, -1) if channels == 1 else pixels.reshape(-1, 3, height, width)
        mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in (encoder.mean, encoder.std))
        maps: Tensor = encoder((pixels - mean) / std)
        return maps.mean((2, 3)).reshape(count, -1)

    def _apply(self, fn: Any, recurse: bool = True) -> FrozenEncoder:
        """Move the encoder along, which is no part of this module's state."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._shared.encoder._apply(fn)  # type: ignore[no-untyped-call]
        return self

    def get_extra_state(self) -> Tensor:
        """The hash of the encoder's weights, uint8 [16]."""
        return torch.tensor(list(bytes.fromhex(self._shared.encoder.facts.weights_hash)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the hash of a saved policy with the encoder that is here."""
        if not isinstance(state, Tensor) or not torch.equal(state.cpu(), self.get_extra_state()):
            source = self._shared.encoder.facts.source
            raise ConfigError(f"the policy was trained on features of other weights than {source} has now")


class _Shared:
    """Holds a frozen encoder outside of a module's state; copies share it."""

    def __init__(self, encoder: HFEncoder) -> None:
        self.encoder = encoder

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


def _cnn(images: Sequence[tuple[str, tuple[int, int, int]]], num_features: int) -> nn.Sequential:
    """Convolutions with stride 2 down to about 4x4, for images of one size."""
    height, width = images[0][1][:2]
    if any(shape[:2] != (height, width) for _, shape in images):
        raise ConfigError(f"all cameras of an observation must have one image size, not {dict(images)}")
    channels = sum(shape[2] for _, shape in images)
    body = make_encoder("cnn", in_channels=channels, image_size=(height, width))
    size = cnn_output_size(images)
    return nn.Sequential(
        body, _orthogonal(nn.Linear(size, num_features), math.sqrt(2)), nn.LayerNorm(num_features), nn.Tanh()
    )


def cnn_output_size(images: Sequence[tuple[str, tuple[int, int, int]]]) -> int:
    """Numbers that the convolutions make of images of one size."""
    return SmallCNN.output_size(*images[0][1][:2])


def mlp(size_in: int, size_out: int, cfg: NetworkConfig, *, out_gain: float = 1.0) -> nn.Sequential:
    """Hidden layers and a linear output, with orthogonal weights."""
    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[cfg.activation]
    layers: list[nn.Module] = []
    for width in cfg.hidden:
        layers.append(_orthogonal(nn.Linear(size_in, width), math.sqrt(2)))
        layers += [nn.LayerNorm(width)] * cfg.layer_norm + [activation()]
        size_in = width
    return nn.Sequential(*layers, _orthogonal(nn.Linear(size_in, size_out), out_gain))


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
