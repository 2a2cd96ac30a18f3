"""Types with limits for the settings: the type says what is allowed, and `build` enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from guerdon.core.errors import ConfigError
from guerdon.core.plugins import load_plugins


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers from `low` to `high`, both included; None leaves that side open."""

    low: float | None = None
    high: float | None = None
    why: str = ""
    """The reason of a limit that is not obvious, for messages."""

    def holds(self, value: float) -> bool:
        """Whether `value` lies in the range; NaN never does."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        reason = f" ({self.why})" if self.why else ""
        if self.low is None:
            return f"at most {self.high:g}{reason}"
        if self.high is None:
            return f"at least {self.low:g}{reason}"
        return f"from {self.low:g} to {self.high:g}{reason}"


def check_encoder_name(setting: str, name: str, hint: str = "") -> None:
    """Raise unless `name` has the form of an encoder in the Hugging Face layout."""
    if not name.startswith("hf:") or name == "hf:":
        raise ConfigError(f"{setting} is hf:FOLDER or hf:OWNER/NAME, not {name!r}{hint}")


@dataclass(frozen=True)
class NameOrPlugin:
    """The built-in names and those of the plugins under an entry-point group."""

    builtin: tuple[str, ...]
    group: str

    def holds(self, value: str) -> bool:
        """Whether `value` is one of the names; plugins are looked up for others than built-in ones alone."""
        return value in self.builtin or value in load_plugins(self.group)

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.builtin, *load_plugins(self.group)]

    def __str__(self) -> str:
        return f"one of {', '.join(repr(name) for name in self.names)}"


PositiveInt: TypeAlias = Annotated[int, Range(low=1)]
"""1, 2, 3, ..."""
NonNegativeInt: TypeAlias = Annotated[int, Range(low=0)]
"""0, 1, 2, ..."""
NonNegativeFloat: TypeAlias = Annotated[float, Range(low=0)]
"""0 or more."""
PositiveFloat: TypeAlias = Annotated[float, Range(low=1e-12)]
"""More than 0."""
Fraction: TypeAlias = Annotated[float, Range(low=0, high=1)]
"""A share or a probability, from 0 to 1."""
LayerWidth: TypeAlias = Annotated[int, Range(low=1, high=8192, why="a layer has the square of it in weights")]
"""Width of a fully connected layer; two such layers and their optimiser's state take 1 GB at most."""
EncoderWidth: TypeAlias = Annotated[
    int, Range(low=1, high=256, why="weights grow with its square, and published encoders have 64")
]
"""Channels of an encoder's first stage; at the limit a ResNet-50 has 370 million weights, 1.5 GB."""
NetworkParts: TypeAlias = Annotated[int, Range(low=1, high=256, why="each takes memory of its own")]
"""Heads, pooling blocks or frames that a network has side by side."""
ImageSide: TypeAlias = Annotated[
    int, Range(low=1, high=1024, why="larger frames are resized to it, and memory grows with its square")
]
"""Height or width of what a network looks at, in pixels."""
ImageSize: TypeAlias = tuple[ImageSide, ImageSide, ImageSide]
"""[C, H, W] of what a network looks at."""
CameraSide: TypeAlias = Annotated[int, Range(low=1, high=8192, why="no camera gives more pixels")]
"""Height or width of a camera's frames, in pixels."""
Region: TypeAlias = tuple[Fraction, Fraction, Fraction, Fraction]
"""[top, left, height, width] as shares of an image's height and width."""
