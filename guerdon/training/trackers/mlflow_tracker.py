"""MLflow: at `MLFLOW_TRACKING_URI`, through its client alone (`mlflow-skinny`)."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from guerdon.core.errors import ConfigError
from guerdon.data.files.bounds import one_line
from guerdon.training.trackers.base import Row, TrackedRun, Tracker, flat_settings

log = logging.getLogger("guerdon")

MAX_PARAMS, MAX_PARAM_CHARACTERS, MAX_NAME_CHARACTERS = 100, 6000, 250
"""Of one call, of one value, and of its name; MLflow refuses more."""


class MlflowTracker(Tracker):
    """A run of MLflow; the project is an experiment there."""

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    max_rows: ClassVar[int] = 500
    max_numbers: ClassVar[int] = 1000  # MLflow refuses more

    def __init__(self, run: TrackedRun) -> None:
        """Start with the settings as parameters, or go on with the run of that id."""
        self._client = _client()
        found = None if run.run_id is None else self._resumed(run.run_id, adds_files=run.adds_files)
        self._keeps_state = run.adds_files and found is not None
        if found is not None:
            self.run_id = found
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        )
        self.run_id = str(self._client.create_run(number, run_name=run.name).info.run_id)
        self._log_settings(run)

    def _resumed(self, run_id: str, *, adds_files: bool) -> str | None:
        from mlflow.exceptions import MlflowException

        try:
            if adds_files:
                self._client.get_run(run_id)
            else:
                self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("mlflow has no run %s any more: a new one is started", run_id)
            return None
        return run_id

    def _log_settings(self, run: TrackedRun) -> None:
        from mlflow.entities import Param

        settings = [
            Param(legal_name(key), str(value)[:MAX_PARAM_CHARACTERS])
            for key, value in flat_settings(run.config)
        ]
        for start in range(0, len(settings), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=settings[start : start + MAX_PARAMS])

    def log(self, rows: Sequence[Row]) -> None:
        """In one call, which MLflow takes as a whole or refuses; names as `legal_name` makes them."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(legal_name(name), value, now, step)
            for step, values in rows
            for name, value in values.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def picture(self, name: str, path: Path, step: int) -> None:
        """As an artifact, in a folder of its name and step."""
        self._client.log_artifact(self.run_id, str(path), f"{name}/step_{step}")

    film = picture

    def files(self, paths: Sequence[Path]) -> None:
        """As artifacts of the run."""
        for path in paths:
            self._client.log_artifact(self.run_id, str(path))

    def close(self, *, finished: bool) -> None:
        """Say how the run ended; one that only got files is as it was."""
        if self._keeps_state:
            return
        self._client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")


def legal_name(name: str) -> str:
    """The name of a metric or setting as MLflow allows it.

    A checksum of the whole name ends one that had to be changed: `loss(q)` and `loss[q]` stay apart, and have
    the same names in all runs.
    """
    parts = re.sub(r"[^\w\-. /:]", "_", name).split("/")
    legal = "/".join("_" if part in ("", ".", "..") else part for part in parts)  # it may become a path
    if legal == name and len(name) <= MAX_NAME_CHARACTERS:
        return name
    checksum = xxhash.xxh32_hexdigest(name)
    return f"{legal[: MAX_NAME_CHARACTERS - len(checksum) - 1]}-{checksum}"


def _client() -> Any:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient, get_tracking_uri

    try:
        return MlflowClient()
    except (MlflowException, ImportError) as error:  # a database, and the small package cannot use one
        raise ConfigError(
            f"mlflow cannot keep runs at {get_tracking_uri()}: {one_line(str(error).strip(), 160)} "
            "Set MLFLOW_TRACKING_URI to a server (http://...), or `pip install mlflow` for a local database"
        ) from error
