"""The command `guerdon`: a file for each group of verbs, a table of them in `main.py`."""

from __future__ import annotations

from typing import NoReturn


def command() -> NoReturn:
    """The program that the package installs."""
    from guerdon.cli.main import command

    command()
