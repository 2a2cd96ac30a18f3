"""Data sets that Minari itself wrote, as episodes."""

import json
from pathlib import Path

import h5py
import minari
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from minari.data_collector import EpisodeBuffer

from guerdon.cli.main import main
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import FORMATS, detect_format

LENGTHS = (5, 3, 4)
SIZE = 40
SPACES = {
    "images": Dict({"front": Box(0, 255, (SIZE, SIZE, 3), np.uint8), "joints": Box(-9, 9, (2,), np.float64)}),
    "gray": Box(0, 255, (SIZE, SIZE), np.uint8),
    "goals": Dict({name: Box(-9, 9, (size,), np.float32) for name, size in
                   {"achieved_goal": 1, "desired_goal": 1, "observation": 3}.items()}),
    "numbers": Box(-9, 9, (3,), np.float32),
}  # fmt: skip


def smooth(rng, shape):
    """An image that JPEG keeps well."""
    image = np.full((shape[0], shape[1], 3), rng.integers(0, 255, 3), np.uint8)
    return image if len(shape) == 3 else image[..., 0]


def observation(space, rng):
    if isinstance(space, Dict):
        return {name: observation(part, rng) for name, part in space.spaces.items()}
    return (
        smooth(rng, space.shape)
        if space.dtype == np.uint8
        else rng.normal(size=space.shape).astype(space.dtype)
    )


def stacked(items):
    if isinstance(items[0], dict):
        return {name: stacked([item[name] for item in items]) for name in items[0]}
    return np.stack(items)


def episodes(space, *, success=True, seed=3):
    """Buffers as Minari's collector has them; the first and the last episode succeed at their end."""
    rng = np.random.default_rng(seed)
    for number, length in enumerate(LENGTHS):
        solved = np.zeros(length + 1, np.bool_)
        solved[-1] = number != 1
        yield EpisodeBuffer(
            id=number,
            seed=40 + number,
            observations=stacked([observation(space, rng) for _ in range(length + 1)]),
            actions=rng.integers(0, 4, length),
            rewards=list(rng.normal(size=length)),
            terminations=[False] * (length - 1) + [number == 0],
            truncations=[False] * (length - 1) + [number == 1],
            infos={"success": solved} if success else {"speed": np.zeros(length + 1)},
        )


def written(space, name="test/things-v0", **options):
    storage = {key: options.pop(key) for key in ("jpeg_encoding", "data_format") if key in options}
    buffers = list(episodes(space, **options))
    with pytest.warns(UserWarning):  # no author, no code
        minari.create_dataset_from_buffers(
            name, buffers, observation_space=space, action_space=Discrete(4), **storage
        )
    return buffers


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari" / "test" / "things-v0"


def read(path):
    return list(FORMATS["minari"].read(path))


@pytest.mark.parametrize("jpeg", [True, False])
def test_images_states_rewards_and_ends(root, jpeg):
    buffers = written(SPACES["images"], jpeg_encoding=jpeg)
    found = read(root)
    assert [type(item) for item in found] == [Episode] * 3
    for number, (episode, buffer) in enumerate(zip(found, buffers, strict=True)):
        images = np.asarray(buffer.observations["front"])[1:]
        joints = np.asarray(buffer.observations["joints"], np.float32)
        assert episode.frames.keys() == {"front"}
        np.testing.assert_allclose(episode.frames["front"].astype(int), images, atol=3 if jpeg else 0)
        np.testing.assert_array_equal(episode.states, joints[1:])
        np.testing.assert_array_equal(episode.initial_state, joints[0])
        np.testing.assert_array_equal(episode.env_rewards, np.asarray(buffer.rewards, np.float32))
        np.testing.assert_array_equal(episode.terminated, buffer.terminations)
        np.testing.assert_array_equal(episode.truncated, buffer.truncations)
        np.testing.assert_array_equal(episode.actions[:, 0], buffer.actions)
        np.testing.assert_array_equal(episode.labels, buffer.infos["success"][1:])
        assert (episode.success, episode.seed, episode.complete) == (number != 1, 40 + number, True)


def test_gray_images_without_a_name_are_the_base_camera(root):
    buffers = written(SPACES["gray"])
    episode = read(root)[0]
    assert episode.camera_shapes == {"base_camera": (SIZE, SIZE, 1)} and episode.states is None
    shown = np.asarray(buffers[0].observations)[1:]
    np.testing.assert_allclose(episode.frames["base_camera"][..., 0].astype(int), shown, atol=3)


def test_goals_have_the_order_of_flat_goals(root):
    buffers = written(SPACES["goals"])
    parts = buffers[0].observations
    flat = np.concatenate([parts[key] for key in ("observation", "achieved_goal", "desired_goal")], axis=1)
    episode = read(root)[0]
    np.testing.assert_array_equal(episode.states, flat[1:])
    assert episode.frames.keys() == {"no_camera"}


def test_unknown_success_is_no_failure(root, caplog):
    written(SPACES["numbers"], success=False)
    assert [(item.success, item.complete) for item in read(root)] == [(False, False)] * 3
    assert "3 episode(s) tell no success" in caplog.text
    assert FORMATS["minari"].count(root) == (0, 0)


def test_it_is_found_by_folder_file_and_id(root, monkeypatch, capsys):
    written(SPACES["numbers"])
    for place in (root, root / "data", root / "data" / "main_data.hdf5"):
        assert detect_format(place).name == "minari" and len(read(place)) == 3
    assert main(["data", "inspect", "test/things-v0", "--format", "minari", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["num_episodes"], summary["num_success_episodes"]) == (3, 2)
    with pytest.raises(DataError, match=r"^test/other-v0 does not exist, and is no data set in"):
        read(Path("test/other-v0"))


def test_it_is_converted(root, tmp_path, capsys):
    written(SPACES["images"], jpeg_encoding=False)
    assert main(["data", "convert", str(root), str(tmp_path / "native"), "--to", "native", "--json"]) == 0
    capsys.readouterr()
    before = {item.seed: item for item in read(root)}
    after = list(FORMATS["native"].read(tmp_path / "native"))
    assert len(after) == 3
    for episode in after:
        np.testing.assert_array_equal(episode.frames["front"], before[episode.seed].frames["front"])
        np.testing.assert_array_equal(episode.labels, before[episode.seed].labels)
        np.testing.assert_array_equal(episode.env_rewards, before[episode.seed].env_rewards)


def test_another_storage_is_named(root):
    written(SPACES["numbers"], data_format="arrow")
    assert detect_format(root).name == "minari"
    with pytest.raises(DataError, match=r"with the storage 'arrow', and only hdf5"):
        read(root)


def test_a_damaged_episode_is_set_aside(root):
    written(SPACES["images"])
    with h5py.File(root / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0/actions"]
        file["episode_0/actions"] = np.zeros(2)
        del file["episode_2/observations/front"]
        data = [np.frombuffer(b"\xff\xd8\xff no picture", np.uint8)] * 5
        file["episode_2/observations"].create_dataset("front", data=data)
    faults = [item for item in read(root) if isinstance(item, Fault)]
    assert [fault.path.rsplit(":")[-1] for fault in faults] == ["episode_0", "episode_2"]
    assert "has 2 entries where 5 are expected" in faults[0].reason
    assert len(read(root)) == 3


def test_without_h5py_it_says_what_to_install(root, monkeypatch):
    written(SPACES["numbers"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'guerdon\[minari\]'"):
        read(root)
