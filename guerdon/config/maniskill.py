"""The settings of ManiSkill environments (`env_type: maniskill`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from guerdon.config.limits import NonNegativeInt, PositiveFloat, PositiveInt
from guerdon.config.tabletop import EnvSettings, ImageSide, ObsMode
from guerdon.core.errors import ConfigError

_OBS_MODE_ALIASES = {"rgb+state": "state+rgb"}
_BACKEND_ALIASES = {"physx_cpu": "cpu", "physx_cuda": "gpu", "cuda": "gpu"}
MAIN_CAMERA = "base_camera"
"""The one camera: it makes the images of observations and those that a reward model sees."""


@dataclass(frozen=True, kw_only=True)
class ManiSkillConfig(EnvSettings):
    """Settings of a ManiSkill task; they stand in `init_params` of `env.train` and `env.eval`."""

    id: str = "PickCube-v1"
    """The task."""
    obs_mode: ObsMode = "state"
    """What an observation holds: `state` (a vector, with what only a simulator knows), `rgb` (the image of
    `base_camera`, and under `state` what a robot knows without looking), or `state+rgb` (both in full)."""
    control_mode: str | None = None
    """How actions move the robot, such as `pd_ee_delta_pos`; null: the robot's own default."""
    reward_mode: Literal["normalized_dense", "dense", "sparse", "none"] = "normalized_dense"
    """The env reward: `normalized_dense`, `dense`, `sparse` (1 on every success frame) or `none`."""
    robot_uids: str | None = None
    """Another robot than the task's own."""
    render_mode: Literal["rgb_array"] | None = None
    """`rgb_array` lets frames be rendered on demand; images in observations need it not."""
    image_size: tuple[ImageSide, ImageSide] = (64, 64)
    """(height, width) of the frames, in pixels."""
    render_size: tuple[ImageSide, ImageSide] = (256, 256)
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
    sim_backend: Literal["auto", "cpu", "gpu"] = "auto"
    """`cpu`: processes with several of them each; `gpu`: all in one batch; `auto`: a GPU if there is any."""
    num_processes: PositiveInt | None = None
    """Simulator processes on a CPU; null: one for each core, but no more than environments."""
    max_restarts: NonNegativeInt = 20
    """How often lost simulator processes are replaced, all together, before a run gives up."""
    timeout_seconds: PositiveFloat = 300.0
    """A simulator process that does not answer for so long counts as lost."""
    output: Literal["numpy", "torch"] = "numpy"
    """What a batch on a GPU returns: arrays, or tensors that stay on the device."""
    sim_config: dict[str, Any] = field(default_factory=dict)
    """ManiSkill's own `sim_config`, such as `{control_freq: 20}`."""
    task_params: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the task's constructor."""

    def __post_init__(self) -> None:
        """Check what can be checked without the simulator; ManiSkill's own names are known, too."""
        object.__setattr__(self, "obs_mode", _OBS_MODE_ALIASES.get(self.obs_mode, self.obs_mode))
        object.__setattr__(self, "sim_backend", _BACKEND_ALIASES.get(self.sim_backend, self.sim_backend))
        super().__post_init__()
        if (self.camera_eye is None) != (self.camera_target is None):
            raise ConfigError("camera_eye and camera_target belong together: give both or none")

    @property
    def shows_images(self) -> bool:
        """Whether frames can be asked for."""
        return self.render_mode is not None or self.obs_mode != "state"
