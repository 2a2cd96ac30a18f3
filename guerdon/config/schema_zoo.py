"""The settings of the serial pipelines: a reward model of the zoo, a learner, and small environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from guerdon.config.build import Checked
from guerdon.config.limits import NonNegativeInt, PositiveInt
from guerdon.config.schema import EnvsConfig, TrackerName
from guerdon.config.schema_learn import LearnerConfig
from guerdon.config.schema_reward import CombineConfig


@dataclass(frozen=True, kw_only=True)
class MixConfig(CombineConfig):
    """`mix`: how the learned reward and the environment's become what the learner trains on."""


@dataclass(frozen=True, kw_only=True)
class SerialConfig(Checked):
    """A run of a serial pipeline."""

    exp_name: str = "zoo"
    """Folder of this experiment's runs, below `output_dir`."""
    output_dir: str | None = "runs"
    """Where runs are kept, each in `<exp_name>/<timestamp>`; null writes nothing."""
    resume_dir: str | None = None
    """A run's folder or checkpoint to continue from."""
    backends: tuple[TrackerName, ...] = ("tensorboard",)
    """Trackers that show the run, as in `runner.logger.backends`."""
    project_name: str = "guerdon"
    """Project (MLflow: experiment) of the run at the trackers."""
    seed: NonNegativeInt = 0
    """Of everything that is drawn."""
    env: EnvsConfig = field(default_factory=EnvsConfig)
    stop_value: float | None = None
    """Training ends when the mean return of an evaluation reaches it."""
    reward_model: dict[str, Any] = field(default_factory=dict)
    """`type`, and the settings of that model; checked by the model."""
    pretrain_reward: bool = False
    """Train the reward model before the policy's first update."""
    cooptrain_reward: bool = True
    """Train it while the policy trains."""
    mix: MixConfig = field(default_factory=MixConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    steps_per_collect: PositiveInt = 128
    """Off-policy: environment steps, all environments together, between two rounds of updates."""
