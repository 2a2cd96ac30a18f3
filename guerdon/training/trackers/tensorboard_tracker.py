"""TensorBoard: `MetricLog` writes the numbers as they come; here are the config, pictures and films."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    max_rows: ClassVar[int] = 1000
    pictures_at_end: ClassVar[bool] = True

    def __init__(self, run: TrackedRun) -> None:
        """Nothing is written before the end."""
        self.run_id = ""  # its files are in the run's folder
        self._folder, self._config = run.folder, run.config
        self._board: Any = None

    def log(self, rows: Sequence[Row]) -> None:
        """They are there already."""

    def picture(self, name: str, path: Path, step: int) -> None:
        """As an image summary."""
        board = self._opened()
        _add_encoded(board, name, path, step)
        board.flush()

    film = picture

    def files(self, paths: Sequence[Path]) -> None:
        """They lie beside the events."""

    def close(self, *, finished: bool) -> None:
        """Write what is left."""
        self._opened().close()

    def _opened(self) -> Any:
        """The events, which begin with the config."""
        from guerdon.fit.tensorboard import EventWriter

        if self._board is None:
            self._board = EventWriter(str(self._folder))
            text = json.dumps(self._config, indent=1, default=str)
            shown = "".join(f"    {line}\n" for line in text.splitlines())  # as Markdown shows code
            self._board.add_text("config", shown, 0)
        return self._board


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
