"""`RewardDataCollector` as RLinf's reward workflow describes it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from guerdon.collect import RewardDataCollector
from guerdon.core.errors import DataError
from guerdon.data.files.safe_pickle import load_npy


def collector(path, **options):
    return RewardDataCollector(positive_dir=path / "positive", negative_dir=path / "negative", **options)


def output(success, done, value=0, num_envs=2, **extra):
    frames = np.full((num_envs, 8, 8, 3), value, np.uint8)
    frames[:, 0, 0, 0] = np.arange(num_envs)
    return {
        "obs": {"base_camera": frames},
        "success_frame": np.array(success, np.float32),
        "dones": np.array(done),
        **extra,
    }


def read(path):
    return load_npy(path).item()


def names(path):
    return sorted(str(item.relative_to(path)) for item in path.rglob("*.npy"))


def test_trajectories_are_sorted_by_success(tmp_path):
    with_success = collector(tmp_path)
    for step in range(3):
        last = step == 2
        with_success.add_env_output(output([last, 0], [last, last], value=step), {}, is_last_step=last)
    assert names(tmp_path) == ["negative/000000.npy", "positive/000000.npy"]  # safe after the last step
    data = read(tmp_path / "positive" / "000000.npy")
    assert set(data) == {"images", "labels"}
    images = data["images"]["base_camera"]
    assert (images.shape, images.dtype) == ((3, 3, 8, 8), np.float32)
    np.testing.assert_allclose(images[:, 1, 4, 4], np.array([0, 1, 2], np.float32) / 255, atol=1e-7)
    np.testing.assert_array_equal(data["labels"], np.array([0, 0, 1], np.float32))
    assert data["labels"].dtype == np.float32
    assert read(tmp_path / "negative" / "000000.npy")["images"]["base_camera"][0, 0, 0, 0] == np.float32(
        1 / 255
    )
    with_success.close()


@pytest.mark.parametrize(
    ("labels", "once", "folder"),
    [
        ([0, 0.4], None, "negative"),
        ([0, 0.5], None, "positive"),
        ([1, 0], None, "positive"),
        ([0, 0], [True], "positive"),
        ([0, 0], [False], "negative"),
        ([1, 0], [False], "positive"),
    ],
)
def test_the_rule_for_positive(tmp_path, labels, once, folder):
    data = collector(tmp_path)
    for step, label in enumerate(labels):
        info = {} if once is None else {"success_once": torch.tensor(once)}
        data.add_env_output(output([label], [step == 1], num_envs=1), info)
    data.close()
    assert names(tmp_path) == [f"{folder}/000000.npy"]


def test_success_once_of_the_episode_before_does_not_leak(tmp_path):
    """Some environments report the old episode's flag for a while after a reset."""
    data = collector(tmp_path)
    data.add_env_output(output([1], [True], num_envs=1), {"success_once": [1]})
    data.add_env_output(output([0], [False], num_envs=1), {"success_once": [1]})
    data.add_env_output(output([0], [True], num_envs=1), {"success_once": [0]})
    data.close()
    assert names(tmp_path) == ["negative/000000.npy", "positive/000000.npy"]


def test_under_auto_reset_the_final_frame_is_kept_and_the_next_first_frame_is_not(tmp_path):
    data = collector(tmp_path)
    data.add_env_output(output([0, 0], [False, False], value=10), {})
    final = {"base_camera": np.full((2, 8, 8, 3), 20, np.uint8)}
    data.add_env_output(output([1, 0], [True, False], value=99, final_obs=final), {})
    data.add_env_output(output([0, 0], [True, True], value=30), {})
    data.close()
    first = read(tmp_path / "positive" / "000000.npy")["images"]["base_camera"]
    np.testing.assert_allclose(first[:, 2, 4, 4] * 255, [10, 20], atol=1e-4)
    others = [
        read(tmp_path / name)["images"]["base_camera"][:, 2, 4, 4] * 255 for name in names(tmp_path)[:2]
    ]
    assert sorted(np.rint(item).tolist() for item in others) == [[10, 99, 30], [30]]


