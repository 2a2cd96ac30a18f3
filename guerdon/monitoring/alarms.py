"""Alarms of the monitor: what they say, and what they leave in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from guerdon.core import strict_json
from guerdon.core.atomic import make_directory, storage_errors
from guerdon.core.types import UInt8Array
from guerdon.data.datasets.pictures import save_picture

ALARMS_FILE = "alarms.jsonl"
REMEDIES = {
    "success_gap": "the model calls episodes a success that the environment does not: label these frames as "
    "failures and refit, or use reward.reward_mode=terminal until then",
    "wrong_fires": "the model fires on failure frames more often than calibration promised: raise "
    "reward.reward_threshold, or label these frames as failures and refit",
    "fire_rate": "the model fires far more often than on successes in calibration: look at these frames; if "
    "they are no successes, label them and refit, or raise reward.reward_threshold",
    "early_fires": "the model fires before any success can be there: use reward.reward_mode=terminal, or "
    "label these frames as failures and refit",
    "drift": "the frames are unlike those that the model was fitted to: check camera and lighting, or label "
    "such frames and refit",
    "disagreement": "the members of the ensemble disagree on what fires: raise reward.reward_threshold, or "
    "label these frames and refit",
}


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A signal that stayed above its limit."""

    name: str
    step: int
    """Environment step of the run."""
    value: float
    limit: float
    remedy: str
    frames: list[Path]
    """Pictures of offending frames."""


def raise_alarm(
    folder: Path, name: str, step: int, value: float, limit: float, pictures: Sequence[UInt8Array]
) -> Alarm:
    """Save offending frames [H, W, C] as `alarms/<name>_<step>/*.png`, and a line about the alarm."""
    place = make_directory(folder / "alarms" / f"{name}_{step}")
    paths = [place / f"{number:02d}.png" for number in range(len(pictures))]
    for path, picture in zip(paths, pictures, strict=True):
        save_picture(path, picture)
    alarm = Alarm(name=name, step=step, value=value, limit=limit, remedy=REMEDIES[name], frames=paths)
    line = {**vars(alarm), "frames": [path.relative_to(folder).as_posix() for path in paths]}
    target = folder / ALARMS_FILE
    with storage_errors(target), target.open("a", encoding="utf-8") as file:
        file.write(strict_json.dumps(line) + "\n")  # closing flushes
    return alarm
