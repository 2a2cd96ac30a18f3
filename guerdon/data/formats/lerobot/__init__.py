"""`lerobot`: data sets of LeRobot, v2.x and v3.0 to read, v3.0 to write; LeRobot itself is not imported.

- `meta`: what `info.json` and the episodes' files tell; `tables`: rows of parquet files, with bounds.
- `frames`: frames of videos by their times, pictures in parquet files; `labels`: what columns mean.
- `reading`: episodes; `rows`, `writing`, `joining`, `stats`, `encoding`: the other direction.
- `columns`: a copy of a data set with more columns.
"""

from __future__ import annotations

from guerdon.data.formats.lerobot.columns import add_columns
from guerdon.data.formats.lerobot.format import LeRobot
from guerdon.data.formats.lerobot.reading import LeRobotData

__all__ = ["LeRobot", "LeRobotData", "add_columns"]
