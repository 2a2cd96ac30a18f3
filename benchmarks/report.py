"""How a measurement is reported: settings and versions first, then one line per target."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured number against its target."""

    what: str
    value: float
    target: float
    at_least: bool = True
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    def line(self) -> str:
        """For the table."""
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{self.what:<66}{self.value:>12,.3f} {self.unit:<10}{sign} {self.target:<10,g} {verdict}"


def heading(name: str, settings: dict[str, object]) -> str:
    """Name, machine, versions and settings of a benchmark."""
    packages = ("torch", "numpy", "gymnasium", "pyarrow", "guerdon")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    lines = [
        f"== {name}",
        f"   python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}; {versions}",
        f"   {', '.join(f'{key}={value}' for key, value in settings.items())}",
    ]
    return "\n".join(lines)


def report(name: str, settings: dict[str, object], results: list[Result]) -> int:
    """Print a benchmark; returns the exit code, 1 if a target was missed."""
    print(heading(name, settings))
    print("\n".join(f"   {result.line()}" for result in results), flush=True)
    return int(not all(result.met for result in results))


def silent() -> Any:
    """A logger for stable_baselines3 that writes nothing; its own leaves a folder for every run."""
    from stable_baselines3.common.logger import Logger

    return Logger(folder=None, output_formats=[])
