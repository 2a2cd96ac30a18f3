"""Hypothesis strategies for episodes, and exact comparison of two of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from guerdon.core.types import Episode

CAMERAS = ("base_camera", "wrist_camera", "front view", "links/oben ä")
FLAGS = ("terminated", "truncated", "is_grasped")
SOURCES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
FLOATS = st.floats(-1e6, 1e6, width=32)
ALL_FIELDS = tuple(item.name for item in fields(Episode))


@st.composite
def episodes(draw: st.DrawFn, *, cameras: tuple[str, ...] | None = None, soft_labels: bool = True) -> Episode:
    """Any episode: random length, image sizes, one or two cameras, each optional field there or not.

    Args:
        draw: hypothesis' own.
        cameras: their names; None draws one or two.
        soft_labels: whether labels may lie between 0 and 1.
    """
    count = draw(st.integers(1, 5))
    if cameras is None:
        cameras = tuple(draw(st.lists(st.sampled_from(CAMERAS), min_size=1, max_size=2, unique=True)))
    frames = {camera: draw(_images(count)) for camera in cameras}
    hard = st.sampled_from([0.0, 1.0])
    label = st.one_of(hard, st.floats(0.0, 1.0, width=32)) if soft_labels else hard
    labels = draw(hnp.arrays(np.float32, count, elements=label))
    size = draw(st.integers(1, 4))
    optional: dict[str, Any] = {
        "actions": hnp.arrays(np.float32, (count, draw(st.integers(1, 4))), elements=FLOATS),
        "states": hnp.arrays(np.float32, (count, size), elements=FLOATS),
        "initial_state": hnp.arrays(np.float32, size, elements=FLOATS),
        "env_rewards": hnp.arrays(np.float32, count, elements=FLOATS),
        **{name: hnp.arrays(np.bool_, count) for name in FLAGS},
        "seed": st.integers(0, 2**40),
    }
    return Episode(
        frames=frames,
        labels=labels,
        success=bool((labels >= 0.5).any()) or draw(st.booleans()),
        source=draw(SOURCES),
        split=draw(st.sampled_from(["", "train", "val", "test"])),
        complete=draw(st.booleans()),
        **{name: draw(st.none() | value) for name, value in optional.items()},
    )


@st.composite
def _images(draw: st.DrawFn, count: int) -> Any:
    height, width, channels = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.sampled_from([1, 3]))
    seed = draw(st.integers(0, 2**32 - 1))
    shape = (count, height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def assert_same(have: Any, want: Episode, names: tuple[str, ...] = ALL_FIELDS) -> None:
    """Exact equality of the named fields, types included."""
    assert isinstance(have, Episode), have
    for name in names:
        left, right = getattr(have, name), getattr(want, name)
        if name == "frames":
            assert set(left) == set(right)
            pairs = [(left[camera], right[camera]) for camera in right]
        else:
            pairs = [(left, right)]
        for one, other in pairs:
            if isinstance(other, np.ndarray):
                assert one is not None, name
                assert one.dtype == other.dtype, name
                np.testing.assert_array_equal(one, other, err_msg=name)
            else:
                assert one == other, name
                assert type(one) is type(other), name
