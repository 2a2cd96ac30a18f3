"""Which frames of a LeRobot data set show success: what its columns mean, and which frame a label belongs to.

A row holds the observation *before* the step and reward, success and done *after* it; the final observation
is not recorded. A label can therefore be read in two ways:

- `next`: it belongs to the next row's frame. That is what it was recorded for, but the last label of an
  episode has no frame and is lost. Where success ends the episode, that is the only positive.
- `row`: it belongs to the frame of its own row, which was taken one step earlier. Nothing is lost.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, FloatArray, display_path
from guerdon.data.files.bounds import one_line, parse_json, read_small
from guerdon.data.formats.lerobot.meta import OWN, Meta

log = logging.getLogger("guerdon")

LabelAt: TypeAlias = Literal["auto", "row", "next"]
Meaning: TypeAlias = Literal["frames", "outcome", "none"]

SUCCESS, REWARD, DONE, TRUNCATED = "next.success", "next.reward", "next.done", "next.truncated"
RECORDED, PROB = "recorded.", "prob_success"
"""Before the names of columns that were there before a reward model wrote its own, and one of these."""
OUTCOME_COLUMNS = ("is_success", "success", "next.is_success")
"""RLinf writes the outcome of the whole episode on every row."""
PROGRESS_COLUMNS = ("reward", "progress", "sparse_progress", "dense_progress")
"""opensarm writes progress from 0 to 1; it is no success of a frame, and no reward of an environment."""
_MAX_FILE = 16 << 20


@dataclass(frozen=True, kw_only=True)
class LabelChoice:
    """How labels are made; the same for every episode of a data set."""

    column: str | None
    """The column that they come from; None: no frame is labelled by a column."""
    meaning: Meaning
    """Of the column: a label of each frame, or the outcome of the whole episode."""
    at: Literal["row", "next"]
    why: str
    """Of all this, for the log."""
    outcomes: Mapping[int, bool] | None = None
    """Episode -> success, from a file; wins over the column."""
    progress: tuple[str, ...] = ()
    """Columns that are not taken for labels."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What each way to read the labels would lose."""

    episodes: int = 0
    with_success: int = 0
    only_last: int = 0
    """Episodes whose only positive label is in the last row."""
    last: int = 0
    """Episodes whose last label is positive."""
    first_positives: int = 0
    """Positive labels that follow a negative one: `row` puts them on the frame before success."""
    positives: int = 0


def count_labels(episodes: Iterable[NDArray[Any]]) -> Counts:
    """Count over the columns [T] of all episodes."""
    counts = dict.fromkeys(Counts.__dataclass_fields__, 0)
    for column in episodes:
        good: BoolArray = column >= 0.5
        counts["episodes"] += 1
        counts["with_success"] += bool(good.any())
        counts["last"] += bool(good[-1])
        counts["only_last"] += bool(good[-1]) and int(good.sum()) == 1
        counts["first_positives"] += int(np.count_nonzero(good[1:] & ~good[:-1]) + good[0])
        counts["positives"] += int(good.sum())
    return Counts(**counts)


def choose(
    meta: Meta,
    columns: Mapping[str, list[NDArray[Any]]],
    *,
    label_at: LabelAt = "auto",
    label_from: str = "auto",
    outcomes: Path | None = None,
) -> LabelChoice:
    """Decide once for a data set.

    Args:
        meta: the data set.
        columns: the columns that may hold labels -> their values [T] in each episode that can be read.
        label_at: `row` or `next`; `auto` decides by the data.
        label_from: the column that holds a label of each frame; `auto` decides.
        outcomes: a file that tells which episodes succeeded.
    """
    progress = tuple(name for name in PROGRESS_COLUMNS if name in columns)
    if outcomes is not None:
        return LabelChoice(
            column=None, meaning="none", at="row", progress=progress, outcomes=read_outcomes(outcomes),
            why=f"outcomes of episodes from {display_path(outcomes)}",
        )  # fmt: skip
    column, meaning, why = _meaning(columns, label_from)
    if meaning != "frames" or column is None:
        at: Literal["row", "next"] = "row"
    else:
        own = meta.own.get("label_at") in ("row", "next")
        at, because = (meta.own["label_at"], "as it was written") if own else _place(columns[column])
        if label_at != "auto":
            at, because = label_at, "as asked for"
        why += f"; label_at={at}: {because}"
    return LabelChoice(column=column, meaning=meaning, at=at, why=why, progress=progress)


def _meaning(columns: Mapping[str, list[NDArray[Any]]], wanted: str) -> tuple[str | None, Meaning, str]:
    if wanted != "auto":
        if wanted not in columns:
            raise DataError(f"has no column {wanted!r} of single numbers; it has {sorted(columns)}")
        return wanted, "frames", f"labels from {wanted!r}, as asked for"
    if PROB in columns:
        return _before_scores(columns)
    return _meaning_of(columns)


def _before_scores(columns: Mapping[str, list[NDArray[Any]]]) -> tuple[str | None, Meaning, str]:
    """The same where a reward model wrote rewards and successes: what was recorded, if there is any."""
    written = (PROB, SUCCESS, REWARD)
    before = {name.removeprefix(RECORDED): each for name, each in columns.items() if name not in written}
    column, meaning, why = _meaning_of(before)
    if column is None:
        return (
            SUCCESS,
            "frames",
            f"labels from {SUCCESS!r}, which a reward model wrote: nobody has checked them",
        )
    name = RECORDED + column if RECORDED + column in columns else column
    return name, meaning, f"{why}, as recorded; the present ones were written by a reward model"


