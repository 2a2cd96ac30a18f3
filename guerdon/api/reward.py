"""`fit_reward`, `load_reward` and `Reward`: image success classifiers as rewards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.api.data import Dataset, data_path
from guerdon.api.settings import Keywords, check_path, check_seed, shown
from guerdon.config import GuerdonConfig, RewardConfig, RewardModelConfig, load_config
from guerdon.config.build import check_field
from guerdon.core.atomic import make_directory
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import stack_episode, to_numpy, to_uint8_hwc
from guerdon.core.notebook import html_table
from guerdon.core.types import FloatArray, UInt8Array
from guerdon.fit import FitResult, fit_reward_model
from guerdon.fit.recalibrate import recalibrate
from guerdon.fit.score import predict
from guerdon.monitoring.model_card import evidence_on
from guerdon.rewards.image import save_checkpoint
from guerdon.rewards.image.model_card import Evidence
from guerdon.rewards.image.scorer import RewardManager
from guerdon.rewards.image.shared_model import push_shared, save_shared, shared_folder
from guerdon.rewards.relabel import map_rewards
from guerdon.training.folders import held, new_run_folder

if TYPE_CHECKING:
    from guerdon.api.card import Card

REWARD_WITHOUT = ("use_reward_model", "collect_data", "group_name", "text", "reward_threshold")
"""Fields of the `reward` section that are no keywords: arguments stand for them, or they have no effect."""
_LOAD = Keywords("load_reward", RewardConfig, [()], without=REWARD_WITHOUT)
_FIT = Keywords(
    "fit_reward",
    GuerdonConfig,
    [
        ("reward", "model"),
        *(("fit", *name) for name in [(), ("optim",), ("data",), ("augment",), ("calibration",)]),
        ("fit", "early_stop"),
        ("fit", "lr_sched"),
    ],
    {
        "cameras": "reward.model.image_keys",
        "batch_size": "fit.global_batch_size",
        "learning_rate": "fit.optim.lr",
        "lr_schedule": "fit.lr_sched.name",
        "target_fpr": "fit.calibration.target_false_positive_rate",
        "num_processes": "fit.distributed.num_processes",
        "fit_precision": "fit.precision",
    },
    without=(
        *("checkpoint_path", "debug_save_dir", "enabled", "only", "name", "gpu_id", "device"),
        *("path", "positive_dir", "negative_dir", "save_dir", "num_workers"),
    ),
)


class Reward(RewardManager):
    """A fitted image success classifier with its calibration and threshold.

    Made by `load_reward` and `fit_reward`; `wrap` and the agents take it.

    Attributes:
        threshold: a probability above it counts as success.
        contract: what the model expects of frames, and what calibration promised.
        image_keys: the cameras that it looks at.
        fit_result: what the fit that made it ended with; None if it was loaded.

    Examples:
        >>> reward = gd.load_reward("runs/x/best_model")
        >>> reward.predict(frames)  # uint8 [N, H, W, C] -> probabilities, float32 [N]
        >>> reward(frames)  # rewards, float32 [N]
    """

    fit_result: FitResult | None = None

    def predict(self, frames: Any, *, episode: bool = False, progress: bool = True) -> FloatArray:
        """Calibrated probabilities of success.

        Args:
            frames: images [N, H, W, C] or one image [H, W, C]; channels may come first. uint8, or float in
                [0, 1] or [0, 255]; numpy or torch. With several cameras a dict, camera -> images. A model
                that scores k frames together takes stacks [N, k, H, W, C]. Or the path of a picture, a
                folder of pictures, a video or a data set.
            episode: the images are the steps of one episode in order; stacks of k frames are made of them.
            progress: whether to show a progress bar, with a path.

        Returns:
            float32 [N].

        Examples:
            >>> probabilities = reward.predict(np.zeros((8, 64, 64, 3), np.uint8))
        """
        with _about_frames(), shown(progress):
            if isinstance(frames, str | os.PathLike):
                return predict(self, frames)
            return self.score(self._frames(frames, episode)).prob_success

    def __call__(self, frames: Any, *, episode: bool = False) -> FloatArray:
        """Rewards of frames, float32 [N]: by the threshold (`binary`) or the probability (`continuous`)."""
        return map_rewards(self.predict(frames, episode=episode), self.cfg, self.threshold)

    def _frames(self, given: Any, episode: bool) -> dict[str, UInt8Array]:
        """Camera -> uint8 [N, H, W, C], or [N, k, H, W, C]."""
        cameras, count = self.image_keys, self.contract.num_frames
        if not isinstance(given, Mapping):
            if len(cameras) > 1:
                raise DataError(f"this model looks at several cameras: give a dict with {list(cameras)}")
            given = {cameras[0]: given}
        missing = [camera for camera in cameras if camera not in given]
        if missing:
            raise DataError(f"there is no camera {missing[0]!r}, only {sorted(map(str, given))}")
        found = {}
        for camera in cameras:
            array = to_numpy(given[camera])
            where = "the image array" if len(cameras) == 1 else f"camera {camera!r}"
            if array.ndim >= 4 and len(array) == 0:
                array = np.zeros((0, *self.contract.frame_sizes.get(camera, (1, 1, 3))), np.uint8)
            else:
                array = to_uint8_hwc(array, name=where)
            images = array[None] if array.ndim == 3 else array
            if count > 1 and images.ndim == 4:
                if not episode:
                    raise DataError(
                        f"this model scores {count} frames together: give stacks [N, {count}, H, W, C], or "
                        "the steps of one episode with episode=True"
                    )
                images = stack_episode(images, count)
            found[camera] = images
        lengths = {camera: len(images) for camera, images in found.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the cameras have different numbers of images: {lengths}")
        return found

    def card(self, data: Dataset | str | os.PathLike[str], *, progress: bool = True) -> Card:
        """The reward card on a data set that the model was not fitted to: can it be trusted, and for what?

        Args:
            data: labelled episodes, a `Dataset` or a path in any format.
            progress: whether to show a progress bar.

        Example:
            >>> reward.card("fresh").save("card.html")
        """
        from guerdon.api.card import make_card

        return make_card(self, data, progress=progress)

    def recalibrate(
        self,
        data: Dataset | str | os.PathLike[str],
        *,
        fpr: float | None = None,
        threshold: float | None = None,
        out: str | os.PathLike[str] | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> Reward:
        """Another calibration and threshold without a refit; `guerdon reward recalibrate`.

        Args:
            data: labelled episodes that the model was not fitted to.
            fpr: at most this share of the failure frames may count as success; None: as at the last time.
            threshold: this threshold instead.
            out: write the checkpoint here; None changes the one that was loaded.
            seed: of folds and resamples.
            progress: whether to show a progress bar.

        Returns:
            The model with the new threshold.
        """
        path, seed = data_path(data), check_seed(seed)
        place, target = str(self.cfg.model.checkpoint_path), None if out is None else Path(out)
        with shown(progress):
            done = recalibrate(place, path, fpr=fpr, threshold=threshold, out=target, seed=seed)
        model = replace(self.cfg.model, checkpoint_path=str(done.checkpoint))
        cfg = replace(self.cfg, model=model, reward_threshold="calibrated")
        return Reward(cfg, device=self._device)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save model, calibration and threshold: a folder, or RLinf's file if the name ends in `.pt`.

        The threshold is that of the calibration. `load_reward` reads it again.
        """
        return save_checkpoint(check_path("path", path), self.model, self.contract)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        data: Dataset | str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> Path:
        """Write a folder to share: weights, `config.json`, contract and a model card, `README.md`.

        `from_pretrained` and `load_reward` read it again, to the bit. The threshold is that of the
        calibration. The weights of an `hf:` encoder are in it.

        Args:
            folder: made if there is none.
            data: labelled episodes that the model was not fitted to; the model card then has the verdict,
                numbers and curves of the reward card. None: it says that nothing was assessed.
            progress: whether to show a progress bar.

        Examples:
            >>> reward.save_pretrained("my-reward", data="fresh")
        """
        place = check_path("folder", folder)
        return save_shared(place, self.model, self.contract, self._evidence(data, progress))

    def push_to_hub(
        self,
        name: str,
        *,
        data: Dataset | str | os.PathLike[str] | None = None,
        private: bool = False,
        token: str | None = None,
        progress: bool = True,
    ) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face hub (extra `hf`).

        Args:
            name: `OWNER/NAME`; the repository is made if there is none.
            data: see `save_pretrained`.
            private: whether a new repository is private.
            token: of an account that may write there; None: the one that `hf auth login` stored.
            progress: whether to show a progress bar.

        Returns:
            The address of the repository.
        """
        evidence = self._evidence(data, progress)
        return push_shared(name, self.model, self.contract, evidence, private=private, token=token)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **settings: Any) -> Reward:
        """Load a model from a folder or from the Hugging Face hub.

        Args:
            name: a folder that `save_pretrained` wrote, or `OWNER/NAME` or `OWNER/NAME@REVISION` of the hub.
            **settings: those of `load_reward`.

        Examples:
            >>> reward = gd.Reward.from_pretrained("my-reward", reward_type="continuous")
        """
        check_path("name", name, "a folder or OWNER/NAME")
        return load_reward(shared_folder(name), **settings)

    def _evidence(self, data: Dataset | str | os.PathLike[str] | None, progress: bool) -> Evidence | None:
        if data is None:
            return None
        with shown(progress):
            return evidence_on(self, data_path(data))

    @property
    def metrics(self) -> Mapping[str, float]:
        """On the held-out episodes of its fit, at the calibrated threshold; empty where they are unknown."""
        return dict(self.contract.metrics or {})

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}={value}" for name, value in self._facts().items())
        return f"Reward({rows})"

    def _repr_html_(self) -> str:
        return html_table("Reward", self._facts())

    def _facts(self) -> dict[str, str]:
        config = self.model.config
        known = {
            "model": f"{config.model_type} {config.encoder or f'{config.arch}/{config.width}'}",
            "cameras": ", ".join(self.image_keys),
            "threshold": f"{self.threshold:.4g}",
            "reward": self.cfg.reward_type,
        }
        if "auc" in self.metrics:
            known["auc"] = f"{self.metrics['auc']:.4f}"
        return {**known, "source": self.source}


@contextmanager
def _about_frames() -> Iterator[None]:
    """Let an error about images speak of the argument `frames`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"frames: {error}") from error


