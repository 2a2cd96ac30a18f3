"""The settings of the embedded environment `guerdon/Tabletop-v0`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args

from guerdon.config.build import Checked
from guerdon.core.errors import ConfigError

ObsMode: TypeAlias = Literal["state", "rgb", "state+rgb"]
EnvRewardKind: TypeAlias = Literal["dense", "sparse", "none"]

TABLETOP_CAMERAS = ("base_camera", "wrist_camera")
OBS_MODES: tuple[str, ...] = get_args(ObsMode)
ENV_REWARD_KINDS: tuple[str, ...] = get_args(EnvRewardKind)


def unknown_name(what: str, name: object, known: Collection[str]) -> str:
    """One line that says `name` is not among `known` and names the nearest one that is."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {what} {name!r}; {hint}"


def check_image_size(name: str, value: Any) -> tuple[int, int]:
    """`value` as (height, width), or ConfigError unless it is two whole numbers from 16 to 2048."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or len(value) != 2:
        raise ConfigError(f"{name} must be (height, width), not {value!r}")
    height, width = value
    for side in (height, width):
        if isinstance(side, bool) or not hasattr(side, "__index__") or not 16 <= int(side) <= 2048:
            raise ConfigError(f"{name} must be two whole numbers from 16 to 2048, not {value!r}")
    return int(height), int(width)


@dataclass(frozen=True, kw_only=True)
class TabletopConfig(Checked):
    """Settings of `guerdon/Tabletop-v0`; each is also a keyword of `gymnasium.make` and `make_vec`."""

    obs_mode: ObsMode = "state"
    """What an observation holds: `state` (a vector), `rgb` (the images of `cameras`), or `state+rgb`."""
    cameras: tuple[str, ...] = ("base_camera",)
    """The cameras whose images are in the observation: `base_camera`, `wrist_camera` or both."""
    image_size: tuple[int, int] = (64, 64)
    """(height, width) of observed images in pixels, 16 to 2048."""
    render_size: tuple[int, int] = (256, 256)
    """(height, width) of what `render()` returns."""
    reward: EnvRewardKind = "dense"
    """The env reward: `dense` (staged, in [0, 1]), `sparse` (1 on every success frame), `none` (always 0)."""
    max_episode_steps: int = 50
    """Steps after which an episode is truncated."""
    terminate_on_success: bool = False
    """End the episode on success. Off by default: otherwise the length of an episode gives success away."""
    domain_randomization: float = 0.0
    """0 to 1: how much lighting, colours and camera poses vary between episodes."""
    status_lamp: bool = True
    """Let the lamp on the gripper tell whether it is still; otherwise no single frame shows that."""
    decoy: bool = False
    """Put a false goal beside the cube's start, which looks like the real one; reaching it is no success."""

    def __post_init__(self) -> None:
        if self.obs_mode not in OBS_MODES:
            raise ConfigError(unknown_name("obs_mode", self.obs_mode, OBS_MODES))
        if self.reward not in ENV_REWARD_KINDS:
            raise ConfigError(unknown_name("reward", self.reward, ENV_REWARD_KINDS))
        listed: Any = self.cameras
        if isinstance(listed, str) or not hasattr(listed, "__iter__"):
            raise ConfigError(f"cameras must be a list of names, not {listed!r}")
        cameras = tuple(listed)
        for camera in cameras:
            if camera not in TABLETOP_CAMERAS:
                raise ConfigError(unknown_name("camera", camera, TABLETOP_CAMERAS))
        if not cameras or len(set(cameras)) != len(cameras):
            raise ConfigError(f"cameras must name at least one camera and none twice, not {cameras}")
        steps = self.max_episode_steps
        if isinstance(steps, bool) or not hasattr(steps, "__index__") or int(steps) < 1:
            raise ConfigError(f"max_episode_steps must be a whole number of at least 1, not {steps!r}")
        for name in ("terminate_on_success", "status_lamp", "decoy"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        amount = self.domain_randomization
        if isinstance(amount, (bool, str)) or not 0.0 <= float(amount) <= 1.0:
            raise ConfigError(f"domain_randomization must lie between 0 and 1, not {amount!r}")
        object.__setattr__(self, "cameras", cameras)
        object.__setattr__(self, "image_size", check_image_size("image_size", self.image_size))
        object.__setattr__(self, "render_size", check_image_size("render_size", self.render_size))
        super().__post_init__()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], base: TabletopConfig | None = None) -> TabletopConfig:
        """`base` (or the defaults) with `settings` on top; an unknown name is a ConfigError."""
        known = [item.name for item in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(unknown_name("Tabletop setting", name, known))
        merged = {} if base is None else {name: getattr(base, name) for name in known}
        return cls(**{**merged, **settings})
