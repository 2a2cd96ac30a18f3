"""`TrainingResult`: how far an agent is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guerdon.core.types import display_path
from guerdon.training.evaluation import Evaluation


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How far an agent is."""

    env_steps: int
    """All environments together."""
    seconds: float
    """Of training."""
    stopped: str | None
    """Why the last `learn` ended early; None: it did not."""
    alarms: tuple[str, ...]
    """Of the monitor."""
    evaluations: tuple[Evaluation, ...]
    folder: Path | None
    """Where metrics and checkpoints are; None: nothing is kept."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return {
            **vars(self),
            "alarms": list(self.alarms),
            "evaluations": [each.to_dict() for each in self.evaluations],
            "folder": None if self.folder is None else str(self.folder),
        }

    def __str__(self) -> str:
        lines = [f"{self.env_steps} environment steps in {self.seconds:.1f} s"]
        lines += [] if self.stopped is None else [f"stopped: {self.stopped}"]
        count = len(self.alarms)
        lines += [f"{count} alarms; the last: {self.alarms[-1]}"] if count else []
        count = len(self.evaluations)
        lines += [f"{count} evaluations; the last: {self.evaluations[-1]}"] if count else []
        return "\n".join([*lines, *([] if self.folder is None else [f"-> {display_path(self.folder)}"])])

    def __repr__(self) -> str:
        facts = f"env_steps={self.env_steps}, alarms={len(self.alarms)}, evaluations={len(self.evaluations)}"
        return f"TrainingResult({facts}, stopped={self.stopped!r}, folder={self.folder})"
