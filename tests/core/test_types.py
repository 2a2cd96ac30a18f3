"""The records check their shapes; the image conversion knows every dialect."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from guerdon.core.errors import DataError
from guerdon.core.images import to_uint8_hwc, to_unit_chw
from guerdon.core.types import Episode, FrameBatch, RewardLabels, is_positive


def make(steps=4, **changes):
    values = {
        "frames": {"base_camera": np.zeros((steps, 8, 6, 3), np.uint8)},
        "labels": np.zeros(steps, np.float32),
        "success": False,
    }
    return Episode(**{**values, **changes})


def test_an_episode_knows_its_size():
    episode = make(labels=np.array([0, 0, 1, 1], np.float32), success=True)
    assert (episode.num_frames, episode.num_positive_frames) == (4, 2)
    assert episode.camera_shapes == {"base_camera": (8, 6, 3)}


def test_an_episode_is_frozen():
    with pytest.raises(FrozenInstanceError):
        make().success = True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.zeros(5, np.float32)}, r"frames\['base_camera'\] must have shape \[5, \*, \*, \*\]"),
        ({"labels": np.zeros(4)}, "labels must be float32, not float64"),
        ({"labels": [0, 0, 0, 0]}, "must be a numpy array, not list"),
        ({"labels": np.array([0, np.nan, 0, 0], np.float32)}, r"must lie in \[0, 1\]"),
        ({"labels": np.array([0, 2, 0, 0], np.float32)}, r"must lie in \[0, 1\]"),
        ({"labels": np.zeros(0, np.float32)}, "no frames"),
        ({"frames": {}}, "at least one camera"),
        ({"frames": {"c": np.zeros((4, 0, 3, 3), np.uint8)}}, "empty image"),
        ({"frames": {"c": np.zeros((4, 8, 6, 3), np.float32)}}, "must be uint8"),
        ({"actions": np.zeros((3, 2), np.float32)}, r"actions must have shape \[4, \*\], not \[3, 2\]"),
        ({"terminated": np.zeros(4, np.int64)}, "terminated must be bool"),
        ({"split": "dev"}, "split must be one of"),
    ],
)
def test_a_wrong_field_is_named(changes, message):
    with pytest.raises(DataError, match=message):
        make(**changes)


def test_a_batch_must_have_as_many_labels_as_frames():
    labels = RewardLabels(
        labels=np.zeros(3, np.float32), episode=np.zeros(3, np.int64), step=np.zeros(3, np.int64)
    )
    assert len(FrameBatch(frames={"c": np.zeros((3, 4, 4, 3), np.uint8)}, labels=labels)) == 3
    with pytest.raises(DataError, match=r"must have shape \[3"):
        FrameBatch(frames={"c": np.zeros((2, 4, 4, 3), np.uint8)}, labels=labels)


@pytest.mark.parametrize(
    ("labels", "once", "expected"), [([0, 0.4], False, False), ([0, 0.5], False, True), ([0, 0], True, True)]
)
def test_the_documents_rule_for_positive(labels, once, expected):
    assert is_positive(np.array(labels), once) is expected


@pytest.fixture
def picture():
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize("kind", ["uint8", "unit", "byte", "half"])
@pytest.mark.parametrize("batch", [False, True])
def test_every_dialect_becomes_the_same_image(picture, wrap, layout, kind, batch):
    source = {
        "uint8": picture,
        "unit": (picture / 255).astype(np.float32),
        "byte": picture.astype(np.float32),
        "half": picture.astype(np.float16),
    }[kind]
    if layout == "chw":
        source = np.moveaxis(source, -1, 0)
    if batch:
        source = np.stack([source, source])
    result = to_uint8_hwc(wrap(np.ascontiguousarray(source)))
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result[1] if batch else result, picture)


def test_grey_and_alpha(picture):
    assert to_uint8_hwc(picture[..., 0]).shape == (5, 7, 1)
    with_alpha = np.concatenate([picture, picture[..., :1]], axis=-1)
    np.testing.assert_array_equal(to_uint8_hwc(with_alpha), picture)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((4, 4, 3), np.nan, np.float32), "NaN"),
        (np.full((4, 4, 3), np.inf, np.float32), "NaN or infinite"),
        (np.full((4, 4, 3), -1.0, np.float32), "values from -1"),
        (np.full((4, 4, 3), 300, np.int64), "values from 300"),
        (np.zeros((5, 5, 7), np.uint8), "channels"),
        (np.zeros((0, 4, 3), np.uint8), "shape"),
        (np.zeros(3, np.uint8), "shape"),
        (np.array([["a"]] * 3), "element type"),
    ],
)
def test_what_is_no_image_is_refused(image, message):
    with pytest.raises(DataError, match=message):
        to_uint8_hwc(image)


def test_the_documents_layout_round_trips(picture):
    unit = to_unit_chw(picture)
    assert unit.shape == (3, 5, 7)
    assert unit.dtype == np.float32
    assert 0.0 <= unit.min() <= unit.max() <= 1.0
    np.testing.assert_array_equal(to_uint8_hwc(unit), picture)
