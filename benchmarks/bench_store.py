"""The native store against RLinf's formats: bytes on disk, random reads, memory."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import Result, report
from guerdon.config import CollectConfig, EnvConfig
from guerdon.core.types import Episode
from guerdon.data.collect.run import collect
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.store.shard import EpisodeRecord, ShardSchema, episode_digest
from guerdon.data.store.shard_index import index_table, usable, write_index
from guerdon.data.summary import convert, inspect

EPISODES, BATCH, BATCHES = 200, 256, 5
SPARSE_BYTES = 9 << 30


def collected(folder: Path) -> Path:
    """The same episodes in three formats: images and labels, as RLinf's formats carry them."""
    settings = CollectConfig(
        save_dir=str(folder / "npy"),
        format="npy-trajectory",
        policy="scripted",
        policy_noise=0.5,
        target_success=EPISODES // 2,
        target_failure=EPISODES // 2,
    )
    env = EnvConfig(num_envs=64, reward_render_mode="always", init_params={"domain_randomization": 1.0})
    collect(env, settings, seed=0)
    convert(folder / "npy", folder / "native", "native")
    convert(folder / "npy", folder / "pkl", "pkl-episode")
    return folder


def read_npy(files: list[Path], picks: list[tuple[int, int]]) -> np.ndarray:
    """Random frames as a user of RLinf's format reads them: load the file, take the frame."""
    return np.stack(
        [np.load(files[e], allow_pickle=True).item()["images"]["base_camera"][t] for e, t in picks]
    )


def read_pkl(files: list[Path], picks: list[tuple[int, int]]) -> np.ndarray:
    """The same for `pkl-episode`."""
    images = []
    for e, t in picks:
        with files[e].open("rb") as file:
            images.append(pickle.load(file)["frames"][t]["obs"]["main_images"])
    return np.stack(images)


def seconds_per_batch(read: Callable[[int], object], batches: int) -> float:
    """Median over batches; the first one warms the page cache and does not count."""
    read(0)
    times = []
    for number in range(1, batches + 1):
        started = time.perf_counter()
        read(number)
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def random_reads(folder: Path) -> dict[str, float]:
    """Seconds for a batch of 256 random frames in each format."""
    rng = np.random.default_rng(0)
    store = EpisodeStore(folder / "native")
    npy, pkl = sorted((folder / "npy").rglob("*.npy")), sorted((folder / "pkl").rglob("*.pkl"))
    picks = [
        [(int(rng.integers(len(npy))), int(rng.integers(50))) for _ in range(BATCH)]
        for _ in range(BATCHES + 1)
    ]
    rows = rng.integers(0, store.num_frames, (201, BATCH))
    return {
        "native": seconds_per_batch(lambda n: store.batch(rows[n]), 200),
        "npy-trajectory": seconds_per_batch(lambda n: read_npy(npy, picks[n]), BATCHES),
        "pkl-episode": seconds_per_batch(lambda n: read_pkl(pkl, picks[n]), BATCHES),
    }


def sparse_store(path: Path) -> EpisodeStore:
    """A store of more than 8 GiB whose frames are holes in a sparse file; the index is real."""
    episode = Episode(
        frames={"base_camera": np.zeros((50, 64, 64, 3), np.uint8)},
        labels=np.zeros(50, np.float32),
        success=False,
    )
    with StoreWriter(path) as writer:
        writer.add(episode)
    shard = path / "shards" / "s000000"
    count = SPARSE_BYTES // (50 * 64 * 64 * 3) + 1
    with (shard / "index.parquet").open("wb") as file:
        schema = ShardSchema.of(episode)
        records = [EpisodeRecord.of(episode, episode_digest(episode))] * count
        write_index(index_table(usable(records, schema)[0], schema), file)
    os.truncate(shard / "frames-00.u8", count * 50 * 64 * 64 * 3)
    return EpisodeStore(path)


def rss_anon() -> int:
    """Anonymous memory of this process in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def run() -> list[Result]:
    """Measure everything."""
    folder = Path(tempfile.mkdtemp())
    try:
        collected(folder)
        sizes = {name: inspect(folder / name).bytes for name in ("native", "npy", "pkl")}
        times = random_reads(folder)
        store = sparse_store(folder / "sparse")
        rng = np.random.default_rng(0)
        peak = 0
        for _ in range(400):
            store.batch(rng.integers(0, store.num_frames, BATCH))
            peak = max(peak, rss_anon())
        print(json.dumps({"bytes": sizes, "seconds per batch": times}))
        smaller = sizes["native"] / sizes["npy"]
        faster = {name: times[name] / times["native"] for name in ("npy-trajectory", "pkl-episode")}
        what = "random batch of 256 frames: {} / native"
        return [
            Result(what="bytes: native / npy-trajectory", value=smaller, target=0.25, at_least=False),
            *(Result(what=what.format(name), value=x, target=20, unit="x") for name, x in faster.items()),
            Result(
                what="RssAnon while sampling from 9 GiB",
                value=peak / 2**30,
                target=1.0,
                at_least=False,
                unit="GiB",
            ),
        ]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(report("store", {"episodes": EPISODES, "steps": 50, "image": "64x64x3", "batch": BATCH}, run()))
