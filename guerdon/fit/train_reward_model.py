"""`python -m guerdon.fit.train_reward_model`: fit a classifier from flags alone, as RLinf's script does.

Writes one `.pt` file with `epoch`, `model_state_dict`, `optimizer_state_dict`, `train_loss` and `train_acc`,
the best by training accuracy, and in it the contract of the model: its calibrated threshold among the rest.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from guerdon.config import (
    AugmentConfig,
    FitConfig,
    FitDataConfig,
    LRScheduleConfig,
    OptimConfig,
    RewardModelConfig,
)
from guerdon.core.atomic import make_directory
from guerdon.core.errors import GuerdonError
from guerdon.core.types import display_path
from guerdon.data.datasets.frames import RewardDataset
from guerdon.data.datasets.pictures import save_positive_pictures
from guerdon.fit.fit import fit_reward_model, open_data

log = logging.getLogger("guerdon")


def parser() -> argparse.ArgumentParser:
    """The flags and defaults of RLinf's script."""
    flags = argparse.ArgumentParser(prog="python -m guerdon.fit.train_reward_model", description=__doc__)
    flags.add_argument("--positive-dir", required=True, help="directory of positive .npy trajectories")
    flags.add_argument("--negative-dir", required=True, help="directory of negative .npy trajectories")
    flags.add_argument("--output-checkpoint", required=True, type=Path, help="the .pt file to write")
    flags.add_argument("--pretrained-encoder-path", default=None, help="pretrained ResNet10 weights")
    flags.add_argument("--backbone", default="resnet10", choices=["resnet10"], help="the encoder")
    flags.add_argument("--image-key", default="base_camera", help="the camera to use")
    flags.add_argument("--image-size", type=int, nargs=3, default=[3, 64, 64], metavar=("C", "H", "W"))
    flags.add_argument("--batch-size", type=int, default=32)
    flags.add_argument("--epochs", type=int, default=100)
    flags.add_argument("--lr", type=float, default=1e-4)
    flags.add_argument("--hidden-dim", type=int, default=256)
    flags.add_argument("--num-spatial-blocks", type=int, default=8)
    flags.add_argument(
        "--visualize-positive", action="store_true", help="save all positive frames as pictures"
    )
    flags.add_argument("--vis-output-dir", type=Path, default=Path("positive_samples_vis"))
    flags.add_argument("--seed", type=int, default=0)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Fit and save; returns the exit code."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
    try:
        _run(arguments)
    except GuerdonError as error:
        print(f"train_reward_model: error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output_checkpoint
    channels, height, width = arguments.image_size
    model = RewardModelConfig(
        model_type="binary_classifier",
        arch=arguments.backbone,
        width=64,
        image_keys=(arguments.image_key,),
        image_size=(channels, height, width),
        hidden_dim=arguments.hidden_dim,
        num_spatial_blocks=arguments.num_spatial_blocks,
        pretrained_encoder_path=arguments.pretrained_encoder_path,
    )
    fit = FitConfig(
        epochs=arguments.epochs,
        global_batch_size=arguments.batch_size,
        best_by="train_accuracy",
        optim=OptimConfig(optimizer="adam", lr=arguments.lr, weight_decay=0.0),
        lr_sched=LRScheduleConfig(name="constant", warmup_steps=0),
        augment=AugmentConfig(shift_pixels=0, color=0.0),
        export_path=str(output),
        data=FitDataConfig(positive_dir=arguments.positive_dir, negative_dir=arguments.negative_dir),
    )
    make_directory(output.parent)
    work = Path(tempfile.mkdtemp(prefix=f".{output.stem}-", dir=output.parent))
    try:
        if arguments.visualize_positive:
            store, _ = open_data(model, fit, work)
            dataset = RewardDataset(store, cameras=model.image_keys)
            count = save_positive_pictures(dataset, arguments.vis_output_dir)
            log.info("%d positive frames -> %s", count, display_path(arguments.vis_output_dir))
        result = fit_reward_model(model, fit, folder=work, seed=arguments.seed)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    numbers = result.train_accuracy, result.metrics["auc"], result.threshold.threshold
    log.info("train_acc %.4f, val AUC %.4f, threshold %.3f -> %s", *numbers, display_path(output))


if __name__ == "__main__":
    sys.exit(main())
