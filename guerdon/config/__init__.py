"""Settings: one dataclass tree, composed by Hydra from YAML and overrides, checked before anything runs."""

from guerdon.config.build import build, flatten_keys, to_plain
from guerdon.config.load import load_config, load_tree
from guerdon.config.schema import (
    AsynchronousConfig,
    ClusterConfig,
    CollectConfig,
    EnvConfig,
    EnvsConfig,
    GuerdonConfig,
    HardwareConfig,
    LoggerConfig,
    NodeGroupConfig,
    PlacementConfig,
    RunnerConfig,
)
from guerdon.config.schema_fit import (
    AugmentConfig,
    CalibrationConfig,
    DistributedConfig,
    EarlyStopConfig,
    FitConfig,
    FitDataConfig,
    LRScheduleConfig,
    OptimConfig,
)
from guerdon.config.schema_learn import (
    BCConfig,
    DQNConfig,
    LearnerConfig,
    NetworkConfig,
    OffPolicyConfig,
    PPOConfig,
    PriorConfig,
    SACConfig,
    TD3Config,
)
from guerdon.config.schema_monitor import MonitorConfig
from guerdon.config.schema_reward import DataCollectionConfig, RewardConfig, RewardModelConfig
from guerdon.core.errors import ConfigError

__all__ = [
    "AsynchronousConfig",
    "AugmentConfig",
    "BCConfig",
    "CalibrationConfig",
    "ClusterConfig",
    "CollectConfig",
    "ConfigError",
    "DQNConfig",
    "DataCollectionConfig",
    "DistributedConfig",
    "EarlyStopConfig",
    "EnvConfig",
    "EnvsConfig",
    "FitConfig",
    "FitDataConfig",
    "GuerdonConfig",
    "HardwareConfig",
    "LRScheduleConfig",
    "LearnerConfig",
    "LoggerConfig",
    "MonitorConfig",
    "NetworkConfig",
    "NodeGroupConfig",
    "OffPolicyConfig",
    "OptimConfig",
    "PPOConfig",
    "PlacementConfig",
    "PriorConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RunnerConfig",
    "SACConfig",
    "TD3Config",
    "build",
    "flatten_keys",
    "load_config",
    "load_tree",
    "to_plain",
]
