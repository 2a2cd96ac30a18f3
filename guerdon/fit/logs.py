"""Metrics to `metrics.jsonl` and TensorBoard; resuming cuts off what came after the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from guerdon.core import strict_json
from guerdon.core.atomic import append_whole, storage_errors, write_atomic


class MetricLog:
    """Appends one line per call to `metrics.jsonl`, and the same numbers to TensorBoard if asked for."""

    def __init__(self, folder: Path, *, tensorboard: bool = True, resume_step: int | None = None) -> None:
        """Log to `folder`; with `resume_step`, lines of later steps are dropped first."""
        self.path = folder / "metrics.jsonl"
        self._there: list[frozenset[str]] = []
        """What the lines of `resume_step` tell that were there before."""
        with storage_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and self.path.exists():
                kept = [line for line in self.path.read_text().splitlines() if _step(line) <= resume_step]
                self._there = [frozenset(json.loads(line)) for line in kept if _step(line) == resume_step]
                text = "".join(f"{line}\n" for line in kept).encode()
                write_atomic(self.path, lambda file: file.write(text))
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.board: Any = None
        """TensorBoard's writer, if there is one."""
        self._open = True
        if tensorboard:
            from guerdon.fit.tensorboard import EventWriter  # and with it TensorBoard's package

            purge = None if resume_step is None else resume_step + 1
            try:
                self.board = EventWriter(str(folder), purge_step=purge)
            except BaseException:
                self.close()
                raise
        self._resume_step = resume_step

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`: a whole line, or an error and none.

        What the run logged of this step before it was resumed is not repeated.
        """
        if step == self._resume_step and {"step", *values} in self._there:
            return
        line = (strict_json.dumps({"step": step, **values}) + "\n").encode()
        with storage_errors(self.path):
            append_whole(self._file, line)
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close; may be called again."""
        if not self._open:
            return
        self._open = False
        os.close(self._file)
        if self.board is not None:
            self.board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line torn by a kill
        return 1 << 62