def load_reward(
    path: str | os.PathLike[str],
    *,
    threshold: float | None = None,
    device: str | None = None,
    precision: str | None = None,
    **settings: Any,
) -> Reward:
    """Load a reward model that was fitted before.

    Args:
        path: a checkpoint: a folder such as `runs/x/checkpoints/best_model`, a run's folder, a `.pt` file,
            `hf:OWNER/NAME` of the Hugging Face hub, or a folder of LeRobot's reward classifier.
        threshold: a probability above it counts as success; None: as calibrated.
        device: `cpu`, `cuda`, `cuda:1`; None: a GPU where there is one.
        precision: `fp32`, `bf16` or `int8`; None: as the checkpoint says.
        **settings: fields of the `reward` section, such as `reward_type="continuous"`, `reward_mode`,
            `success_reward`, `combine_mode`.

    Examples:
        >>> reward = gd.load_reward("runs/x/checkpoints/best_model", threshold=0.8)
    """
    check_path("path", path, "the path of a checkpoint")
    model: dict[str, Any] = {"checkpoint_path": os.fspath(path)}
    if precision is not None:
        model["precision"] = check_field(RewardModelConfig, "precision", precision, "precision")
    section = _LOAD.apply(RewardConfig(), settings, ("threshold", "device", "precision"))
    if threshold is not None:
        checked = check_field(RewardConfig, "reward_threshold", threshold, "threshold")
        section = replace(section, reward_threshold=checked)
    section = replace(section, use_reward_model=True, model=RewardModelConfig(**model))
    return Reward(section, device="auto" if device is None else device)


