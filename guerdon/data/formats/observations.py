"""The observation dicts of the documents' pickles: `main_images`, `states` and further views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guerdon.core.errors import DataError
from guerdon.core.types import Episode, FloatArray, UInt8Array
from guerdon.data.files.bounds import Allowance, as_array
from guerdon.data.formats.common import BASE_CAMERA, camera_name, require, stack_images, to_vectors

_MORE_VIEWS = {"wrist_images": "wrist_camera", "extra_view_images": "extra_view"}


def frames_from(
    observations: Sequence[Any], room: Allowance, main_camera: str = BASE_CAMERA
) -> dict[str, UInt8Array]:
    """Camera -> uint8 [T, H, W, C].

    `main_images` is the camera `main_camera`. `wrist_images` and `extra_view_images` are a dict of images by
    camera, one image, or an array of several views, which are then numbered. `room` is what the file may
    still give; the caller has counted the steps.
    """
    steps = [_views(observation, step, main_camera, room) for step, observation in enumerate(observations)]
    if not steps:
        raise DataError("has no frames")
    for step, views in enumerate(steps):
        missing = sorted(steps[0].keys() - views.keys()) or sorted(views.keys() - steps[0].keys())
        if missing:
            raise DataError(f"missing camera key: {missing[0]!r} is in some frames only (see frame {step})")
    return {camera: stack_images([views[camera] for views in steps], camera, room) for camera in steps[0]}


def _views(observation: Any, step: int, main_camera: str, room: Allowance) -> dict[str, Any]:
    views = {main_camera: require(observation, "main_images", f"missing camera key: frame {step}")}
    for key, camera in _MORE_VIEWS.items():
        value = observation.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            room.take_steps(len(value))
            views.update((camera_name(name), image) for name, image in value.items())
            continue
        array = as_array(value)
        if array.ndim == 4 and len(array) > 1:
            room.take_steps(len(array))
            views.update((f"{camera}_{index}", image) for index, image in enumerate(array))
        else:
            views[camera] = array
    return views


def states_from(observations: Sequence[Any], room: Allowance) -> FloatArray | None:
    """float32 [T, S], or None if there are no states."""
    return to_vectors([item.get("states") for item in observations], len(observations), "states", room)


def observation_at(episode: Episode, step: int) -> dict[str, Any]:
    """The observation dict of one frame; views beyond the first camera by name under `extra_view_images`."""
    main, *others = episode.frames
    observation: dict[str, Any] = {
        "main_images": episode.frames[main][step],
        "states": None if episode.states is None else episode.states[step],
    }
    if others:
        observation["extra_view_images"] = {camera: episode.frames[camera][step] for camera in others}
    return observation
