"""`guerdon data view`: episodes of a data set or the films of a run, as a page or a Rerun recording."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from guerdon.cli.data import format_to_read
from guerdon.cli.verb import Result
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path
from guerdon.monitoring.rerun_file import require_rerun, write_recording
from guerdon.monitoring.view_page import write_page
from guerdon.monitoring.views import episodes_at


def view_verb(arguments: argparse.Namespace) -> Result:
    """Write the episodes at a path for people to look at."""
    if arguments.rerun:
        require_rerun()  # before anything is read
    for name, least in (("episodes", 1), ("skip", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, not {getattr(arguments, name)}")
    wanted, without = (".rrd", "") if arguments.rerun else (".html", " without --rerun")
    out = arguments.out or Path(f"view{wanted}")
    if out.suffix != wanted:
        raise ConfigError(f"--out must end in {wanted}{without}, not {display_path(out)}")
    scorer = None
    if arguments.checkpoint is not None:
        from guerdon.monitoring.assess import load_manager  # imports torch

        scorer = load_manager(arguments.checkpoint)
    episodes = episodes_at(
        arguments.path,
        format=format_to_read(arguments, arguments.path),
        scorer=scorer,
        limit=arguments.episodes,
        skip=arguments.skip,
    )
    title = display_path(arguments.path)
    if arguments.rerun:
        recorded = write_recording(out, episodes, title)
        count, frames = recorded.num_episodes, recorded.num_frames
    else:
        count, frames = write_page(out, episodes, title)
    values = {"path": str(arguments.path), "out": str(out), "num_episodes": count, "num_frames": frames}
    steps = [shlex.join(["rerun", display_path(out)])] if arguments.rerun else []
    return Result(values, [f"{count} episodes, {frames} frames -> {display_path(out)}"], next_steps=steps)
