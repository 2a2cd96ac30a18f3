"""`lerobot`: data sets of LeRobot, v2.x and v3.0 to read, v3.0 to write; LeRobot itself is not imported.

- `meta`: what `info.json` and the episodes' files tell; `tables`: rows of parquet files, with bounds.
- `frames`: frames of videos by their times, pictures in parquet files; `labels`: what columns mean.
- `reading`: episodes; `writing`, `staging`, `stats`, `encoding`: the other direction.
"""

from __future__ import annotations

from guerdon.data.formats.lerobot.format import LeRobot
from guerdon.data.formats.lerobot.reading import LeRobotData

__all__ = ["LeRobot", "LeRobotData"]
