"""Errors that a user can act on; the command prints them in a line or two, without a traceback."""

from __future__ import annotations


class GuerdonError(Exception):
    """Something is wrong that the user can put right; the message says what and where."""


class ConfigError(GuerdonError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class DataError(GuerdonError):
    """A file or an array does not hold what it should; the message names it."""


class UnsafeDataError(DataError):
    """A file asks for code to be run when it is read; it was refused."""


class StorageError(GuerdonError):
    """Writing failed (full disk, missing permission); what was finished before is safe."""


class WorkerError(GuerdonError):
    """A worker process died, stopped answering, or was never met; the message says which one."""
