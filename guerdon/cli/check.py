"""`guerdon check`: whether each part is installed and works, and what to do if it does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass

from guerdon.cli.verb import Result
from guerdon.core.errors import GuerdonError

EXTRAS = {
    "ray": ("ray", "cluster training", "ray"),
    "mani_skill": ("maniskill", "the ManiSkill simulator", "maniskill"),
    "stable-baselines3": ("sb3", "the reward in Stable-Baselines3", "sb3"),
    "onnxruntime": ("serve", "int8 scoring", "serve"),
    "av": ("lerobot", "LeRobot data sets with video", "lerobot"),
}
"""distribution -> (name shown, what it is for, extra)."""
CORE = ("torch", "numpy", "gymnasium", "hydra-core", "pyarrow", "pillow", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Part:
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
    return Result({"parts": [asdict(item) for item in results]}, lines, ok=ok)


def check_installation() -> list[Part]:
    """Look at all parts; nothing is changed."""
    parts = [Part(name="python", ok=True, optional=False, detail=platform.python_version())]
    for name in CORE:
        version = _version(name)
        detail = version or "not installed: pip install guerdon"
        parts.append(Part(name=name, ok=version is not None, optional=False, detail=detail))
    parts += [_torch(), _tabletop()]
    for distribution, (name, purpose, extra) in EXTRAS.items():
        version = _version(distribution)
        detail = version or f"for {purpose}: pip install 'guerdon[{extra}]'"
        parts.append(Part(name=name, ok=version is not None, optional=True, detail=detail))
        if version is not None and distribution in PROOFS:
            parts.append(PROOFS[distribution]())
    return parts


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Part:
    import torch

    value = float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())
    devices = f"{torch.cuda.device_count()} GPU(s)" if torch.cuda.is_available() else "CPU only"
    detail = f"{devices}, {torch.get_num_threads()} threads"
    return Part(name="torch works", ok=value == 64.0**3, optional=False, detail=detail)


def _ray() -> Part:
    """Start a worker and ask it; takes some seconds."""
    from guerdon.distributed.ray_engine import ray_works

    try:
        ok, detail = ray_works()
    except (GuerdonError, OSError, RuntimeError) as error:
        ok, detail = False, f"{str(error).splitlines()[0]}; engine=local does without it"
    return Part(name="ray works", ok=ok, optional=True, detail=detail)


def _maniskill() -> Part:
    """Render a frame of a task in a simulator process; takes some seconds."""
    from guerdon.envs.maniskill.env import ManiSkillVectorEnv
    from guerdon.envs.maniskill.vulkan import REMEDY, probe

    ok, detail = probe()
    if not ok:
        return Part(name="sim renders", ok=False, optional=True, detail=f"{detail}; {REMEDY}")
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
        ok, detail = False, f"{str(error).splitlines()[0]}; {REMEDY}"
    else:
        ok, detail = float(frame.std()) > 1.0, f"PickCube-v1, {frame.shape}; {detail}"
    return Part(name="sim renders", ok=ok, optional=True, detail=detail)


def _tabletop() -> Part:
    import gymnasium

    import guerdon.envs  # noqa: F401 - registers the environment

    env = gymnasium.make("guerdon/Tabletop-v0", render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    env.close()
    shape = getattr(frame, "shape", None)
    contrast = getattr(frame, "std", lambda: 0.0)()
    ok = bool(shape is not None and len(shape) == 3 and contrast > 1.0)
    return Part(name="tabletop", ok=ok, optional=False, detail=f"renders {shape}")


PROOFS: dict[str, Callable[[], Part]] = {"ray": _ray, "mani_skill": _maniskill}
"""distribution -> how to see that it works, beyond being installed."""
