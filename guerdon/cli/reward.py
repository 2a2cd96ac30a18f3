"""`guerdon reward`: score a data set, write the reward card, make the int8 version."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from guerdon.cli.verb import Result, next_command, setting
from guerdon.config import RewardConfig, RewardModelConfig
from guerdon.core import strict_json
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import FloatArray, UInt8Array, display_path
from guerdon.data.datasets.audit import audit
from guerdon.data.datasets.frames import (
    RewardDataset,
    check_store_shows_motion,
    frames_at_rest,
    open_store,
    rows_of,
    split_store,
)
from guerdon.fit.calibrate import Threshold, choose_threshold
from guerdon.fit.metrics import LabelledScores, summarize
from guerdon.monitoring.card import write_card
from guerdon.monitoring.verdict import CardInputs
from guerdon.rewards.image import load_checkpoint
from guerdon.rewards.image.int8_file import int8_path, quantize_checkpoint
from guerdon.rewards.image.worker import ImageRewardWorker
from guerdon.rewards.relabel import fires


def score_verb(arguments: argparse.Namespace) -> Result:
    """Success probabilities of a data set."""
    result = score(arguments.path, arguments.checkpoint, arguments.out, precision=arguments.precision)
    metrics = result["metrics"]
    lines = [
        f"{result['frames']} frames, {result['fires']} above the threshold of {result['threshold']:.4f}",
        f"AUC {metrics['auc']:.4f}, true positives {metrics['true_positive_rate']:.1%}, "
        f"false positives {metrics['false_positive_rate']:.2%}",
        f"{result['frames_per_second']:,.0f} frames/s",
    ]
    lines += [f"-> {display_path(arguments.out)}"] if arguments.out is not None else []
    return Result(result, lines)


def card_verb(arguments: argparse.Namespace) -> Result:
    """The reward card."""
    result = card(arguments.data, arguments.checkpoint, arguments.out, precision=arguments.precision)
    return Result(result, [result["headline"], f"-> {display_path(arguments.out)}"])


def quantize_verb(arguments: argparse.Namespace) -> Result:
    """The int8 version."""
    result = quantize(arguments.path, arguments.checkpoint, arguments.threshold)
    lines = [
        f"int8 decides as fp32 does on {result['agreement']:.3%} of "
        f"{result['num_check_frames']} held-out frames",
        f"{result['judged_twice']:.1%} of them are near the threshold and judged again in fp32",
        f"-> {display_path(result['file'])}",
    ]
    checkpoint = setting("reward.model.checkpoint_path", arguments.checkpoint)
    words = ("reward.use_reward_model=true", checkpoint, "reward.model.precision=int8")
    return Result(result, lines, next_steps=[next_command("train", *words)])


class ScoredData:
    """A data set with a checkpoint's scores of all its frames."""

    def __init__(self, data: Path, checkpoint: Path, *, precision: str, copy: Path) -> None:
        """Score every frame at `data`; foreign formats are copied to the folder `copy` first."""
        model = replace(RewardModelConfig(), checkpoint_path=str(checkpoint), precision=precision)  # type: ignore[arg-type]
        self.worker = ImageRewardWorker(RewardConfig(model=model))
        self.worker.init_worker()
        self.contract = self.worker.manager.contract
        self.threshold = self.worker.manager.threshold
        self.store, self.faults = open_store(str(data), None, None, copy)
        dataset = RewardDataset(
            self.store, cameras=self.worker.manager.image_keys, num_frames=self.contract.num_frames
        )
        parts, self.seconds = [], 0.0
        for start in range(0, len(dataset), 256):
            frames = dataset.batch(np.arange(start, min(start + 256, len(dataset)))).frames
            began = time.perf_counter()
            parts.append(self.worker.score(frames).prob_success)
            self.seconds += time.perf_counter() - began
        if not parts:
            raise DataError(f"{display_path(data)} has no frames to score")
        self.prob_success: FloatArray = np.concatenate(parts)
        if self.contract.only_at_rest:
            self.prob_success[~frames_at_rest(self.store)] = 0.0
        else:
            check_store_shows_motion(self.store)

    def scores(self) -> LabelledScores:
        """For the metrics."""
        names = ("labels", "episode", "step", "success")
        return LabelledScores(
            prob_success=self.prob_success, **{name: getattr(self.store, name) for name in names}
        )

    def table(self) -> pa.Table:
        """One row per frame."""
        return pa.table(
            {
                "episode": self.store.episode,
                "step": self.store.step,
                "label": self.store.labels,
                "prob_success": self.prob_success,
                "fires": fires(self.prob_success, self.threshold),
                "source": pa.array(self.store.episode_column("source")).take(pa.array(self.store.episode)),
            }
        )

    def summary(self) -> dict[str, Any]:
        """The outcome in plain numbers."""
        return {
            "frames": len(self.prob_success),
            "threshold": self.threshold,
            "fires": int(fires(self.prob_success, self.threshold).sum()),
            "frames_per_second": round(len(self.prob_success) / self.seconds, 1),
            "metrics": summarize(self.scores(), self.threshold),
        }


