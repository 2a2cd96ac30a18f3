"""Is there a Vulkan device that ManiSkill can render with? Finds the software driver where there is no GPU.

`python -m guerdon.envs.maniskill.vulkan` renders a frame and ends with 0 if that worked;
`make setup-sim` asks it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

log = logging.getLogger("guerdon")

DRIVER_VARIABLE = "VK_ICD_FILENAMES"
VARIABLES = (DRIVER_VARIABLE, "VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES")
"""Variables that name drivers to Vulkan."""
DRIVER_DIRECTORIES = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
SOFTWARE_DRIVERS = "lvp_icd*.json"
REMEDY = "run `make setup-sim`, or install a GPU driver with Vulkan, or Mesa's software driver 24.3 or newer"
PROBE_SECONDS = 120.0

_PROBE = """
import numpy, sapien
sapien.render.set_log_level("off")
sapien.render.set_camera_shader_dir("trivial")
scene = sapien.Scene([sapien.physx.PhysxCpuSystem(), sapien.render.RenderSystem()])
scene.set_ambient_light([1, 1, 1])
box = scene.create_actor_builder()
box.add_box_visual(half_size=[0.2, 0.2, 0.2])
box.build_static(name="box").set_pose(sapien.Pose([1, 0, 0]))
camera = scene.add_camera("camera", 16, 16, 0.5, 0.01, 10)
scene.update_render()
camera.take_picture()
frame = numpy.asarray(camera.get_picture("Color"))
assert frame[..., :3].max() > 0, "the frame is black"
print("rendered", *frame.shape, flush=True)
"""


def has_gpu() -> bool:
    """Whether there is a graphics card: then its own driver is used, whatever else is installed."""
    return any(Path("/dev/dri").glob("renderD*")) or Path("/dev/nvidiactl").exists()


def choose_driver() -> None:
    """Name the software driver to Vulkan, in this process and its children, if nobody named another one."""
    if any(os.environ.get(name) for name in VARIABLES) or has_gpu():
        return
    found = [path for each in DRIVER_DIRECTORIES for path in sorted(Path(each).glob(SOFTWARE_DRIVERS))]
    if found:
        os.environ[DRIVER_VARIABLE] = str(found[0])
        log.info("no GPU: rendering with the software driver %s (%s)", found[0], DRIVER_VARIABLE)


def driver_variables() -> dict[str, str]:
    """The variables of this process that name drivers, for `set_driver_variables` in another one."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def set_driver_variables(variables: dict[str, str]) -> None:
    """Use the same drivers in this process; comes before anything that uses Vulkan."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)


def probe() -> tuple[bool, str]:
    """Render a small frame in a process of its own, as a bad driver may take its process down.

    Returns whether it worked, and what was rendered or what went wrong.
    """
    if importlib.util.find_spec("sapien") is None:
        return False, "sapien is not installed: pip install 'guerdon[maniskill]'"
    choose_driver()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no frame within {PROBE_SECONDS:g} s"
    if done.returncode == 0 and "rendered" in done.stdout:
        height, width, _ = done.stdout.split("rendered")[-1].split()
        driver = os.environ.get(DRIVER_VARIABLE)
        return True, f"renders {height}x{width} with {Path(driver).name if driver else 'the default device'}"
    lines = done.stderr.strip().splitlines()
    return False, lines[-1].strip() if lines else f"the process ended with {done.returncode}"


if __name__ == "__main__":
    works, words = probe()
    print(f"simulator {words}" if works else f"simulator does not render: {words}")
    sys.exit(0 if works else 1)
