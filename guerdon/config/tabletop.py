"""The settings of the embedded environment `guerdon/Tabletop-v0`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from guerdon.config.build import Checked
from guerdon.config.limits import Fraction, PositiveInt, Range
from guerdon.core.errors import ConfigError, unknown_name

ObsMode: TypeAlias = Literal["state", "rgb", "state+rgb"]
EnvRewardKind: TypeAlias = Literal["dense", "sparse", "none"]
TabletopCamera: TypeAlias = Literal["base_camera", "wrist_camera"]
ImageSide: TypeAlias = Annotated[int, Range(low=16, high=2048)]
"""Height or width of an image, in pixels."""

TABLETOP_CAMERAS: tuple[str, ...] = get_args(TabletopCamera)


class EnvSettings(Checked):
    """Settings that are also keywords of an environment's constructor."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], base: Self | None = None) -> Self:
        """`base` (or the defaults) with `settings` on top; an unknown name is a ConfigError."""
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        for name in settings:
            if name not in known:
                what = f"{cls.__name__.removesuffix('Config')} setting"
                raise ConfigError(unknown_name(what, name, known))
        merged = {} if base is None else {name: getattr(base, name) for name in known}
        return cls(**{**merged, **settings})


@dataclass(frozen=True, kw_only=True)
class TabletopConfig(EnvSettings):
    """Settings of `guerdon/Tabletop-v0`; each is also a keyword of `gymnasium.make` and `make_vec`."""

    obs_mode: ObsMode = "state"
    """What an observation holds: `state` (a vector), `rgb` (the images of `cameras`), or `state+rgb`."""
    cameras: tuple[TabletopCamera, ...] = ("base_camera",)
    """The cameras whose images are in the observation: `base_camera`, `wrist_camera` or both."""
    image_size: tuple[ImageSide, ImageSide] = (64, 64)
    """(height, width) of images in pixels, 16 to 2048: of stored and scored ones, and of observed ones."""
    obs_image_size: tuple[ImageSide, ImageSide] | None = None
    """(height, width) of observed images, if the policy is to see smaller ones; null: `image_size`."""
    render_size: tuple[ImageSide, ImageSide] = (256, 256)
    """(height, width) of what `render()` returns."""
    reward: EnvRewardKind = "dense"
    """The env reward: `dense` (staged, in [0, 1]), `sparse` (1 on every success frame), `none` (always 0)."""
    max_episode_steps: PositiveInt = 50
    """Steps after which an episode is truncated."""
    terminate_on_success: bool = False
    """End the episode on success. Off by default: otherwise the length of an episode gives success away."""
    domain_randomization: Fraction = 0.0
    """0 to 1: how much lighting, colours and camera poses vary between episodes."""
    status_lamp: bool = True
    """Let the lamp on the gripper tell whether it is still; otherwise no single frame shows that."""
    easy_starts: Fraction = 0.0
    """Share of episodes that start part-way: the gripper holds the cube, anywhere up to the goal, or is open
    above the cube. For policies that learn without demonstrations; evaluate with 0."""
    decoy: bool = False
    """Put a false goal beside the cube's start, which looks like the real one; reaching it is no success."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise ConfigError(f"cameras must name at least one camera and none twice, not {self.cameras}")
