"""Every setting and its default: one dataclass tree, and the only list of them.

A field's comment stands under it. YAML files state differences from these defaults and nothing else.
A component receives its own section, never the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from guerdon.config.build import Checked
from guerdon.config.limits import NameOrPlugin, NonNegativeFloat, NonNegativeInt, PositiveInt
from guerdon.config.schema_learn import LearnerConfig
from guerdon.config.schema_monitor import MonitorConfig
from guerdon.config.schema_reward import FitConfig, RewardConfig

TaskType: TypeAlias = Literal["embodied", "text"]
TrackerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class LoggerConfig(Checked):
    """`runner.logger`."""

    log_path: str | None = None
    """The run's folder; null makes `<output_dir>/<experiment_name>/<timestamp>`."""
    backends: tuple[TrackerName, ...] = ("tensorboard",)
    """Trackers that show the run: they get its config, metrics, pictures of alarms, films and report."""
    project_name: str = "guerdon"
    """Project (MLflow: experiment) of the run at the trackers."""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig(Checked):
    """`runner`: the run as a whole."""

    task_type: TaskType = "embodied"
    """Success is seen in images, or decided by rules on text."""
    output_dir: str = "runs"
    """Where runs are kept."""
    experiment_name: str = "default"
    """Folder of this experiment's runs."""
    resume_dir: str | None = None
    """A run's folder or checkpoint to continue from."""
    num_data_episodes: PositiveInt | None = None
    """Episodes to record on a robot; null leaves it to `collect`'s targets."""
    video_format: Literal["gif", "mp4"] = "gif"
    """Of the films that a run ends with; `mp4` is smaller and needs `pip install 'guerdon[video]'`."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Checked):
    """An entry of `cluster.component_placement` that names a node group."""

    node_group: str | int | None = None
    """Label of the node group; null means the whole cluster."""
    placement: str | int = "all"
    """Devices of that group: `all`, `0`, `0-3`."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Checked):
    """`cluster.node_groups[].hardware`."""

    type: str
    """Kind of hardware, such as `Franka`."""
    configs: tuple[dict[str, Any], ...] = ()
    """One entry per device, such as `robot_ip`; checked by the device's driver."""


@dataclass(frozen=True, kw_only=True)
class NodeGroupConfig(Checked):
    """An entry of `cluster.node_groups`."""

    label: str | int | None = None
    """Name of the group in `component_placement`."""
    node_ranks: str | int | None = None
    """Nodes of the group: `0`, `0-3`; null means all."""
    hardware: HardwareConfig | None = None
    """Devices attached to these nodes."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Checked):
    """`cluster`: machines, and which part runs where (`engine: ray`)."""

    address: str | None = None
    """A Ray cluster to join, `auto` for the one on this machine; null: one of our own, on loopback alone."""
    num_nodes: PositiveInt = 1
    """Machines to use; the cluster must have so many."""
    component_placement: dict[str, str | int | PlacementConfig] = field(default_factory=dict)
    """Component (`actor`, `env`, `rollout`, `reward`) to devices: `all`, `0-0`, `0-3`; a worker on each."""
    node_groups: tuple[NodeGroupConfig, ...] = ()
    """Machines that differ from the others."""


@dataclass(frozen=True, kw_only=True)
class AsynchronousConfig(Checked):
    """`asynchronous`: acting, scoring and learning at the same time (SAC, TD3 and DQN)."""

    enabled: bool = False
    """Let env workers, reward workers and the learner go at their own pace."""
    steps_per_request: PositiveInt = 32
    """Steps that every environment of a worker takes for one request, at most: fewer where `max_policy_lag`
    would otherwise make the learner wait."""
    max_in_flight: PositiveInt = 2
    """Requests that an env worker has at a time, from asking for steps to storing them."""
    max_policy_lag: NonNegativeInt = 256
    """Updates between the weights that acted and those that learn when the steps are stored, at most."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig(Checked):
    """`env.train` and `env.eval`: one set of parallel environments."""

    env_type: Annotated[str, NameOrPlugin(("gymnasium", "maniskill", "robot"), "guerdon.envs")] = "gymnasium"
    """Who makes the environment: Gymnasium's registry, the ManiSkill simulator (extra `maniskill`), a robot
    arm, whose settings stand in `override_cfg`, or a plugin of the entry-point group `guerdon.envs`."""
    id: str = "guerdon/Tabletop-v0"
    """Gymnasium id, `module:id` imports the module that registers it; or the name of a ManiSkill task."""
    num_envs: PositiveInt = 1
    """Environments in parallel."""
    max_episode_steps: PositiveInt | None = None
    """Truncate episodes after so many steps; null keeps the environment's own limit."""
    success_key: str | None = None
    """Entry of the info that tells success; null looks for `success` and `is_success`."""
    label_fn: str | None = None
    """`module:function` that tells success of a single environment: (obs, info) -> bool."""
    reward_render_mode: Literal["always", "on_demand"] = "always"
    """Show the reward model or the collector every frame, or only the final one of each episode."""
    init_params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor; checked by the environment."""
    override_cfg: dict[str, Any] = field(default_factory=dict)
    """Settings of a robot environment (`guerdon/config/schema_robot.py`); checked by the environment."""
    operator: Literal["none", "keyboard", "spacemouse", "scripted"] = "none"
    """Who may take over on a robot; `scripted` is for simulated ones."""
    operator_params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the scripted operator."""


