"""What a run left in its folder, read for its report; missing and incomplete files are reported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.atomic import storage_errors
from guerdon.monitoring.alarm_check import ALARMS_FILE, Alarm
from guerdon.monitoring.films import film_files

LAST_SHARE = 0.2
"""The end of a run: so much of its steps."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was found in a run's folder."""

    folder: Path
    series: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    """name -> (steps [K], values [K]), finite and in the order of the steps."""
    alarms: Sequence[Alarm]
    summary: Mapping[str, Any]
    config: str
    videos: Sequence[Path]
    notes: list[str] = field(default_factory=list)
    """What is missing or could not be read, in sentences."""

    def end(self, name: str) -> float:
        """Mean of a metric over the last part of the run; NaN where it is unknown."""
        if name not in self.series:
            return math.nan
        steps, values = self.series[name]
        return float(values[steps >= steps[-1] - LAST_SHARE * (steps[-1] - steps[0])].mean())

    def last(self, name: str) -> float:
        """The last value of a metric; NaN where it is unknown."""
        return float(self.series[name][1][-1]) if name in self.series else math.nan

    @property
    def last_step(self) -> float:
        """The highest step of any metric."""
        return max((float(steps[-1]) for steps, _ in self.series.values()), default=0.0)

    @property
    def x_range(self) -> tuple[float, float]:
        """Of all plots; some air on the right leaves room for the last number."""
        return 0.0, 1.03 * max(self.last_step, 1.0)


def read_run(folder: Path) -> Run:
    """Read what a run left behind."""
    notes: list[str] = []
    lines = _json_lines(folder / "metrics.jsonl", notes)
    lines = [line for line in lines if is_number(line.get("step"))]
    series = {}
    for name in sorted({name for line in lines for name in line} - {"step"}):
        points = [(line["step"], line[name]) for line in lines if is_number(line.get(name))]
        if points:
            steps, values = np.array(sorted(points, key=lambda point: point[0]), np.float64).T
            series[name] = (steps, values)
    alarms = [_alarm(line) for line in _json_lines(folder / ALARMS_FILE, notes, needed=False)]
    summary, text = _read(folder / "summary.json", notes), _read(folder / "config.yaml", notes)
    videos = film_files(folder)
    if not videos:
        notes.append("There are no videos.")
    return Run(
        folder=folder,
        series=series,
        alarms=list({(alarm.name, alarm.step): alarm for alarm in alarms if alarm}.values()),  # each once
        summary=_summary(summary, notes),
        config=text,
        videos=videos,
        notes=notes,
    )


def _alarm(line: Mapping[str, Any]) -> Alarm | None:
    numbers = {name: line.get(name) for name in ("step", "value", "limit")}
    if not all(map(is_number, numbers.values())):
        return None
    frames = [Path(str(path)) for path in line.get("frames") or ()]
    return Alarm(name=str(line.get("name")), remedy=str(line.get("remedy", "")), frames=frames, **numbers)  # type: ignore[arg-type]


def _read(path: Path, notes: list[str]) -> str:
    if not path.is_file():
        notes.append(f"There is no {path.name}.")
        return ""
    with storage_errors(path):
        return path.read_text(encoding="utf-8", errors="replace")


def _json_lines(path: Path, notes: list[str], *, needed: bool = True) -> list[dict[str, Any]]:
    """The objects of a file with one on each line; lines that hold none are reported and left out."""
    if not needed and not path.is_file():
        return []
    found, torn = [], 0
    for line in _read(path, notes).splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            torn += 1
    if torn:
        notes.append(f"{torn} line(s) of {path.name} could not be read.")
    return found


def _summary(text: str, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notes.append("summary.json could not be read.")
        return {}
    return value


def is_number(value: Any) -> bool:
    """A finite number, not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
