"""Metrics to `metrics.jsonl` and TensorBoard; resuming cuts off what came after the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from guerdon import strict_json
from guerdon.store.atomic import storage_errors, write_atomic


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
            self._file = self.path.open("a")
        self.board: Any = None
        """TensorBoard's writer, if there is one."""
        if tensorboard:
            from tensorboardX import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self.board = SummaryWriter(str(folder), purge_step=purge)
        self._resume_step = resume_step

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`, unless the run told the same of this step before it was resumed."""
        if step == self._resume_step and {"step", *values} in self._there:
            return
        with storage_errors(self.path):
            self._file.write(strict_json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self.board is not None:
            self.board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line torn by a kill
        return 1 << 62