@dataclass(frozen=True, kw_only=True)
class EnvsConfig(Checked):
    """`env`: environments to learn in, and separate ones to measure in."""

    train: EnvConfig = field(default_factory=EnvConfig)
    eval: EnvConfig = field(default_factory=EnvConfig)


@dataclass(frozen=True, kw_only=True)
class CollectConfig(Checked):
    """`collect`: stage 1, run a policy and keep labelled episodes."""

    enabled: bool = False
    """Collect within `guerdon train`; `guerdon collect` always does."""
    save_dir: str = "runs/collect/data"
    """Where episodes are kept; what is there already stays."""
    format: str = "native"
    """How they are written: any writable format of `guerdon.data.formats`."""
    policy: Literal["random", "scripted", "motion_planner", "checkpoint"] = "random"
    """Who acts; `scripted` needs an environment that brings an expert, `motion_planner` a ManiSkill task."""
    policy_checkpoint: str | None = None
    """The saved policy for `policy: checkpoint`."""
    policy_noise: NonNegativeFloat = 0.3
    """Deviation of the noise added to the actions, as a share of their range."""
    target_success: NonNegativeInt = 50
    """Stop once so many successful episodes are saved ..."""
    target_failure: NonNegativeInt = 50
    """... and so many failed ones."""
    max_episodes: PositiveInt | None = None
    """Give up after so many episodes; null: after 50 times as many as the targets ask for."""
    cameras: tuple[str, ...] = ("base_camera",)
    """The cameras to keep."""
    keep_states: bool = True
    """Keep state vectors beside the frames."""
    only_at_rest: bool = False
    """Render only where the robot stands still, and repeat that picture while it moves: rendering costs most,
    and a reward model with `only_at_rest` never looks at the others."""
    resume: bool = False
    """Count the episodes that are in `save_dir` already towards the targets."""


@dataclass(frozen=True, kw_only=True)
class GuerdonConfig(Checked):
    """The whole tree, as `config.yaml` in a run's folder shows it."""

    seed: NonNegativeInt = 0
    """Seeds environments, policies, splits and training."""
    engine: Literal["local", "ray"] = "local"
    """Everything in this process, or workers as Ray actors."""
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    env: EnvsConfig = field(default_factory=EnvsConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: dict[str, Any] = field(default_factory=dict)
    """A reward model of the zoo that learns beside the policy: `type`, its settings, `weight` of its rewards,
    `cooptrain`. Empty: there is none."""
    fit: FitConfig = field(default_factory=FitConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
