"""Finding a Vulkan device, and saying what to do where there is none."""

import os
import subprocess
from pathlib import Path

import pytest

from guerdon.cli import check
from guerdon.core.errors import ConfigError
from guerdon.envs.maniskill import vulkan
from guerdon.envs.maniskill.env import ManiSkillVectorEnv

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_variables(monkeypatch):
    for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES"):
        monkeypatch.setenv(name, "")  # so that what the test leaves is taken back, if it was unset too
        monkeypatch.delenv(name)


def test_the_software_driver_is_found_where_there_is_no_gpu(tmp_path, monkeypatch, no_variables, caplog):
    monkeypatch.setattr(vulkan, "DRIVER_DIRECTORIES", (str(tmp_path / "none"), str(tmp_path)))
    monkeypatch.setattr(vulkan, "has_gpu", lambda: False)
    caplog.set_level("INFO", "guerdon")
    vulkan.choose_driver()
    assert "VK_ICD_FILENAMES" not in os.environ
    driver = tmp_path / "lvp_icd.x86_64.json"
    driver.write_text("{}")
    vulkan.choose_driver()
    assert os.environ["VK_ICD_FILENAMES"] == str(driver) and str(driver) in caplog.text


@pytest.mark.parametrize("chosen", ["VK_ICD_FILENAMES", "VK_DRIVER_FILES"])
def test_what_the_user_chose_stays(tmp_path, monkeypatch, no_variables, chosen):
    (tmp_path / "lvp_icd.json").write_text("{}")
    monkeypatch.setattr(vulkan, "DRIVER_DIRECTORIES", (str(tmp_path),))
    monkeypatch.setattr(vulkan, "has_gpu", lambda: False)
    monkeypatch.setenv(chosen, "mine.json")
    vulkan.choose_driver()
    assert os.environ.get("VK_ICD_FILENAMES", "") in ("", "mine.json") and os.environ[chosen] == "mine.json"


def test_a_gpu_keeps_its_own_driver(tmp_path, monkeypatch, no_variables):
    (tmp_path / "lvp_icd.json").write_text("{}")
    monkeypatch.setattr(vulkan, "DRIVER_DIRECTORIES", (str(tmp_path),))
    monkeypatch.setattr(vulkan, "has_gpu", lambda: True)
    vulkan.choose_driver()
    assert "VK_ICD_FILENAMES" not in os.environ


@pytest.mark.sim
def test_no_device_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setenv("VK_ICD_FILENAMES", "nowhere.json")
    ok, detail = vulkan.probe()
    assert not ok and "rendering device" in detail
    part = check.PROOFS["maniskill"]()
    assert not part.ok and part.optional and "make setup-sim" in part.detail
    with pytest.raises(ConfigError, match=r"no Vulkan device to render with.*make setup-sim"):
        ManiSkillVectorEnv(1, id="PickCube-v1", render_mode="rgb_array")


@pytest.mark.sim
def test_this_machine_renders():
    """`make setup-sim` comes before the tests: there is a device, and the simulator tests do not skip."""
    part = check.PROOFS["maniskill"]()
    assert part.ok, part.detail
    assert "PickCube-v1, (64, 64, 3)" in part.detail


def test_the_set_up_does_nothing_where_a_device_works(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho asked $@\n")
    python.chmod(0o755)
    # Nothing else is on the path: whatever it tried to install with would not be found.
    done = subprocess.run(
        ["/bin/bash", ROOT / "scripts" / "setup_sim.sh", python],
        capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (
        0,
        "asked -c import cv2\nasked -m guerdon.envs.maniskill.vulkan\n",
    )
    python.write_text("#!/bin/sh\nexit 1\n")
    done = subprocess.run(
        ["/bin/bash", ROOT / "scripts" / "setup_sim.sh", python],
        capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "no Debian-like system" in done.stderr
