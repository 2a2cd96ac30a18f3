"""Trackers: the table of them, and `Trackers`, which shows a run's folder to those that a config names."""

from __future__ import annotations

from guerdon.training.trackers.base import Row, TrackedRun, Tracker
from guerdon.training.trackers.run import TRACKERS, Trackers, require_trackers, send_files

__all__ = ["TRACKERS", "Row", "TrackedRun", "Tracker", "Trackers", "require_trackers", "send_files"]
