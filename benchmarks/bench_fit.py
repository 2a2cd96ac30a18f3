"""FitProcess: encoding once against every epoch, memory on a store larger than 8 GiB, quality on Tabletop."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_store import rss_anon
from benchmarks.report import Result, report
from guerdon.config import (
    AugmentConfig,
    CollectConfig,
    EnvConfig,
    FitConfig,
    FitDataConfig,
    RewardModelConfig,
    load_config,
)
from guerdon.core.types import Episode
from guerdon.data.collect.run import collect
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.store.shard import EpisodeRecord, ShardSchema, episode_digest
from guerdon.data.store.shard_index import index_table, usable, write_index
from guerdon.fit import fit_reward_model
from guerdon.fit.metrics import confusion
from guerdon.fit.trainer import RewardModelTrainer
from guerdon.models import build_model
from guerdon.serve import ImageRewardWorker

EPISODES, EPOCHS, PLAIN_EPOCHS = 200, 100, 3
SPARSE_BYTES = 9 << 30
RANDOMISED = EnvConfig(num_envs=64, init_params={"domain_randomization": 1.0})


def gather(path: Path, success: int, failure: int, seed: int) -> Path:
    """Episodes of the noisy expert on Tabletop with domain randomisation."""
    settings = CollectConfig(
        save_dir=str(path),
        policy="scripted",
        policy_noise=0.5,
        target_success=success,
        target_failure=failure,
    )
    collect(RANDOMISED, settings, seed=seed)
    return path


def logged(folder: Path, name: str) -> dict[int, float]:
    """A metric by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def encode_once(folder: Path) -> list[Result]:
    """100 epochs of head training on 10,000 frames with a frozen ResNet10.

    The plain time is that of a fit of one epoch and 99 times what each epoch of a longer one adds.
    """
    data = gather(folder / "frozen", EPISODES // 2, EPISODES // 2, seed=1)
    torch.manual_seed(0)
    weights = folder / "encoder.pt"
    model = RewardModelConfig(
        model_type="binary_classifier", arch="resnet10", width=64, image_size=(3, 64, 64)
    )
    torch.save(build_model(model).resnet.state_dict(), weights)
    model = replace(model, pretrained_encoder_path=str(weights))
    fit = FitConfig(
        epochs=EPOCHS,
        global_batch_size=128,
        log_interval=1,
        save_interval=10**9,
        augment=AugmentConfig(shift_pixels=0, color=0.0),
        data=FitDataConfig(path=str(data)),
    )
    cached = fit_reward_model(model, fit, folder=folder / "cached", tensorboard=False)
    RewardModelTrainer._may_cache = lambda self: False  # type: ignore[method-assign]
    one = fit_reward_model(model, replace(fit, epochs=1), folder=folder / "one", tensorboard=False)
    few = fit_reward_model(
        model, replace(fit, epochs=PLAIN_EPOCHS), folder=folder / "plain", tensorboard=False
    )
    plain = one.seconds + (EPOCHS - 1) * (few.seconds - one.seconds) / (PLAIN_EPOCHS - 1)
    left, right = logged(folder / "cached", "val/loss"), logged(folder / "plain", "val/loss")
    difference = max(abs(left[step] - right[step]) for step in right)
    return [
        Result(
            what=f"{EPOCHS} epochs: encoding every epoch / once",
            value=plain / cached.seconds,
            target=20,
            unit="x",
        ),
        Result(what="difference of the validation losses", value=difference, target=0.001, at_least=False),
    ]


def sparse_data(path: Path) -> Path:
    """More than 8 GiB of 128x128 frames that are holes in a sparse file, with a real index and splits."""
    records = []
    for success in (True, False):
        for split in ("train", "val"):
            labels = np.zeros(50, np.float32)
            labels[25:] = success
            frames = {"base_camera": np.zeros((50, 128, 128, 3), np.uint8)}
            records.append(Episode(frames=frames, labels=labels, success=success, split=split))
    with StoreWriter(path) as writer:
        writer.add_many(records)
    shard = path / "shards" / "s000000"
    count = SPARSE_BYTES // (4 * records[0].frames["base_camera"].nbytes) + 1
    kinds = [EpisodeRecord.of(item, episode_digest(item)) for item in records]
    with (shard / "index.parquet").open("wb") as file:
        schema = ShardSchema.of(records[0])
        write_index(index_table(usable(kinds * count, schema)[0], schema), file)
    os.truncate(shard / "frames-00.u8", 4 * count * records[0].frames["base_camera"].nbytes)
    return path


def memory(folder: Path) -> list[Result]:
    """Anonymous memory above that of the model alone, with the encoder unfrozen."""
    data = sparse_data(folder / "sparse")
    model = RewardModelConfig(arch="resnet10", width=8, image_size=(3, 128, 128))
    fit = FitConfig(
        epochs=1,
        global_batch_size=256,
        data=FitDataConfig(path=str(data), num_samples_per_episode=1),
        save_interval=10**9,
    )
    build_model(model)
    before, peak = rss_anon(), 0
    original = RewardModelTrainer._train_step

    def watched(self: RewardModelTrainer, rows: np.ndarray) -> float:
        nonlocal peak
        loss = original(self, rows)
        peak = max(peak, rss_anon() - before)
        if self.progress.step == 8:
            self._val_rows = self._val_rows[:: len(self._val_rows) // 2000]
        return loss

    RewardModelTrainer._train_step = watched  # type: ignore[method-assign]
    try:
        fit_reward_model(model, fit, folder=folder / "memory", tensorboard=False)
    except Exception as error:  # the holes are all alike, so calibration may object; memory is what counts
        print(f"   (after training: {type(error).__name__})")
    RewardModelTrainer._train_step = original  # type: ignore[method-assign]
    what = "RssAnon above the model while fitting on 9 GiB"
    return [Result(what=what, value=peak / 2**30, target=2.0, at_least=False, unit="GiB")]


def quality(folder: Path) -> list[Result]:
    """Fit on 200 training episodes, then score fresh ones that nobody has seen."""
    data = gather(folder / "train", 125, 125, seed=0)  # 20% are held out, 200 are trained on
    config = load_config("train_reward", [f"fit.data.path={data}"])
    result = fit_reward_model(config.reward.model, config.fit, folder=folder / "quality", tensorboard=False)
    fresh = EpisodeStore(gather(folder / "fresh", 100, 100, seed=99))
    worker = ImageRewardWorker(result.checkpoint)
    worker.init_worker()
    prob = worker.score({"base_camera": fresh.frames("base_camera", range(fresh.num_frames))}).prob_success
    failures = ~fresh.success[fresh.episode]
    counts = confusion(prob, fresh.labels, result.threshold.threshold)
    rate = confusion(prob[failures], fresh.labels[failures], result.threshold.threshold).false_positive_rate
    low, high = result.threshold.failure_episode_interval
    print(f"   fit took {result.seconds:.0f} s; stated interval of wrong fires {low:.4f} to {high:.4f}")
    what = "wrong fires on 100 fresh failure episodes, within the stated interval"
    return [
        Result(what="held-out AUC", value=result.metrics["auc"], target=0.995),
        Result(what=what, value=rate, target=high, at_least=False),
        Result(what="true-positive rate on fresh episodes", value=counts.true_positive_rate, target=0.95),
    ]


def freezing(folder: Path) -> list[Result]:
    """What it costs to freeze an encoder that has no pretrained weights: the same short fit both ways."""
    data = gather(folder / "train", 125, 125, seed=0)
    brief = ["fit.epochs=6", "fit.data.num_samples_per_episode=18", f"fit.data.path={data}"]
    results = []
    for frozen, name in ((False, "trained"), (True, "frozen at random weights")):
        config = load_config("train_reward", [*brief, f"reward.model.freeze_encoder={frozen}"])
        fitted = fit_reward_model(
            config.reward.model, config.fit, folder=folder / str(frozen), tensorboard=False
        )
        rate = fitted.threshold.true_positive_rate
        print(f"   encoder {name}: AUC {fitted.metrics['auc']:.4f}, fires on {rate:.1%} of success frames")
        results.append(fitted.metrics["auc"])
    what = "held-out AUC with the encoder trained, above that with random features"
    return [Result(what=what, value=results[0] - results[1], target=0.0)]


PARTS = {"encode_once": encode_once, "memory": memory, "quality": quality, "freezing": freezing}


def run(parts: tuple[str, ...] = tuple(PARTS)) -> list[Result]:
    """Measure what is asked for, each in a folder of its own."""
    results = []
    for part in parts:
        folder = Path(tempfile.mkdtemp())
        try:
            results += PARTS[part](folder)
        finally:
            shutil.rmtree(folder)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = tuple(sys.argv[1:]) or tuple(PARTS)
    settings: dict[str, object] = {"threads": 1, "episodes": EPISODES, "frames": "64x64", "parts": chosen}
    sys.exit(report("fit", settings, run(chosen)))