def test_counters_continue_and_limits_count_what_is_there(tmp_path):
    for _ in range(2):
        data = collector(tmp_path, max_negative_trajectories=3)
        for _ in range(2):
            data.add_env_output(output([0], [True], num_envs=1), {})
        data.close()
    assert names(tmp_path) == [f"negative/{number:06d}.npy" for number in range(3)]
    assert (data.positive_count, data.negative_count) == (0, 3)


def test_unfinished_episodes_are_not_mislabelled(tmp_path):
    data = collector(tmp_path)
    data.add_env_output(output([0, 0], [True, False]), {})
    data.close()
    assert names(tmp_path) == ["negative/000000.npy", "unfinished/negative/000000.npy"]


def test_save_trajectory_saves_at_once_and_empties_the_buffer(tmp_path):
    data = collector(tmp_path)
    data.add_env_output(output([1, 0], [False, False]), {})
    data.save_trajectory(0)
    data.save_trajectory(0)
    data.flush()
    assert names(tmp_path) == ["positive/000000.npy"]
    data.close()


def test_objects_torch_tensors_and_action_chunks(tmp_path):
    step = SimpleNamespace(
        obs={"images": {"base_camera": torch.rand(2, 3, 8, 8)}},
        success_frame=torch.tensor([[0, 0, 0], [1, 1, 0]]),
        dones=torch.tensor([[0, 0, 1], [0, 0, 1]]),
        final_obs=None,
    )
    data = collector(tmp_path)
    data.add_env_output(step, {})
    data.close()
    assert names(tmp_path) == ["negative/000000.npy", "positive/000000.npy"]
    # the frame belongs to the last step of the chunk; the episode succeeded all the same
    assert read(tmp_path / "positive" / "000000.npy")["labels"].tolist() == [0.0]


@pytest.mark.parametrize(
    "obs",
    [
        {"main_images": np.zeros((2, 8, 8, 3), np.uint8)},
        {"images": np.zeros((2, 3, 8, 8), np.float32)},
        {"images/base_camera": np.zeros((2, 8, 8, 3), np.uint8)},
        {"images": {"base_camera": np.zeros((2, 8, 8, 3), np.uint8)}},
    ],
)
def test_images_are_found_in_every_dialect(tmp_path, obs):
    data = collector(tmp_path)
    data.add_env_output({"obs": obs, "success_frame": [0, 0], "dones": [True, True]}, {})
    data.close()
    assert len(names(tmp_path)) == 2


def test_several_cameras(tmp_path):
    obs = {"a": np.zeros((1, 4, 4, 3), np.uint8), "b": np.full((1, 6, 6, 1), 255, np.uint8)}
    data = collector(tmp_path, image_keys=["a", "b"])
    data.add_env_output({"obs": obs, "success_frame": [0], "dones": [True]}, {})
    data.close()
    images = read(tmp_path / "negative" / "000000.npy")["images"]
    assert {name: array.shape for name, array in images.items()} == {"a": (1, 3, 4, 4), "b": (1, 1, 6, 6)}
    assert images["b"].max() == 1.0


@pytest.mark.parametrize(
    ("env_output", "message"),
    [
        (
            {"obs": {"other": 1}, "success_frame": [0], "dones": [0]},
            "no image of camera 'base_camera'.*other",
        ),
        ({"obs": {"base_camera": np.zeros((1, 8, 8, 3), np.uint8)}, "dones": [0]}, "frames need a label"),
        ({"obs": {}, "success_frame": [0]}, "neither 'dones'"),
        (
            {"obs": {"base_camera": np.full((1, 8, 8, 3), np.nan)}, "success_frame": [0], "dones": [0]},
            "camera 'base_camera' holds NaN",
        ),
    ],
)
def test_bad_input_is_named(tmp_path, env_output, message):
    data = collector(tmp_path)
    with pytest.raises(DataError, match=message):
        data.add_env_output(env_output, {})
    data.close()


def test_extract_image(tmp_path):
    data = collector(tmp_path)
    batch = np.zeros((2, 5, 7, 3), np.uint8)
    batch[1, ..., 2] = 255
    image = data._extract_image(torch.from_numpy(batch), key_offset=1)
    assert (image.shape, image.dtype) == ((3, 5, 7), np.float32)
    assert image[2].min() == 1.0
    assert image[:2].max() == 0.0
    with pytest.raises(DataError, match="image 2 asked for"):
        data._extract_image(batch, key_offset=2)
    data.close()
