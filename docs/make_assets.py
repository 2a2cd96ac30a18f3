"""Regenerate the pictures and the printed results in README and docs: `make docs`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from PIL import Image

import guerdon.envs  # noqa: F401 - registers the environment
from benchmarks.robot_peg import TIME_SCALE, SimulatedRobot, fit, record
from guerdon.cli.robot import teleop
from guerdon.config import CollectConfig, EnvConfig, RewardConfig, RewardModelConfig, load_config
from guerdon.data.collect.run import collect
from guerdon.data.datasets.pictures import write_preview
from guerdon.data.formats.realworld_pkl import RecordedEpisode, read_recorded
from guerdon.envs import ScriptedExpert
from tests.browser import screenshot

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
STEPS = (0, 8, 14, 20, 49)
PAGE_PORT = 8799


def cameras(path: Path) -> None:
    """Both cameras over one episode of the expert; a second pair of rows with domain randomisation."""
    rows = []
    for amount, seed in ((0.0, 5), (1.0, 11)):
        env: Any = gym.make_vec(
            "guerdon/Tabletop-v0",
            1,
            vectorization_mode="vector_entry_point",
            domain_randomization=amount,
            max_episode_steps=60,
        )
        env.reset(seed=seed)
        expert = ScriptedExpert()
        shown: dict[str, list[NDArray[np.uint8]]] = {"base_camera": [], "wrist_camera": []}
        for step in range(max(STEPS) + 1):
            env.step(expert.act(env.unwrapped.state()))
            if step in STEPS:
                for camera, pictures in shown.items():
                    pictures.append(env.unwrapped.render_frames(camera, size=(160, 160))[0])
        rows += [np.concatenate(pictures, axis=1) for pictures in shown.values()]
    Image.fromarray(np.concatenate(rows, axis=0)).save(path, optimize=True)


def preview(path: Path) -> None:
    """The sheet that `guerdon data inspect --preview` draws."""
    with tempfile.TemporaryDirectory() as folder:
        settings = CollectConfig(
            save_dir=f"{folder}/data", policy="scripted", policy_noise=0.5, target_success=4, target_failure=4
        )
        collect(EnvConfig(num_envs=8, init_params={"image_size": [96, 96]}), settings, seed=1)
        write_preview(f"{folder}/data", path)


def robot(strip: Path, page: Path) -> None:
    """The simulated robot's cameras over one episode, and the page of `guerdon teleop` (about a minute)."""
    operator: dict[str, object] = {"seed": 4, "noise": 0.1}
    with tempfile.TemporaryDirectory() as place, SimulatedRobot() as sim:
        folder = Path(place)
        record(sim, folder)
        cfg = load_config(
            "realworld_collect_data", [], str(ROOT / "examples" / "embodiment" / "config")
        ).env.eval
        reported = {**cfg.override_cfg, "url": sim.url, "time_scale": TIME_SCALE, "robot_ip": None}
        cfg = replace(cfg, operator="scripted", operator_params=operator, override_cfg=reported)
        recorded = (item.episode for item in read_recorded(folder) if isinstance(item, RecordedEpisode))
        episode = next(each for each in recorded if each.success)
        steps = np.linspace(0, int(np.argmax(episode.labels)) + 2, 6).astype(int)
        rows = [np.concatenate(list(frames[steps]), axis=1) for frames in episode.frames.values()]
        sheet = Image.fromarray(np.concatenate(rows))
        sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.NEAREST).save(strip, optimize=True)
        reward = RewardConfig(model=RewardModelConfig(checkpoint_path=str(fit(folder))))
        view = threading.Thread(
            target=teleop, args=(cfg, reward), kwargs={"port": PAGE_PORT, "max_steps": 400}, daemon=True
        )
        view.start()
        time.sleep(8.0)
        screenshot(f"http://127.0.0.1:{PAGE_PORT}/", page, width=900, height=860)
        view.join()


def demo() -> None:
    """Run the demo: what it prints, a film, and the tops of its reward card, report and proof (minutes)."""
    with tempfile.TemporaryDirectory() as folder:
        fill("demo", run(Path(folder), "demo"))
        (place,) = Path(folder).glob("runs/demo/*")
        screenshot(place / "card.html", IMAGES / "card.png", width=1000, height=1250)
        (report,) = place.glob("train/seed_*/learned/report.html")
        screenshot(report, IMAGES / "report.png", width=1000, height=1270)
        screenshot(place / "train" / "prove.html", IMAGES / "prove.png", width=1000, height=930)
        before_and_after(place / "train", IMAGES / "demo.gif")


def before_and_after(proof: Path, path: Path) -> None:
    """The same episode before and after training, side by side."""
    films = [Image.open(next(proof.glob(f"seed_*/{arm}/videos/eval_0.gif"))) for arm in ("start", "learned")]
    shown = []
    for step in range(min(getattr(film, "n_frames", 1) for film in films)):
        for film in films:
            film.seek(step)
        parts = [np.asarray(film.convert("RGB")) for film in films]
        gap = np.full((len(parts[0]), 12, 3), 255, np.uint8)
        shown.append(Image.fromarray(np.concatenate([parts[0], gap, parts[1]], axis=1)))
    pictures = [picture.quantize(method=Image.Quantize.FASTOCTREE) for picture in shown]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100, loop=0)


def run(folder: Path, *commands: str) -> str:
    """What the last of these commands prints, run one after another in `folder`."""
    for command in commands:
        program = [sys.executable, "-m", "guerdon.cli.main", *command.split()]
        result = subprocess.run(program, cwd=folder, check=True, capture_output=True, text=True)
    return result.stdout


def fill(name: str, text: str) -> None:
    """Put `text` between the markers `name` of both READMEs and of the pages of the docs."""
    block = f"<!-- {name} -->\n```\n{text.strip()}\n```\n<!-- /{name} -->"
    for page in (*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")):
        pattern = f"<!-- {name} -->.*?<!-- /{name} -->"
        page.write_text(re.sub(pattern, lambda match: block, page.read_text(), flags=re.S))


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    demo()
    targets = "collect.target_success=20 collect.target_failure=20"
    with tempfile.TemporaryDirectory() as place:
        fill("inspect", run(Path(place), f"collect collect.save_dir=data {targets}", "data inspect data"))
    cameras(IMAGES / "cameras.png")
    preview(IMAGES / "preview.png")
    robot(IMAGES / "robot.png", IMAGES / "teleop.png")
    print("\n".join(f"docs/images/{item.name}" for item in sorted(IMAGES.iterdir())))
