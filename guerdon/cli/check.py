"""`guerdon check`: whether each part is installed and works, and what to do if it does not."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from guerdon.cli.verb import Result, next_command
from guerdon.core.errors import GuerdonError

EXTRAS = {
    "ray": ("ray", "cluster training"),
    "maniskill": ("mani_skill", "the ManiSkill simulator"),
    "sb3": ("stable-baselines3", "the reward in Stable-Baselines3"),
    "serve": ("onnxruntime", "int8 scoring"),
    "video": ("av", "scoring video files and films in MP4"),
    "lerobot": ("av", "LeRobot data sets"),
    "minari": ("minari", "Minari data sets"),
    "hf": ("transformers", "Hugging Face: vision encoders, models of the hub"),
    "rerun": ("rerun-sdk", "looking at data in Rerun"),
    "wandb": ("wandb", "runs at Weights & Biases"),
    "mlflow": ("mlflow-skinny", "runs at MLflow"),
    "trackio": ("trackio", "runs at Trackio"),
    "text": ("math-verify", "rewards for mathematical answers"),
    "minigrid": ("minigrid", "MiniGrid's tasks"),
    "opencv": ("opencv-python", "USB cameras of a robot"),
    "realsense": ("pyrealsense2", "RealSense cameras of a robot"),
    "spacemouse": ("pyspacemouse", "a SpaceMouse to drive a robot"),
    "franky": ("franky-control", "a Franka arm without a server"),
}
"""extra -> (distribution, what it is for)."""
CORE = ("torch", "numpy", "gymnasium", "hydra-core", "pyarrow", "pillow", "safetensors")


class Part(NamedTuple):
    """One part of the installation."""

    name: str
    ok: bool
    optional: bool
    detail: str


def check_verb(arguments: argparse.Namespace) -> Result:
    """Is everything installed and working?"""
    results = check_installation()
    lines = [
        f"{'ok' if item.ok else ('missing' if item.optional else 'FAILED'):<9}{item.name:<14}{item.detail}"
        for item in results
    ]
    ok = all(item.ok or item.optional for item in results)
    steps = [next_command("demo") + "  # all three stages in a few minutes"]
    if not ok:
        failed = ", ".join(item.name for item in results if not item.ok and not item.optional)
        steps = [f"pip install --force-reinstall guerdon  # then check again: {failed}"]
    return Result({"parts": [item._asdict() for item in results]}, lines, ok=ok, next_steps=steps)


def check_installation() -> list[Part]:
    """Look at all parts; nothing is changed."""
    parts = [Part("python", True, False, platform.python_version())]
    parts += [_installed(name, name, False, "not installed: pip install guerdon") for name in CORE]
    parts += [_torch(), _tabletop()]
    for extra, (distribution, purpose) in EXTRAS.items():
        part = _installed(distribution, extra, True, f"for {purpose}: pip install 'guerdon[{extra}]'")
        parts.append(part)
        if part.ok and extra in PROOFS:
            parts.append(PROOFS[extra]())
    return parts


def _installed(distribution: str, name: str, optional: bool, remedy: str) -> Part:
    try:
        return Part(name, True, optional, version(distribution))
    except PackageNotFoundError:
        return Part(name, False, optional, remedy)


def _torch() -> Part:
    import torch

    value = float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())
    devices = f"{torch.cuda.device_count()} GPU(s)" if torch.cuda.is_available() else "CPU only"
    return Part("torch works", value == 64.0**3, False, f"{devices}, {torch.get_num_threads()} threads")


def _tabletop() -> Part:
    import gymnasium
    import numpy as np

    import guerdon.envs  # noqa: F401 - registers the environment

    env = gymnasium.make("guerdon/Tabletop-v0", render_mode="rgb_array")
    env.reset(seed=0)
    frame = np.asarray(env.render())
    env.close()
    return Part("tabletop", frame.ndim == 3 and float(frame.std()) > 1.0, False, f"renders {frame.shape}")


def _ray() -> Part:
    """Start a worker and ask it; takes some seconds."""
    from guerdon.distributed.ray_engine import ray_works

    try:
        ok, detail = ray_works()
    except (GuerdonError, OSError, RuntimeError) as error:
        ok, detail = False, f"{str(error).splitlines()[0]}; engine=local does without it"
    return Part("ray works", ok, True, detail)


def _maniskill() -> Part:
    """Render a frame of a task in a simulator process; takes some seconds."""
    from guerdon.envs.maniskill.env import ManiSkillVectorEnv
    from guerdon.envs.maniskill.vulkan import REMEDY, probe

    ok, detail = probe()
    if not ok:
        return Part("sim renders", False, True, f"{detail}; {REMEDY}")
    try:
        env = ManiSkillVectorEnv(
            1, id="PickCube-v1", render_mode="rgb_array", num_processes=1, sim_backend="cpu"
        )
        try:
            env.reset(seed=0)
            frame = env.render_frames()[0]
        finally:
            env.close()
    except (GuerdonError, OSError, RuntimeError) as error:
        return Part("sim renders", False, True, f"{str(error).splitlines()[0]}; {REMEDY}")
    return Part("sim renders", float(frame.std()) > 1.0, True, f"PickCube-v1, {frame.shape}; {detail}")


def _lerobot() -> Part:
    """Which videos of LeRobot data sets this build of PyAV reads and writes; images need pyarrow alone."""
    import av

    known = av.codecs_available
    reads = any(name in known for name in ("libdav1d", "libaom-av1", "av1"))
    writes = "AV1" if "libsvtav1" in known else "H.264" if "libx264" in known else "no videos"
    detail = f"reads images, H.264{' and AV1' if reads else ' (no AV1)'}; writes images and {writes}"
    return Part("lerobot data", reads, True, detail)


PROOFS: dict[str, Callable[[], Part]] = {"ray": _ray, "maniskill": _maniskill, "lerobot": _lerobot}
"""extra -> how to see that it works, beyond being installed."""
