"""The folder of a run: made exclusively, used by one run at a time, with its settings and its summary."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guerdon.config import GuerdonConfig, to_plain
from guerdon.config.yaml_files import to_yaml
from guerdon.core import portable, strict_json
from guerdon.core.atomic import clear_stale, make_directory, storage_errors, write_atomic
from guerdon.core.errors import StorageError
from guerdon.core.types import display_path

LOCK = ".run.lock"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"
"""Only a run that came to its end has it."""


def new_run_folder(root: Path) -> Path:
    """A new `<root>/<timestamp>`; of runs that begin in the same second each gets one of its own."""
    make_directory(root)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = root / (stamp if number == 1 else f"{stamp}-{number}")
        with storage_errors(folder):
            try:
                folder.mkdir()
            except FileExistsError:
                continue
        return folder
    raise AssertionError  # counting does not end


@contextmanager
def run_folder(config: GuerdonConfig) -> Iterator[Path]:
    """`runner.logger.log_path`, or a new `<output_dir>/<experiment>/<timestamp>`; for this run alone."""
    runner = config.runner
    if runner.logger.log_path is not None:
        folder = make_directory(Path(runner.logger.log_path))
    else:
        folder = new_run_folder(Path(runner.output_dir) / runner.experiment_name)
    with held(folder):
        yield folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; the kernel lets them in again if this process dies.

    Raises:
        StorageError: another run is in it.
    """
    with storage_errors(folder / LOCK):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            portable.lock(handle, wait=False)
        except BlockingIOError:
            raise StorageError(
                f"{display_path(folder)} is used by a run that is not over: choose another folder "
                "(runner.logger.log_path), or wait for its end"
            ) from None
        except OSError:  # a file system without locks
            pass
        clear_stale(folder)
        clear_stale(folder / CHECKPOINTS, below=True)
        yield
    finally:
        os.close(handle)


def write_config(folder: Path, config: Any) -> None:
    """The resolved settings, as `config.yaml`."""
    write_atomic(folder / "config.yaml", to_yaml(to_plain(config)))


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """What came of the run, as `summary.json`."""
    write_atomic(folder / SUMMARY, strict_json.dumps(summary, indent=1))
