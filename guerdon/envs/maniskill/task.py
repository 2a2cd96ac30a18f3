"""How a ManiSkill task is made: its arguments, the camera, the shaders, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError, unknown_name
from guerdon.envs.maniskill.vulkan import REMEDY, choose_driver, has_gpu

log = logging.getLogger("guerdon")

VIEWS: dict[str, tuple[Sequence[float], Sequence[float], float]] = {
    "PickCube-v1": ((0.55, 0.55, 0.50), (0.0, 0.0, 0.19), 0.62),
}
"""Task -> eye, target and field of view that show cube, goal and gripper well; others keep their own."""
_TABLE = "samplerBRDFLUT"


def make_task(cfg: ManiSkillConfig, num_envs: int, backend: str) -> Any:
    """ManiSkill's environment without any wrapper, on the `backend` cpu or gpu; errors say what to do."""
    choose_driver()
    try:
        import mani_skill.envs  # noqa: F401 - registers the tasks
        from mani_skill.utils.registration import REGISTERED_ENVS
    except ImportError as error:
        raise ConfigError(
            f"env_type: maniskill needs the simulator, which cannot be imported ({error}): run `make "
            "setup-sim`, or pip install 'guerdon[maniskill]'"
        ) from error
    if cfg.id not in REGISTERED_ENVS:
        raise ConfigError(unknown_name("ManiSkill task", cfg.id, REGISTERED_ENVS))
    arguments = dict(cfg.task_params)
    if cfg.robot_uids is not None:
        arguments["robot_uids"] = cfg.robot_uids
    if cfg.sim_config:
        arguments["sim_config"] = cfg.sim_config
    render_backend = "gpu" if backend == "gpu" or (has_gpu() and torch.cuda.is_available()) else "cpu"
    try:
        return REGISTERED_ENVS[cfg.id].make(
            num_envs=num_envs,
            obs_mode="state",
            control_mode=cfg.control_mode,
            reward_mode=cfg.reward_mode,
            render_mode="rgb_array" if cfg.shows_images else None,
            sim_backend=f"physx_{'cpu' if backend == 'cpu' else 'cuda'}",
            render_backend=render_backend if cfg.shows_images else "none",
            human_render_camera_configs=_camera(cfg, backend) if cfg.shows_images else {},
            **arguments,
        )
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(_explain(cfg, error)) from error


def _explain(cfg: ManiSkillConfig, error: Exception) -> str:
    """Why a task cannot be made, and what to do."""
    text = " ".join(str(error).split())
    if any(mark in text.lower() for mark in ("rendering device", "physical device", "vk::", "vulkan")):
        return f"the simulator finds no Vulkan device to render with ({text}): {REMEDY}"
    if "supported modes" in text:  # what ManiSkill says of an unknown control mode
        modes = re.findall(r"'(\w+)'", text)
        return f"{cfg.id}: {unknown_name('control_mode', cfg.control_mode, modes)}"
    return f"{cfg.id} cannot be made with these settings: {type(error).__name__}: {text}"


def _camera(cfg: ManiSkillConfig, backend: str) -> dict[str, Any]:
    """Settings of the task's render camera, the only one that shows goal markers."""
    import sapien
    from mani_skill.render import PREBUILT_SHADER_CONFIGS
    from mani_skill.utils import sapien_utils

    height, width = cfg.image_size
    camera: dict[str, Any] = {"width": width, "height": height}
    eye, target, fov = VIEWS.get(cfg.id, (None, None, None))
    if cfg.camera_eye is not None:
        eye, target = cfg.camera_eye, cfg.camera_target
    if eye is not None:
        camera["pose"] = sapien_utils.look_at(eye, target)
    fov = fov if cfg.camera_fov is None else cfg.camera_fov
    if fov is not None:
        camera["fov"] = fov
    if cfg.shader_pack not in PREBUILT_SHADER_CONFIGS:
        raise ConfigError(unknown_name("shader_pack", cfg.shader_pack, PREBUILT_SHADER_CONFIGS))
    camera["shader_pack"] = cfg.shader_pack
    shaders = _shaders_without_table() if cfg.shader_pack == "minimal" and backend == "cpu" else None
    if shaders is not None:
        del camera["shader_pack"]
        camera["shader_config"] = dataclasses.replace(
            PREBUILT_SHADER_CONFIGS["minimal"], shader_pack=str(shaders)
        )
        # What ManiSkill sets by the name of the pack.
        sapien.render.set_picture_format("Color", "r8g8b8a8unorm")
        sapien.render.set_picture_format("ColorRaw", "r8g8b8a8unorm")
        sapien.render.set_picture_format("PositionSegmentation", "r16g16b16a16sint")
    return camera


@cache
def _shaders_without_table() -> Path | None:
    """SAPIEN's minimal shaders without their table for reflections of the surroundings: there are none.

    Computing that table takes eight seconds of a core in every process that renders; frames are the same
    without. None, and a line in the log, if the shaders look different from those that this was written for.
    """
    import sapien

    source = Path(sapien.__file__).parent / "vulkan_shader"
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "guerdon"
    folder = kept / f"shaders-{sapien.__version__}"
    if folder.exists():
        return folder / "minimal"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as made:
            pack = Path(made) / "pack"
            for name in ("common", "minimal"):
                shutil.copytree(source / name, pack / name)
            texts = {file: _without_table(file.read_text()) for file in (pack / "minimal").glob("*.frag")}
            if None in texts.values():
                log.warning("SAPIEN's shaders are not as expected: the first frame takes some seconds more")
                return None
            for file, text in texts.items():
                file.write_text(text or "")
            try:
                pack.rename(folder)  # whole or not at all: other processes may do the same now
            except OSError:
                if not folder.exists():
                    raise
    except OSError as error:
        log.warning("no shaders can be kept, so the first frame takes some seconds more: %s", error)
        return None
    return folder / "minimal"


def _without_table(text: str) -> str | None:
    """A shader without the table, or None if the table is used in a way that is not known."""
    lines = []
    for line in text.splitlines():
        if _TABLE not in line:
            lines.append(line)
        elif line.strip().startswith("vec2 envBRDF ="):
            lines.append("  vec2 envBRDF = vec2(1, 0);")
        elif not line.strip().startswith("layout("):
            return None
    return "\n".join(lines) + "\n"
