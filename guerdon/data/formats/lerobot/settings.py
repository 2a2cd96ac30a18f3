"""How data sets are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from guerdon.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WriteSettings:
    """Of all episodes of a data set; one that is there already keeps its own."""

    fps: int = 10
    videos: bool = False
    task: str = "solve the task"
    robot_type: str = "unknown"
    data_files_mb: float = 100
    video_files_mb: float = 200

    def __post_init__(self) -> None:
        if type(self.fps) is not int or not 0 < self.fps <= 1000:
            raise ConfigError(f"fps must be a whole number from 1 to 1000, not {self.fps!r}")
        for name in ("data_files_mb", "video_files_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)!r}")
        if not self.task.strip():
            raise ConfigError("task must be a text that tells what the robot is to do")

    def with_info(self, info: Mapping[str, Any]) -> WriteSettings:
        """Those of a data set, by its `info.json`; the task stays."""
        return replace(
            self,
            fps=int(info["fps"]),
            videos=info["video_path"] is not None,
            robot_type=info["robot_type"],
            data_files_mb=info["data_files_size_in_mb"],
            video_files_mb=info["video_files_size_in_mb"],
        )
