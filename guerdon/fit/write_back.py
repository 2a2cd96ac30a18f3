"""Learned rewards written into a copy of a data set of LeRobot: `guerdon reward score --write-back`.

A row of LeRobot holds the frame before a step, and `next.reward` and `next.success` what came after it: the
frame of the next row. The frame after the last row is not recorded; what its own frame gets stands there.
`prob_success` is that of the row's own frame. What was recorded stays, as `recorded.next.reward` and
`recorded.next.success`.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from guerdon.core.atomic import write_atomic
from guerdon.core.errors import DataError
from guerdon.core.images import stack_rows
from guerdon.core.progress import progress
from guerdon.core.types import FloatArray, display_path
from guerdon.data.formats.lerobot import LeRobotData, add_columns
from guerdon.data.formats.lerobot.columns import check_copy
from guerdon.data.formats.lerobot.labels import PROB, RECORDED, REWARD, SUCCESS, LabelAt
from guerdon.data.formats.lerobot.meta import EpisodePlace, is_lerobot
from guerdon.rewards.image.scorer import MINI_BATCH, RewardManager
from guerdon.rewards.relabel import fires, map_rewards

PROGRESS_FILE, PROGRESS = "guerdon_progress.parquet", "progress_sparse"
"""As LeRobot's reward models leave theirs beside a data set: `sarm_progress.parquet` and others."""
COUNTERS = ("index", "episode_index", "frame_index")


def write_back(
    manager: RewardManager, source: Path, target: Path, *, label_at: LabelAt = "auto"
) -> dict[str, Any]:
    """Score all frames of a data set and write a copy of it with the rewards.

    Args:
        manager: the reward model; its `reward` section maps probabilities to rewards.
        source: a data set of LeRobot; the copy is of the same version.
        target: a new folder.
        label_at: `next`: rewards belong to the next row's frame, as LeRobot records them; `row`: to the
            row's own; `auto`: as the labels of the data set do, `next` if it has none.

    Returns:
        What was done, in plain values.
    """
    if not is_lerobot(source):
        raise DataError(f"{display_path(source)} is no data set of LeRobot; --write-back copies such alone")
    if manager.contract.only_at_rest:
        raise DataError(
            "the model scores robots at rest alone (reward.model.only_at_rest), and the rows of "
            f"{display_path(source)} would get no reward in motion: score it with --out"
        )
    check_copy(source, target)
    with closing(LeRobotData(source)) as data:
        _check(data, manager)
        counters, recorded = _counters(data), _recorded(data)  # what is missing is told before scoring
        place = label_at
        if place == "auto":
            place = data.choice.at if data.choice.meaning == "frames" else "next"
        columns: dict[str, dict[int, NDArray[Any]]] = {REWARD: {}, SUCCESS: {}, PROB: {}}
        began = time.perf_counter()
        for number, episode in enumerate(progress(data.meta.episodes, "scoring", unit="episode")):
            try:
                prob = _scored(manager, data, number, episode.length)
            except DataError as error:
                file = display_path(episode.data)
                raise DataError(f"{file}: episode {episode.index} cannot be scored: {error}") from error
            led_to = np.minimum(np.arange(len(prob)) + (place == "next"), len(prob) - 1)
            columns[PROB][episode.index] = prob
            columns[REWARD][episode.index] = map_rewards(prob, manager.cfg, manager.threshold)[led_to]
            columns[SUCCESS][episode.index] = fires(prob, manager.threshold)[led_to]
        seconds = time.perf_counter() - began
        finish = partial(_write_progress, counters, columns[PROB], manager.source)
        add_columns(source, target, {**columns, **recorded}, finish=finish)
    every = np.concatenate(list(columns[PROB].values()))
    return {
        "frames": len(every),
        "episodes": len(columns[PROB]),
        "threshold": manager.threshold,
        "fires": int(fires(every, manager.threshold).sum()),
        "mean_probability": float(every.mean()),
        "frames_per_second": round(len(every) / max(seconds, 1e-9), 1),
        "label_at": place,
        "columns": [*columns, f"{PROGRESS_FILE}: {PROGRESS}"],
        "out": str(target),
    }


def _check(data: LeRobotData, manager: RewardManager) -> None:
    shown, meta = display_path(data.root), data.meta
    if meta.faults:
        raise DataError(
            f"{shown}: {len(meta.faults)} of its files cannot be read, the first: {meta.faults[0].path}: "
            f"{meta.faults[0].reason}"
        )
    if not meta.episodes:
        raise DataError(f"{shown} has no episodes")
    absent = [camera for camera in manager.image_keys if camera not in meta.cameras]
    if absent:
        raise DataError(f"{shown} has no camera {absent[0]!r}, only {sorted(meta.cameras)}")
    absent = [name for name in (*COUNTERS, "timestamp") if name not in meta.features]
    if absent:
        raise DataError(f"{shown} has no feature {absent[0]!r}, which every data set of LeRobot has")


def _numbers(data: LeRobotData, place: EpisodePlace, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Columns of an episode, [T] each."""
    try:
        return {name: each.reshape(-1) for name, each in data.numbers(place, list(names)).items()}
    except DataError as error:
        file = display_path(place.data)
        raise DataError(f"{file}: episode {place.index} cannot be scored: {error}") from error


def _counters(data: LeRobotData) -> dict[int, dict[str, NDArray[Any]]]:
    """Episode -> the counters of its rows, int64 [T] each."""
    found = {place.index: _numbers(data, place, (*COUNTERS, "timestamp")) for place in data.meta.episodes}
    return {index: {name: each[name].astype(np.int64) for name in COUNTERS} for index, each in found.items()}


def _scored(manager: RewardManager, data: LeRobotData, number: int, length: int) -> FloatArray:
    """Probabilities of the frames of an episode, float32 [T]."""
    count, parts = manager.contract.num_frames, []
    for start in range(0, length, MINI_BATCH):
        steps = np.arange(start, min(start + MINI_BATCH, length))
        frames = {}
        for camera in manager.image_keys:
            if count == 1:
                frames[camera] = data.frames(number, camera, steps)
            else:
                wanted = stack_rows(steps, steps, count)
                kept, places = np.unique(wanted, return_inverse=True)
                frames[camera] = data.frames(number, camera, kept)[places.reshape(wanted.shape)]
        parts.append(manager.score(frames).prob_success)
    return np.concatenate(parts)


def _recorded(data: LeRobotData) -> dict[str, dict[int, NDArray[Any]]]:
    """Rewards and successes that the data set has, under other names; an earlier copy has done it already."""
    features = data.meta.features
    if PROB in features:
        return {}
    kept: dict[str, dict[int, NDArray[Any]]] = {}
    for name, kind in ((REWARD, np.float32), (SUCCESS, np.bool_)):
        if name in features:
            kept[RECORDED + name] = {
                place.index: _numbers(data, place, (name,))[name].astype(kind) for place in data.meta.episodes
            }
    return kept


def _write_progress(
    counters: dict[int, dict[str, NDArray[Any]]], prob: dict[int, FloatArray], model: str, folder: Path
) -> None:
    """The probabilities as LeRobot's sample weighting reads progress."""
    parts = [pa.table({**each, PROGRESS: prob[index]}) for index, each in counters.items()]
    table = pa.concat_tables(parts).sort_by("index")
    table = table.replace_schema_metadata({"reward_model_path": model})
    write_atomic(folder / PROGRESS_FILE, lambda stream: pq.write_table(table, stream))
