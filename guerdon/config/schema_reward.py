"""The `reward` and `fit` sections: how a reward model is fitted, and what becomes of what it says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from guerdon.config.build import Checked
from guerdon.config.limits import (
    EncoderWidth,
    Fraction,
    ImageSize,
    LayerWidth,
    NetworkParts,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Region,
    check_encoder_name,
)
from guerdon.core.errors import ConfigError

GOAL_VIEW = "@goal"
"""`NAME@goal` is what the camera NAME shows around the goal."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Checked):
    """`reward.model`: the network that looks at a frame, and the checkpoint it comes from."""

    model_type: Literal["resnet_reward", "binary_classifier", "lerobot_classifier"] = "resnet_reward"
    """`ResNetRewardModel`, `BinaryRewardClassifier`, or the network of LeRobot's reward classifier."""
    arch: Literal["resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet10"
    """The encoder."""
    width: EncoderWidth = 16
    """Channels of the encoder's first stage: a small, fast model; published weights have 64."""
    encoder: str | None = None
    """`hf:PATH` takes a vision encoder in the Hugging Face layout, a folder or `OWNER/NAME` of the hub, in
    place of `arch` (extra `hf`); frozen unless `freeze_encoder` is false."""
    num_members: NetworkParts = 1
    """Classifier heads over one encoder; several also tell how much they disagree."""
    checkpoint_path: str | None = None
    """A checkpoint file or folder to load, also of LeRobot, or `hf:OWNER/NAME` of the hub; null for a new
    model."""
    image_keys: tuple[str, ...] = ("base_camera",)
    """The cameras that the model looks at."""
    image_size: ImageSize = (3, 128, 128)
    """[C, H, W]; frames of another size are resized inside the model."""
    num_frames: NetworkParts = 1
    """Latest frames of an episode that are scored together; with 2 the model can see what moves."""
    only_at_rest: bool = False
    """Look only where the robot stands still, which it knows by itself (info `is_robot_static`); a frame of a
    robot in motion is no success and is not rendered. For tasks whose success asks for rest."""
    crop: Region | Literal["goal"] | None = None
    """Look at this part of every camera's frame alone, before resizing: [top, left, height, width] as shares
    of the frame's height and width; null looks at all of it. `goal` is short for the cameras `NAME@goal`."""
    hidden_dim: LayerWidth = 256
    """Width of the classifier's hidden layer."""
    dropout: Fraction = 0.0
    """Dropout in the classifier."""
    num_spatial_blocks: NetworkParts = 8
    """Blocks of the learned spatial pooling of `binary_classifier` and `lerobot_classifier`."""
    latent_dim: LayerWidth = 256
    """What `lerobot_classifier` makes of each camera."""
    pretrained_encoder_path: str | None = None
    """Pretrained encoder weights; null starts from random weights."""
    use_pretrain: bool = True
    """Build the encoder in the layout that pretrained weights need."""
    freeze_encoder: bool | Literal["auto"] = "auto"
    """Keep the encoder fixed; `auto` freezes it only if pretrained weights were loaded."""
    normalize: bool = True
    """Normalise colours with ImageNet's mean and deviation."""
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    """Arithmetic used for scoring."""
    debug_save_dir: str | None = None
    """Write every scored frame there; the variable DEBUG_IMAGE_SAVE_DIR does the same."""

    def remember_given(self, keys: Iterable[str]) -> None:
        """Tell which settings were given: a given one must fit the checkpoint, a default need not."""
        object.__setattr__(self, "_given", frozenset(keys))

    @property
    def given(self) -> frozenset[str] | None:
        """The settings that `remember_given` recorded; None if it was not called."""
        return getattr(self, "_given", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only_at_rest and self.num_frames > 1:
            raise ConfigError(
                f"reward.model.only_at_rest judges single frames, but reward.model.num_frames is "
                f"{self.num_frames}: what came before is not rendered"
            )
        if self.encoder is not None:
            self._check_encoder(self.encoder)
        if self.crop == "goal":  # such frames are made, and stored, by cameras of their own
            keys = tuple(key if key.endswith(GOAL_VIEW) else key + GOAL_VIEW for key in self.image_keys)
            object.__setattr__(self, "image_keys", keys)
            object.__setattr__(self, "crop", None)

    def _check_encoder(self, name: str) -> None:
        check_encoder_name("reward.model.encoder", name, " (for a ResNet: arch)")
        if self.pretrained_encoder_path is not None:
            raise ConfigError("reward.model has both an encoder and a pretrained_encoder_path: give one")
        if self.image_size[0] != 3:
            raise ConfigError(
                f"reward.model.encoder takes colour images: image_size must be [3, H, W], not "
                f"{list(self.image_size)}"
            )

    @property
    def region(self) -> Region | None:
        """The part of a frame to look at; None: all of it."""
        return self.crop if isinstance(self.crop, tuple) else None


@dataclass(frozen=True, kw_only=True)
class DataCollectionConfig(Checked):
    """`reward.data_collection`: where `reward.collect_data` saves trajectories (`npy-trajectory`)."""

    positive_dir: str = "./reward_data/positive"
    """Trajectories with a success."""
    negative_dir: str = "./reward_data/negative"
    """Trajectories without one."""
    image_keys: tuple[str, ...] = ("base_camera",)
    """The cameras to keep."""
    max_positive_trajectories: NonNegativeInt | None = 500
    """Save at most so many; null for no limit."""
    max_negative_trajectories: NonNegativeInt | None = 500
    """Save at most so many; null for no limit."""


@dataclass(frozen=True, kw_only=True)
class CombineConfig(Checked):
    """How a learned reward and the environment's become what the learner trains on."""

    reward_mode: Literal["per_step", "terminal"] = "per_step"
    """Reward every step, or the last one of an episode alone (the learned reward of others is then zero)."""
    combine_mode: Literal["replace", "add", "weighted"] = "replace"
    """learned · env + learned · env_reward_weight * env + reward_weight * learned."""
    reward_weight: float = 1.0
    """Weight of the learned reward in `weighted`."""
    reward_weight_end: float | None = None
    """What that weight changes to, in a straight line; null: it stays."""
    reward_weight_steps: PositiveInt = 100_000
    """Environment steps over which it changes."""
    env_reward_weight: float = 0.0
    """Weight of the env reward in `weighted`."""
    normalize: bool = False
    """Divide learned rewards by their running deviation, which is saved with the policy."""
    control: Literal["none", "off", "shuffled", "env"] = "none"
    """Run as a control (`guerdon prove`): every learned reward zero; permuted among the steps of a batch; or
    the environment's own success (for a model of the zoo its reward) in place of what the model says."""

    @property
    def looks_at_frames(self) -> bool:
        """Whether rewards depend on what an image model says; else nothing is rendered for it."""
        return self.control in ("none", "shuffled")

    def weight_at(self, env_steps: int) -> float:
        """Weight of the learned reward after so many environment steps."""
        if self.reward_weight_end is None:
            return self.reward_weight
        share = min(env_steps / self.reward_weight_steps, 1.0)
        return self.reward_weight + share * (self.reward_weight_end - self.reward_weight)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(CombineConfig):
    """`reward`: whether a learned reward is used, and what becomes of its probability.

    `binary` maps a probability above the threshold to `success_reward` and any other to `fail_reward`;
    `continuous` is the probability itself. Mapping comes first, combination with the env reward second.
    """

    use_reward_model: bool = False
    """Train the policy on the learned reward."""
    collect_data: bool = False
    """Save labelled trajectories while the policy trains; see `data_collection`."""
    group_name: str = "RewardGroup"
    """Name of the reward workers' group."""
    reward_type: Literal["binary", "continuous"] = "binary"
    """Reward from the thresholded decision or from the probability."""
    success_reward: float = 1.0
    """Learned reward of a frame that counts as a success."""
    fail_reward: float = 0.0
    """Learned reward of any other scored frame."""
    reward_threshold: Fraction | Literal["calibrated"] = "calibrated"
    """Probability above which a frame counts as success; `calibrated` takes the checkpoint's own."""
    relabel_at: Literal["insertion", "sampling"] = "insertion"
    """Off-policy: judge a frame once when it is stored, or each time it is drawn (keeps the frames)."""
    cache_verdicts: bool = False
    """Where nothing has moved since the last verdict, take that one again instead of judging (`per_step`)."""
    cache_tolerance: NonNegativeFloat = 1e-4
    """Largest change of an entry of the environment's state that counts as no motion, such as 0.1 mm."""
    refit_interval: NonNegativeInt = 0
    """Environment steps between refits of the model with the policy's false fires, labelled by the simulator;
    0 keeps the model as it is. `fit` says what is refitted and how."""
    refit_epochs: PositiveInt = 4
    """Passes over the data of the first fit in a refit."""
    refit_frames: PositiveInt = 4096
    """Frames of the policy that are kept for refits, the latest of them."""
    timeout_seconds: PositiveFloat = 60.0
    """With `engine: ray`, a reward worker that gives no answer for so long is replaced; else one waits on."""
    standalone: bool = False
    """The model's success ends the episode (robots)."""
    text: dict[str, Any] = field(default_factory=dict)
    """Rules for text tasks; checked by `guerdon.rewards.text.rules`."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    data_collection: DataCollectionConfig = field(default_factory=DataCollectionConfig)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Checked):
    """`fit.optim`."""

    optimizer: Literal["adam", "adamw"] = "adamw"
    """The optimiser."""
    lr: NonNegativeFloat = 2e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 1e-2
    """Weight decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 clips nothing."""


@dataclass(frozen=True, kw_only=True)
class LRScheduleConfig(Checked):
    """`fit.lr_sched`: the learning rate over time."""

    name: Literal["constant", "cosine", "step"] = "cosine"
    """The course after the warm-up."""
    warmup_steps: NonNegativeInt = 50
    """Steps of linear rise from zero."""
    min_lr: NonNegativeFloat = 0.0
    """Where `cosine` ends."""
    step_size: PositiveInt = 1000
    """`step` multiplies the rate by `gamma` every so many steps."""
    gamma: Fraction = 0.1
    """See `step_size`."""


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig(Checked):
    """`fit.early_stop`."""

    patience: PositiveInt | None = None
    """Stop after so many validations without improvement; null never stops early."""
    min_delta: NonNegativeFloat = 0.0
    """A smaller gain is no improvement."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Checked):
    """`fit.augment`: random changes of training frames; all zero means none."""

    shift_pixels: NonNegativeInt = 4
    """Shift by up to so many pixels."""
    crop_fraction: Fraction = 0.0
    """Cut away up to this share of each side."""
    color: Fraction = 0.3
    """Strength of brightness, contrast and saturation changes."""
    blur: Fraction = 0.0
    """Share of frames that are blurred."""
    num_views: PositiveInt = 4
    """Augmented views of a frame that are encoded once when the encoder is frozen."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig(Checked):
    """`fit.calibration`: what the threshold of the fitted model promises."""

    target_false_positive_rate: Fraction = 0.01
    """Share of failure frames that may be taken for success."""
    confidence: Fraction = 0.95
    """Of the interval around it, resampled by episode."""


@dataclass(frozen=True, kw_only=True)
class FitDataConfig(Checked):
    """`fit.data`: the labelled frames. Either `path`, or `positive_dir` and `negative_dir`."""

    path: str | None = None
    """A data set in any format that `guerdon data inspect` knows."""
    positive_dir: str | None = None
    """Trajectories with a success (`npy-trajectory`)."""
    negative_dir: str | None = None
    """Trajectories without one."""
    image_keys: tuple[str, ...] | None = None
    """Cameras to read; null means `reward.model.image_keys`."""
    num_workers: NonNegativeInt = 0
    """RLinf's loader processes; without effect, as frames are mapped and a batch is one gather."""
    num_samples_per_episode: NonNegativeInt = 0
    """Frames drawn from each episode; 0 takes all."""
    fail_success_ratio: NonNegativeFloat | None = None
    """At most so many failure frames per success frame; null keeps all."""
    val_fraction: Fraction = 0.2
    """Share of the episodes held out for validation."""
    debug_save_dir: str | None = None
    """Write training frames there as pictures."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Checked):
    """`fit.distributed`: several processes that share every global batch."""

    num_processes: PositiveInt = 1
    """Processes to start on this machine; under `torchrun` or Ray those that they start count."""
    communication: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: NCCL between GPUs, gloo otherwise."""
    timeout_seconds: PositiveFloat = 1800.0
    """A process that keeps the others waiting for longer ends the fit; one that dies ends it at once."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(Checked):
    """`fit`: stage 2, from labelled episodes to a reward model. Intervals are optimiser steps."""

    enabled: bool = False
    """A key of RLinf's workflow. `guerdon train-reward` fits whatever it says; `guerdon train` only reports
    that it does not fit."""
    only: bool = False
    """Fit and end, without touching the environment."""
    backend: Literal["auto", "simple", "ddp", "fsdp"] = "auto"
    """One process (`simple`), or several with a copy of the model (`ddp`) or a shard of it (`fsdp`) each;
    `auto`: `simple` for one, `fsdp` for several."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to fit; `auto`: on a GPU where there is one."""
    gpu_id: NonNegativeInt = 0
    """The GPU to use where there is one."""
    epochs: PositiveInt = 12
    """Passes over the training frames."""
    global_batch_size: PositiveInt = 64
    """Frames per optimiser step."""
    micro_batch_size: PositiveInt | None = None
    """Frames per forward pass of a process; null means its whole share of the global batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass while fitting; weights, gradients and their sums stay fp32."""
    log_interval: PositiveInt = 100
    """Steps between log lines."""
    save_interval: PositiveInt = 1000
    """Steps between checkpoints."""
    val_check_interval: PositiveInt | None = None
    """Steps between validations; null validates after every epoch."""
    best_by: Literal["val_auc", "val_accuracy", "val_loss", "train_accuracy"] = "val_auc"
    """What chooses the best model."""
    save_dir: str | None = None
    """Folder of the checkpoints; null means `checkpoints/` in the run's folder."""
    export_path: str | None = None
    """Also save the best model as this `.pt` file, where RLinf's commands look for it."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    lr_sched: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    data: FitDataConfig = field(default_factory=FitDataConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