def _meaning_of(columns: Mapping[str, list[NDArray[Any]]]) -> tuple[str | None, Meaning, str]:
    if SUCCESS in columns:
        return SUCCESS, "frames", f"labels from {SUCCESS!r}"
    for name in OUTCOME_COLUMNS:
        if name not in columns:
            continue
        if all(bool((each == each[0]).all()) for each in columns[name]):
            return (
                name,
                "outcome",
                f"{name!r} is the same on every row of an episode: it is taken for the outcome of the "
                "episode, not for labels of frames; the last frame of a success is labelled",
            )
        return name, "frames", f"labels from {name!r}, which changes within episodes"
    if REWARD in columns and all(bool(np.isin(each, (0, 1)).all()) for each in columns[REWARD]):
        return REWARD, "frames", f"labels from {REWARD!r}, which is 0 or 1 in every row"
    seen = [name for name in (REWARD, *PROGRESS_COLUMNS) if name in columns]
    told = f"{seen[0]!r} takes other values than 0 and 1 (a progress or a dense reward), and " if seen else ""
    return (
        None,
        "none",
        f"{told}no column tells success: episodes count neither as successes nor as failures. Give a file of "
        "outcomes (--outcomes FILE) or name a column (--label-from NAME)",
    )


def _place(column: list[NDArray[Any]]) -> tuple[Literal["row", "next"], str]:
    counts = count_labels(column)
    if 2 * counts.only_last >= max(1, counts.with_success):
        return "row", (
            f"in {counts.only_last} of {counts.with_success} successful episodes the last row alone is "
            "positive, and its next frame is not recorded"
        )
    return "next", "a row holds the frame before the step and the label after it"


def findings(choice: LabelChoice, column: list[NDArray[Any]] | None) -> list[tuple[str, str, str]]:
    """(level, check, message) for `data audit`: what each way to read the labels loses."""
    found = [
        (
            "warning",
            "labels",
            f"the column {name!r} looks like progress; it is not taken for labels "
            f"(--label-from {name} would do that)",
        )
        for name in choice.progress
        if name != choice.column
    ]
    if choice.meaning != "frames" or choice.outcomes is not None or column is None:
        level = "info" if choice.outcomes is not None else "warning"
        return [*found, (level, "labels", choice.why)]
    counts = count_labels(column)
    lost = (
        f"label_at=next loses the last label of every episode, {counts.last} of {counts.positives} positive "
        f"labels, and with them all success of {counts.only_last} of {counts.with_success} successes"
    )
    early = f"label_at=row puts {counts.first_positives} labels on the frame one step before success"
    is_bad = choice.at == "next" and counts.only_last > 0
    return [*found, ("warning" if is_bad else "info", "label_at", f"{choice.why}. {lost}; {early}")]


def frame_labels(
    choice: LabelChoice, index: int, column: NDArray[Any] | None, count: int
) -> tuple[FloatArray, bool, bool]:
    """(labels float32 [T] of all rows, whether the episode is a success, whether that is known)."""
    if choice.meaning == "frames" and choice.outcomes is None and column is not None:
        labels = column.astype(np.float32).reshape(count)
        return labels, bool((labels >= 0.5).any()), True
    outcome: bool | None = None
    if choice.outcomes is not None:
        outcome = choice.outcomes.get(index)
    elif choice.meaning == "outcome" and column is not None:
        outcome = bool(column[0] >= 0.5)
    labels = np.zeros(count, np.float32)
    labels[-1] = bool(outcome)
    return labels, bool(outcome), outcome is not None


def read_outcomes(path: Path) -> dict[int, bool]:
    """Episode -> success, from JSON (`{"0": true}` or `[{"episode_index": 0, "success": true}]`) or CSV."""
    shown = display_path(path)
    try:
        content = read_small(path, _MAX_FILE)
    except FileNotFoundError:
        raise DataError(f"{shown} does not exist") from None
    if path.suffix.lower() == ".csv":
        try:
            rows: Any = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig", "replace"), newline="")))
        except csv.Error as error:
            raise DataError(f"{shown}: cannot be read as CSV: {error}") from error
    else:
        rows = parse_json(content, shown)
    if isinstance(rows, dict):
        pairs = list(rows.items())
    elif isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        pairs = [(row.get("episode_index"), row.get("success")) for row in rows]
    else:
        raise DataError(f"{shown}: holds no outcomes: give episode_index and success of each episode")
    return {_episode(key, shown): _outcome(value, shown) for key, value in pairs}


def _episode(value: Any, shown: str) -> int:
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise DataError(f"{shown}: {one_line(value, 40)!r} is no episode_index")
    return int(text)


def _outcome(value: Any, shown: str) -> bool:
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    text = str(value).strip().lower() if isinstance(value, bool | int | float | str) else ""
    if text not in known:
        raise DataError(f"{shown}: {one_line(value, 40)!r} is no outcome; give true or false")
    return known[text]


def label_columns(meta: Meta) -> list[str]:
    """The columns of single numbers that can hold labels, or were recorded beside them."""
    plain = [
        name
        for name, each in meta.features.items()
        if each.width == 1 and not each.is_camera and each.dtype not in ("string", "language")
    ]
    counters = ("timestamp", "frame_index", "episode_index", "index", "task_index")
    return [name for name in plain if name not in counters and not name.startswith(f"{OWN}.")]
