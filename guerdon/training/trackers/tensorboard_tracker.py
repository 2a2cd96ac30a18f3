"""TensorBoard: `MetricLog` writes the numbers as they come; here are the config, pictures and films."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from guerdon.training.trackers.base import Row, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Events in the run's folder, written at its end.

    TensorBoard reads the event files of a folder one after the other and does not come back to an earlier
    one: as long as the file of the numbers grows, there must be no newer one.
    """

    name: ClassVar[str] = "tensorboard"
    module: ClassVar[str] = "tensorboardX"

    def __init__(self, run: TrackedRun) -> None:
        """Nothing is written before the end."""
        self.run_id = ""  # its files are in the run's folder
        self._folder = run.folder
        text = json.dumps(run.config, indent=1, default=str)
        self._late: list[Callable[[Any], object]] = []
        if run.run_id is None:
            shown = "".join(f"    {line}\n" for line in text.splitlines())  # as Markdown shows code
            self._late.append(lambda board: board.add_text("config", shown, 0))

    def log(self, rows: Sequence[Row]) -> None:
        """They are there already."""

    def picture(self, name: str, path: Path, step: int) -> None:
        """As an image summary."""
        self._late.append(lambda board: _add_encoded(board, name, path, step))

    film = picture

    def files(self, paths: Sequence[Path]) -> None:
        """They lie beside the events."""

    def close(self, *, finished: bool) -> None:
        """Write everything."""
        from guerdon.fit.tensorboard import EventWriter

        board = EventWriter(str(self._folder))
        try:
            for write in self._late:
                write(board)
        finally:
            board.close()


def _add_encoded(board: Any, name: str, path: Path, step: int) -> None:
    """A picture as it is in its file; TensorBoard's page plays GIFs, and cannot show MP4."""
    from PIL import Image
    from tensorboardX.proto.summary_pb2 import Summary

    if path.suffix.lower() not in (".png", ".gif"):
        return
    with Image.open(path) as picture:
        width, height = picture.size
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
    board._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)
