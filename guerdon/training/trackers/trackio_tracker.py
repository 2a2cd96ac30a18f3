"""Trackio: local, in `TRACKIO_DIR`, unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` is set."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from guerdon.training.trackers.base import Row, TrackedRun, Tracker, stdout_to_stderr


class TrackioTracker(Tracker):
    """A run of Trackio, which finds runs by their names."""

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        """Start under a name that no other run has, or go on with the run of that name."""
        import trackio

        self.run_id = run.run_id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        with stdout_to_stderr():
            self._run: Any = trackio.init(
                project=run.project,
                name=self.run_id,
                config=dict(run.config),
                resume="never" if run.run_id is None else "allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, rows: Sequence[Row]) -> None:
        """One entry for each."""
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def picture(self, name: str, path: Path, step: int) -> None:
        """As an image."""
        import trackio

        self._run.log({name: trackio.Image(path)}, step=step)

    def film(self, name: str, path: Path, step: int) -> None:
        """As a video."""
        import trackio

        self._run.log({name: trackio.Video(path)}, step=step)

    def files(self, paths: Sequence[Path]) -> None:
        """As a version of an artifact of the run."""
        import trackio

        artifact = trackio.Artifact(f"{self.run_id}-files", type="guerdon-run")
        for path in paths:
            artifact.add_file(path, name=path.name)
        self._run.log_artifact(artifact)

    def close(self, *, finished: bool) -> None:
        """Wait until everything is written."""
        with stdout_to_stderr():
            self._run.finish()
