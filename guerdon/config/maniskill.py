"""The settings of ManiSkill environments (`env_type: maniskill`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from guerdon.config.build import Checked
from guerdon.config.limits import NonNegativeInt, PositiveFloat, PositiveInt
from guerdon.config.tabletop import check_image_size, unknown_name
from guerdon.core.errors import ConfigError

ManiSkillObsMode: TypeAlias = Literal["state", "rgb", "state+rgb"]
ManiSkillReward: TypeAlias = Literal["normalized_dense", "dense", "sparse", "none"]
SimBackend: TypeAlias = Literal["auto", "cpu", "gpu"]
Output: TypeAlias = Literal["numpy", "torch"]

OBS_MODES: tuple[str, ...] = get_args(ManiSkillObsMode)
_OTHER_OBS_MODES = {"rgb+state": "state+rgb"}
REWARD_MODES: tuple[str, ...] = get_args(ManiSkillReward)
SIM_BACKENDS: tuple[str, ...] = get_args(SimBackend)
_OTHER_BACKENDS = {"physx_cpu": "cpu", "physx_cuda": "gpu", "cuda": "gpu"}
OUTPUTS: tuple[str, ...] = get_args(Output)
MAIN_CAMERA = "base_camera"
"""The one camera: it makes the images of observations and those that a reward model sees."""


@dataclass(frozen=True, kw_only=True)
class ManiSkillConfig(Checked):
    """Settings of a ManiSkill task; they stand in `init_params` of `env.train` and `env.eval`."""

    id: str = "PickCube-v1"
    """The task."""
    obs_mode: ManiSkillObsMode = "state"
    """What an observation holds: `state` (a vector, with what only a simulator knows), `rgb` (the image of
    `base_camera`, and under `state` what a robot knows without looking), or `state+rgb` (both in full)."""
    control_mode: str | None = None
    """How actions move the robot, such as `pd_ee_delta_pos`; null: the robot's own default."""
    reward_mode: ManiSkillReward = "normalized_dense"
    """The env reward: `normalized_dense`, `dense`, `sparse` (1 on every success frame) or `none`."""
    robot_uids: str | None = None
    """Another robot than the task's own."""
    render_mode: Literal["rgb_array"] | None = None
    """`rgb_array` lets frames be rendered on demand; images in observations need it not."""
    image_size: tuple[int, int] = (64, 64)
    """(height, width) of the frames, in pixels."""
    render_size: tuple[int, int] = (256, 256)
    """(height, width) of what `render()` returns."""
    camera_eye: tuple[float, float, float] | None = None
    """Where the camera is, in metres; null: a place from which the goal of the task is seen."""
    camera_target: tuple[float, float, float] | None = None
    """Where it looks."""
    camera_fov: PositiveFloat | None = None
    """Its field of view, in radians."""
    shader_pack: str = "minimal"
    """How frames are drawn: `minimal` or, in all its splendour, `default`."""
    max_episode_steps: PositiveInt | None = None
    """Steps after which an episode is truncated; null: as registered with the task."""
    terminate_on_success: bool = False
    """End the episode on success. Off by default: otherwise the length of an episode gives success away."""
    sim_backend: SimBackend = "auto"
    """`cpu`: processes with several of them each; `gpu`: all in one batch; `auto`: a GPU if there is any."""
    num_processes: PositiveInt | None = None
    """Simulator processes on a CPU; null: one for each core, but no more than environments."""
    max_restarts: NonNegativeInt = 20
    """How often lost simulator processes are replaced, all together, before a run gives up."""
    timeout_seconds: PositiveFloat = 300.0
    """A simulator process that does not answer for so long counts as lost."""
    output: Output = "numpy"
    """What a batch on a GPU returns: arrays, or tensors that stay on the device."""
    sim_config: dict[str, Any] = field(default_factory=dict)
    """ManiSkill's own `sim_config`, such as `{control_freq: 20}`."""
    task_params: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the task's constructor."""

    def __post_init__(self) -> None:
        """Check what can be checked without the simulator."""
        obs_mode = _OTHER_OBS_MODES.get(self.obs_mode, self.obs_mode)
        backend = _OTHER_BACKENDS.get(self.sim_backend, self.sim_backend)
        for name, value, known in (
            ("obs_mode", obs_mode, OBS_MODES),
            ("reward_mode", self.reward_mode, REWARD_MODES),
            ("sim_backend", backend, SIM_BACKENDS),
            ("output", self.output, OUTPUTS),
        ):
            if value not in known:
                raise ConfigError(unknown_name(name, value, known))
        if self.render_mode not in (None, "rgb_array"):
            raise ConfigError(unknown_name("render_mode", self.render_mode, ["rgb_array"]))
        for name in ("camera_eye", "camera_target"):
            point = getattr(self, name)
            if point is not None:
                object.__setattr__(self, name, _check_point(name, point))
        if (self.camera_eye is None) != (self.camera_target is None):
            raise ConfigError("camera_eye and camera_target belong together: give both or none")
        object.__setattr__(self, "obs_mode", obs_mode)
        object.__setattr__(self, "sim_backend", backend)
        object.__setattr__(self, "image_size", check_image_size("image_size", self.image_size))
        object.__setattr__(self, "render_size", check_image_size("render_size", self.render_size))
        super().__post_init__()

    @property
    def shows_images(self) -> bool:
        """Whether frames can be asked for."""
        return self.render_mode is not None or self.obs_mode != "state"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> ManiSkillConfig:
        """The defaults with `settings` on top; an unknown name is a ConfigError."""
        known = [item.name for item in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(unknown_name("ManiSkill setting", name, known))
        return cls(**settings)


def _check_point(name: str, point: Any) -> tuple[float, float, float]:
    """`point` as three numbers, or ConfigError."""
    numbers = isinstance(point, list | tuple) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in point
    )
    if not numbers or len(point) != 3:
        raise ConfigError(f"{name} must be three numbers, not {point!r}")
    return float(point[0]), float(point[1]), float(point[2])