def score(
    data: Path | str, checkpoint: Path | str, out: Path | str | None, *, precision: str
) -> dict[str, Any]:
    """Score a data set; with `out`, the probabilities go to a parquet (or `.json`) file."""
    out = None if out is None else Path(out)
    with tempfile.TemporaryDirectory() as copy:
        scored = ScoredData(Path(data), Path(checkpoint), precision=precision, copy=Path(copy))
        table = scored.table()
        if out is not None and out.suffix == ".json":
            write_atomic(out, strict_json.dumps(table.to_pylist()))
        elif out is not None:
            write_atomic(out, lambda file: pq.write_table(table, file))
        return {**scored.summary(), "out": None if out is None else str(out)}


def card(data: Path | str, checkpoint: Path | str, out: Path | str, *, precision: str) -> dict[str, Any]:
    """Write the reward card of a checkpoint on a data set.

    A checkpoint of another program has no calibrated threshold; the card then chooses one on `data`.
    """
    data, checkpoint = Path(data), Path(checkpoint)
    with tempfile.TemporaryDirectory() as copy:
        scored = ScoredData(data, checkpoint, precision=precision, copy=Path(copy))
        summary = scored.summary()
        verdict = write_card(
            out, _card_inputs(scored, data, checkpoint, precision, summary["frames_per_second"])
        )
    return {**summary, "card": str(out), "verdict": verdict.level, "headline": verdict.headline}


def quantize(data: Path | str, checkpoint: Path | str, threshold: float | None) -> dict[str, Any]:
    """Make the int8 version of a checkpoint: calibrated on one part of the episodes, verified on the rest."""
    if threshold is not None and not 0.0 < threshold < 1.0:
        raise ConfigError(f"the threshold must lie between 0 and 1, not {threshold}")
    checkpoint = Path(checkpoint)
    model = load_checkpoint(checkpoint)[0].config
    cameras = model.image_keys
    with tempfile.TemporaryDirectory() as copy:
        store, _ = open_store(str(data), None, None, Path(copy))
        resting = model.only_at_rest
        splits = split_store(store, val_fraction=0.5, seed=0, camera=cameras[0], only_at_rest=resting)
        made = quantize_checkpoint(
            checkpoint,
            RewardDataset(store, cameras=cameras, num_frames=model.num_frames),
            rows_of(store, splits["train"], only_at_rest=resting),
            rows_of(store, splits["val"], only_at_rest=resting),
            threshold=threshold,
        )
    return {
        "agreement": made.agreement,
        "num_check_frames": made.num_check_frames,
        "judged_twice": made.rescored,
        "margin": made.margin,
        "file": str(int8_path(checkpoint)),
    }


def _card_inputs(scored: ScoredData, data: Path, checkpoint: Path, precision: str, rate: float) -> CardInputs:
    store, camera, scores = scored.store, scored.worker.manager.image_keys[0], scored.scores()
    stored = scored.contract.calibration or {}

    def frame(episode: int, step: int) -> UInt8Array:
        picture: UInt8Array = store.frames(camera, [int(store.starts[episode]) + step])[0]
        return np.repeat(picture, 3, axis=-1) if picture.shape[-1] == 1 else picture

    known = "threshold" in stored
    threshold = Threshold.from_dict(stored["threshold"]) if known else choose_threshold(scores, seed=0)
    return CardInputs(
        title=f"Reward card: {display_path(checkpoint)}",
        checkpoint=display_path(checkpoint),
        scores=scores,
        threshold=threshold,
        calibration=scored.contract.calibration_map,
        metrics=summarize(scores, threshold.threshold),
        frame=frame,
        contract=scored.contract.to_dict(),
        audit=audit(data),
        data_hash=store.content_hash,
        speed={f"frames per second ({precision})": rate, "milliseconds per batch of 256": 256e3 / rate},
    )
