"""Stage 3: what judging costs in a PPO iteration on images, the time of one step, the replay's memory."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Result, report
from guerdon.agents.networks import ObsSpec
from guerdon.agents.replay import ReplayBuffer
from guerdon.config import RewardConfig, RewardModelConfig, load_config
from guerdon.envs import TabletopVectorEnv
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.rewards.image.int8 import make_int8
from guerdon.rewards.image.int8_file import int8_path, save_int8
from guerdon.serve import ImageRewardWorker
from guerdon.training.on_policy import OnPolicyLoop
from guerdon.training.trainer import EmbodiedRunner

ITERATIONS, STEPS = 6, 50
AHEAD, AT_THE_END, WITHOUT = "judged ahead", "judged at the end", "env's reward"
PARTS = ("rollout", "compute_model_rewards", "update")
MODEL = RewardModelConfig(model_type="binary_classifier", arch="resnet10", width=64, image_size=(3, 64, 64))


def make_checkpoint(folder: Path) -> Path:
    """A full-width ResNet10 of random weights in int8; its speed does not depend on what it says."""
    torch.manual_seed(0)
    model = build_model(MODEL).eval()
    env = TabletopVectorEnv(512, autoreset_mode="Disabled")
    env.reset(seed=0)
    frames = env.render_frames()
    with torch.no_grad():
        logits = model(frames).numpy()
    # Far from all verdicts: fitted models leave under 1% of the frames to fp32, random ones nearly all.
    prob = 1.0 / (1.0 + np.exp(-float(2 * logits.max() - logits.min() + 1.0)))
    contract = replace(Contract.of(model, frame_sizes={"base_camera": (64, 64, 3)}), threshold=prob)
    place = save_checkpoint(folder / "model", model, contract)
    save_int8(
        int8_path(place), make_int8(model, frames[:256], frames[256:], float(np.log(prob / (1.0 - prob))))
    )
    return place


def iteration(folder: Path, checkpoint: Path, name: str, config_path: str | None) -> list[Result]:
    """PPO from images with one of the configs: what judging adds to an iteration.

    Frames are judged while the rollout goes on, so that no clock shows what it costs: the same iterations are
    run with the env's reward too, and with all frames judged at the end of the rollout, in turns.
    """
    learned = [
        "reward.use_reward_model=true",
        f"reward.model.checkpoint_path={checkpoint}",
        "reward.model.precision=int8",
        "monitor.action=off",
    ]
    kinds = {AHEAD: learned, AT_THE_END: learned, WITHOUT: ["reward.use_reward_model=false"]}
    runners = {}
    for kind, overrides in kinds.items():
        runner = EmbodiedRunner(load_config(name, ["env=tabletop", *overrides], config_path), folder)
        if kind == AT_THE_END:
            assert isinstance(runner.loop, OnPolicyLoop)
            runner.loop.score_after_rollout()
        runner.loop.reset(0)
        runner.loop.advance(0.0)  # warm-up
        runners[kind] = runner
    shares: dict[str, list[float]] = {AHEAD: [], AT_THE_END: []}
    for _ in range(ITERATIONS):
        seconds = {}
        for kind, runner in runners.items():
            started = time.perf_counter()
            metrics = runner.loop.advance(0.0).metrics
            seconds[kind] = time.perf_counter() - started
            parts = {each: metrics.get(f"time/{each}", 0.0) for each in PARTS}
            print(
                f"   {name}, {kind}: " + ", ".join(f"{each} {value:.2f} s" for each, value in parts.items())
            )
        for kind, mine in shares.items():
            mine.append(1.0 - seconds[WITHOUT] / seconds[kind])
    for runner in runners.values():
        runner.env_worker.close()
    percent = {kind: 100 * float(np.median(mine)) for kind, mine in shares.items()}
    what = f"judging, share of a PPO iteration on images, {name}"
    print(f"   {what}: " + ", ".join(f"{kind} {value:.1f}%" for kind, value in percent.items()))
    return [Result(what=what, value=percent[AHEAD], target=15.0, at_least=False, unit="%")]


def one_step(checkpoint: Path) -> list[Result]:
    """PendingScores one step of 128 environments."""
    model = RewardModelConfig(checkpoint_path=str(checkpoint), precision="int8")
    worker = ImageRewardWorker(RewardConfig(model=model), device="cpu")
    worker.init_worker()
    env = TabletopVectorEnv(128, autoreset_mode="Disabled")
    env.reset(seed=1)
    frames = {"base_camera": env.render_frames()}
    times = []
    for _ in range(30):
        started = time.perf_counter()
        worker.score(frames)
        times.append(1e3 * (time.perf_counter() - started))
    what = "compute_model_rewards, 128 environments x 1 step"
    return [Result(what=what, value=float(np.median(times)), target=50.0, at_least=False, unit="ms")]


def memory() -> list[Result]:
    """Bytes of a full image replay buffer against one uint8 frame for each transition."""
    spec = ObsSpec(state_size=0, images=(("base_camera", (64, 64, 3)),))
    replay = ReplayBuffer(spec, (4,), np.float32, 16, 16 * 200, seed=0)
    rng = np.random.default_rng(0)
    for step in range(400):
        ended = np.full(16, step % STEPS == STEPS - 1)
        image = {"base_camera": rng.integers(0, 256, (16, 64, 64, 3), dtype=np.uint8)}
        none = np.zeros(16, np.bool_)
        replay.add(image, np.zeros((16, 4), np.float32), np.zeros(16, np.float32), none, ended, image)
    frames = replay.num_rows * 16 * 64 * 64 * 3
    size = replay.nbytes / (replay.num_rows * 16) * 500_000 / 2**30
    print(f"   500,000 transitions of 64x64x3 would take {size:.2f} GiB")
    what = "replay buffer, bytes over those of its frames stored once"
    return [Result(what=what, value=replay.nbytes / frames, target=1.1, at_least=False, unit="x")]


def run() -> list[Result]:
    """Measure everything with all cores."""
    folder = Path(tempfile.mkdtemp())
    try:
        checkpoint = make_checkpoint(folder)
        results = iteration(folder, checkpoint, "maniskill_ppo_cnn", "examples/embodiment/config")
        results += iteration(folder, checkpoint, "train_rgb", None)
        return [*results, *one_step(checkpoint), *memory()]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    settings: dict[str, object] = {"threads": torch.get_num_threads(), "model": "ResNet10 64x64 int8"}
    sys.exit(report("train", settings, run()))
