"""Weights & Biases: `WANDB_MODE=offline`, `WANDB_ENTITY` and its other variables count as usual."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from guerdon.training.trackers.base import Row, TrackedRun, Tracker

STEP = "step"
"""The x axis of all charts; W&B's own step only counts calls, and goes up alone."""


class WandbTracker(Tracker):
    """A run of Weights & Biases; its local files are in the run's folder."""

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        """Start, or go on with the run of that id."""
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume=None if run.run_id is None else "allow",
            dir=str(run.folder),
            config=dict(run.config),
            allow_val_change=True,  # a resumed run may have other settings
            reinit="create_new",
            settings=wandb.Settings(console="off"),
        )
        self.run_id = str(self._run.id)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, rows: Sequence[Row]) -> None:
        """One row of its history for each."""
        for step, values in rows:
            self._run.log({STEP: step, **values})

    def picture(self, name: str, path: Path, step: int) -> None:
        """As an image panel."""
        import wandb

        self._run.log({STEP: step, name: wandb.Image(str(path))})

    def film(self, name: str, path: Path, step: int) -> None:
        """As a video panel."""
        import wandb

        kind: Literal["gif", "mp4"] = "gif" if path.suffix.lower() == ".gif" else "mp4"
        self._run.log({STEP: step, name: wandb.Video(str(path), format=kind)})

    def files(self, paths: Sequence[Path]) -> None:
        """As a version of an artifact of the run."""
        import wandb

        artifact = wandb.Artifact(f"run-{self.run_id}-files", type="guerdon-run")
        for path in paths:
            artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)

    def close(self, *, finished: bool) -> None:
        """Waits until everything is uploaded."""
        self._run.finish(exit_code=0 if finished else 1)
