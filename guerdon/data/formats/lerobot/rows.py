"""What an episode becomes in LeRobot's layout: features, the rows of its table, its facts.

A row holds the frame of a step and the label of that frame, so labels are to be read with `label_at=row`,
which `info.json` tells. The action of a row is the one that was chosen in it: that of the next step. The last
row repeats its own; what was before the first row is noted in `meta/episodes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import Episode
from guerdon.data.formats.lerobot import encoding, labels, stats
from guerdon.data.formats.lerobot.meta import OWN, camera_of

CAMERA_PREFIX = "observation.images."
STATE, ACTION, INTENDED, TERMINATED = "observation.state", "action", f"{OWN}.intended", f"{OWN}.terminated"
COUNTERS = ("frame_index", "episode_index", "index", "task_index")
FLAGS = {labels.TRUNCATED: "truncated", TERMINATED: "terminated"} | {
    f"{OWN}.{name}": name for name in ("is_grasped", "at_rest")
}
_TYPES = {"float32": pa.float32(), "int64": pa.int64(), "bool": pa.bool_()}
_IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


def feature_of(camera: str) -> str:
    """The name of a camera's feature, which must not have a slash."""
    return CAMERA_PREFIX + camera.replace("%", "%25").replace("/", "%2F")


def features_of(episode: Episode, *, videos: bool, fps: int) -> dict[str, Any]:
    """`features` of `info.json` for episodes like this one."""
    made: dict[str, Any] = {}
    for camera, shape in episode.camera_shapes.items():
        if camera_of(feature_of(camera)) != camera:
            raise DataError(f"the camera {camera!r} has no name that LeRobot takes")
        about: dict[str, Any] = {
            "dtype": "video" if videos else "image",
            "shape": list(shape),
            "names": ["height", "width", "channels"],
        }
        if videos:
            encoding.check_frames(camera, shape)
            about["info"] = encoding.facts(shape, fps)
        made[feature_of(camera)] = about
    for name, values in ((STATE, episode.states), (ACTION, episode.actions), (INTENDED, episode.intended)):
        if values is not None:
            if not values.shape[1]:
                raise DataError(f"has {name} without a number")
            made[name] = {"dtype": "float32", "shape": [values.shape[1]], "names": None}
    one = {"shape": [1], "names": None}
    made[labels.REWARD] = {"dtype": "float32", **one}
    for name in (labels.SUCCESS, labels.DONE):
        made[name] = {"dtype": "bool", **one}
    for name, field in FLAGS.items():
        if getattr(episode, field) is not None:
            made[name] = {"dtype": "bool", **one}
    made["timestamp"] = {"dtype": "float32", **one}
    return made | {name: {"dtype": "int64", **one} for name in COUNTERS}


def columns_of(episode: Episode, fps: int) -> dict[str, NDArray[Any]]:
    """The numbers of all rows, [T, width]; counters that depend on other episodes are 0."""
    count = episode.num_frames
    steps = np.arange(count)
    ends = steps == count - 1
    for flags in (episode.terminated, episode.truncated):
        if flags is not None:
            ends = ends | flags
    rewards = episode.labels if episode.env_rewards is None else episode.env_rewards
    made: dict[str, NDArray[Any]] = {}
    if episode.states is not None:
        made[STATE] = episode.states
    if episode.actions is not None:
        made[ACTION] = np.concatenate([episode.actions[1:], episode.actions[-1:]])
    if episode.intended is not None:
        made[INTENDED] = episode.intended
    made[labels.REWARD] = rewards.astype(np.float32)
    made[labels.SUCCESS] = episode.labels >= 0.5
    made[labels.DONE] = ends
    for name, field in FLAGS.items():
        if (values := getattr(episode, field)) is not None:
            made[name] = values
    made["timestamp"] = (steps / fps).astype(np.float32)
    made["frame_index"] = steps.astype(np.int64)
    made |= {name: np.zeros(count, np.int64) for name in COUNTERS if name not in made}
    return {name: values.reshape(count, -1) for name, values in made.items()}


def facts_of(episode: Episode, columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """What `meta/episodes` tells of an episode, and its statistics; plain values."""
    made = {name: stats.of_numbers(values) for name, values in columns.items()}
    made |= {feature_of(camera): stats.of_frames(frames) for camera, frames in episode.frames.items()}
    first = episode.actions
    return {
        "length": episode.num_frames,
        "own": {
            "success": bool(episode.success),
            "complete": bool(episode.complete),
            "seed": episode.seed,
            "source": episode.source,
            "split": episode.split,
            "initial_state": None if episode.initial_state is None else episode.initial_state.tolist(),
            "initial_action": None if first is None else first[0].tolist(),
        },
        "stats": {name: {k: v.tolist() for k, v in each.items()} for name, each in made.items()},
    }


def schema_of(features: Mapping[str, Any]) -> pa.Schema:
    """Of the rows, with what Hugging Face's `datasets` wants to know."""
    fields: list[pa.Field] = []
    known: dict[str, Any] = {}
    for name, about in features.items():
        if about["dtype"] == "video":
            continue
        if about["dtype"] == "image":
            fields.append(pa.field(name, _IMAGE))
            known[name] = {"_type": "Image"}
            continue
        kind, width = _TYPES[about["dtype"]], about["shape"][0]
        value = {"dtype": about["dtype"], "_type": "Value"}
        fields.append(pa.field(name, kind if width == 1 else pa.list_(kind, width)))
        known[name] = value if width == 1 else {"feature": value, "length": width, "_type": "Sequence"}
    metadata = {"huggingface": json.dumps({"info": {"features": known}})}
    return pa.schema(fields, metadata)


def table_of(episode: Episode, columns: Mapping[str, NDArray[Any]], features: Mapping[str, Any]) -> pa.Table:
    """The rows of an episode, with pictures as PNG where they are not in videos."""
    schema = schema_of(features)
    cameras = {feature_of(camera): frames for camera, frames in episode.frames.items()}
    arrays = []
    for field in schema:
        if field.name in cameras:
            cells = [
                {"bytes": encoding.png(image), "path": f"frame-{step:06d}.png"}
                for step, image in enumerate(cameras[field.name])
            ]
            arrays.append(pa.array(cells, field.type))
            continue
        values = columns[field.name]
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        is_list = pa.types.is_fixed_size_list(field.type)
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if is_list else flat)
    return pa.Table.from_arrays(arrays, schema=schema)