def fit_reward(
    data: Dataset | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: bool = True,
    tensorboard: bool = False,
    **settings: Any,
) -> Reward:
    """Fit, validate and calibrate an image success classifier; what `guerdon train-reward` does.

    Args:
        data: labelled episodes, a `Dataset` or a path in any format.
        out: the run's folder, with metrics and `checkpoints/best_model`; None makes
            `runs/fit_reward/<time>`.
        seed: decides split, weights, order and augmentation.
        device: `cpu`, `cuda`, `cuda:1`; None: a GPU where there is one.
        progress: whether to show a progress bar.
        tensorboard: whether to log for TensorBoard, too.
        **settings: fields of the sections `reward.model` and `fit`, such as `arch="resnet10"`, `epochs=6`,
            `batch_size=64`, `learning_rate=2e-3`, `image_size=(3, 64, 64)`, `cameras=("base_camera",)`,
            `num_frames=2`, `val_fraction=0.2`, `target_fpr=0.01`, `patience=5`.

    Returns:
        The best model; `.metrics` are those on held-out episodes.

    Examples:
        >>> reward = gd.fit_reward("data", arch="resnet10", epochs=6)
        >>> reward.metrics["auc"]
    """
    path = os.fspath(data_path(data))
    own = ("out", "seed", "device", "progress", "tensorboard")
    config = _FIT.apply(load_config("train_reward"), settings, own)
    fit = replace(config.fit, **_fit_device(device), data=replace(config.fit.data, path=path))
    folder = new_run_folder(Path("runs") / "fit_reward") if out is None else check_path("out", out)
    seed = check_seed(seed)
    with held(make_directory(folder)), shown(progress):
        result = fit_reward_model(config.reward.model, fit, folder=folder, seed=seed, tensorboard=tensorboard)
    reward = load_reward(result.checkpoint, device=device)
    reward.fit_result = result
    return reward


def _fit_device(device: str | None) -> dict[str, Any]:
    """The settings of the `fit` section for a device."""
    kind, _, number = "auto:".partition(":") if device is None else resolve_device(device).partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}")
    return {"device": kind, **({"gpu_id": int(number)} if number else {})}
