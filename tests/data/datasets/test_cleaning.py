"""A robot's recording becomes data for a reward model: what is left out and why, labels, splits, audit."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from guerdon.cli.main import main
from guerdon.core.errors import DataError
from guerdon.core.types import Episode
from guerdon.data.datasets.cleaning import label_by_hold, process, select, sharpness
from guerdon.data.formats.realworld_pkl import RecordedEpisode, read_recorded, to_transitions
from guerdon.data.store import EpisodeStore

HOLD = 4
RNG = np.random.default_rng(0)
SCENE = RNG.integers(0, 256, (16, 16, 3))


def flags(text):
    return np.array([letter == "1" for letter in text])


@pytest.mark.parametrize(
    ("at_target", "key", "labels", "doubtful"),
    [
        ("00011110", "", "00011110", "00000000"),  # held, then left
        ("01100111", "", "00000000", "01100111"),  # never held for four
        ("01101111", "", "00001111", "01100000"),
        ("01111111", "a", "00000000", "00000000"),  # the operator knows better
        ("01100011", "c", "00000011", "01100000"),
        ("01100000", "c", "00000001", "01100000"),  # the pose is off, the operator saw it
    ],
)
def test_labels_follow_hold_and_key(at_target, key, labels, doubtful):
    found = label_by_hold(flags(at_target), HOLD, key)
    np.testing.assert_array_equal(found.labels, flags(labels))
    np.testing.assert_array_equal(found.doubtful, flags(doubtful))
    assert found.success == ("1" in labels)


def recorded(at_target, key="", seed=0, still=(), **more):
    """An episode in which a patch moves and every picture has noise of its own."""
    rng, count = np.random.default_rng(seed), len(at_target)
    frames = np.repeat(SCENE[None], count, 0).astype(np.int64)
    for step in range(count):
        frames[step, 4 + seed % 8 : 8 + seed % 8, step % 12 : step % 12 + 4] = 255
    frames += rng.integers(-3, 4, frames.shape)
    actions = rng.uniform(0.1, 1.0, (count, 3)).astype(np.float32)
    actions[list(still)] = 0.0
    found = label_by_hold(flags(at_target), HOLD, key)
    last = np.arange(count) == count - 1
    episode = Episode(
        frames={"front_camera": np.clip(frames, 0, 255).astype(np.uint8)},
        labels=found.labels,
        success=found.success,
        actions=actions,
        states=rng.random((count, 5), np.float32),
        terminated=last & found.success,
        truncated=last & (not found.success),
        source=f"robot {seed}",
    )
    return RecordedEpisode(episode=episode, at_target=flags(at_target), hold_steps=HOLD, key=key, **more)


def write(path, items):
    transitions = [step for item in items for step in to_transitions(item.episode, item)]
    path.write_bytes(pickle.dumps(transitions))
    return path


def test_what_a_recorder_tells_comes_back(tmp_path):
    ages = {"front_camera": np.linspace(0.0, 0.1, 8, dtype=np.float32)}
    item = recorded("01101111", key="c", frame_age=ages, intervened=flags("11110000"))
    (back,) = read_recorded(write(tmp_path / "data.pkl", [item]))
    assert isinstance(back, RecordedEpisode)
    np.testing.assert_array_equal(back.at_target, item.at_target)
    np.testing.assert_array_equal(back.episode.labels, flags("00001111"))
    np.testing.assert_array_equal(back.frame_age["front_camera"], ages["front_camera"])
    np.testing.assert_array_equal(back.intervened, flags("11110000"))
    assert (back.key, back.hold_steps) == ("c", HOLD)


def blur(frames):
    """Every pixel the mean of a 5x5 neighbourhood."""
    padded = np.pad(frames.astype(np.float32), ((2, 2), (2, 2), (0, 0)), mode="edge")
    parts = [padded[i : i + 16, j : j + 16] for i in range(5) for j in range(5)]
    return np.mean(parts, axis=0).astype(np.uint8)


def test_every_reason_is_found_where_it_was_planted(tmp_path):
    count = 20
    ages = np.full(count, 0.02, np.float32)
    ages[9] = 0.4  # stale
    item = recorded("0" * 3 + "1" + "0" * 11 + "1" * 5, still=(0, 1, 6), frame_age={"front_camera": ages})
    frames = item.episode.frames["front_camera"]
    frames[11] = frames[10]  # the camera hung for a moment
    frames[13] = blur(frames[13])
    others = [recorded("0" * 15 + "1" * 5, seed=seed) for seed in (3, 6)]
    report = process(write(tmp_path / "data.pkl", [item, *others]), tmp_path / "out")
    assert report.left_out == {
        "doubtful": 1, "stale": 1, "duplicate": 1, "blurred": 1, "before_motion": 2, "still": 1
    }  # fmt: skip
    store = EpisodeStore(tmp_path / "out")
    kept = np.setdiff1d(np.arange(count), [0, 1, 3, 6, 9, 11, 13])
    np.testing.assert_array_equal(store.read_episode(0).frames["front_camera"], frames[kept])
    np.testing.assert_array_equal(store.read_episode(0).actions, item.episode.actions[kept])
    assert store.read_episode(0).labels.tolist() == [0] * 8 + [1] * 5
    assert report.num_frames == 13 + 2 * count == store.num_frames


def test_blur_is_told_from_noise():
    frames = recorded("0" * 6).episode.frames["front_camera"]
    sharp = sharpness(frames)
    assert sharpness(blur(frames[2])[None])[0] < 0.1 * sharp.min()
    assert sharp.max() < 1.5 * sharp.min()


def test_a_failure_by_key_keeps_its_frames_at_the_target_as_failures(tmp_path):
    items = [recorded("0" * 4 + "1" * 6, seed=seed) for seed in range(4)]
    items.append(recorded("0" * 2 + "1" * 8, key="a", seed=5))
    process(write(tmp_path / "data.pkl", items), tmp_path / "out")
    failure = EpisodeStore(tmp_path / "out").read_episode(4)
    assert (failure.num_frames, failure.num_positive_frames, failure.success) == (10, 0, False)


def test_splits_are_whole_episodes_with_successes_on_both_sides(tmp_path, capsys):
    items = [recorded("0" * 6 + "1" * 6, seed=seed) for seed in range(8)]
    items += [recorded("0" * 12, key="a", seed=seed) for seed in range(8, 12)]
    write(tmp_path / "data.pkl", items)
    assert main(["data", "process", str(tmp_path / "data.pkl"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    store = EpisodeStore(tmp_path / "collected_data")
    split = np.array(store.episode_column("split"))
    assert set(split.tolist()) == {"train", "val"}
    assert result["splits"] == {name: int((split == name).sum()) for name in ("train", "val")}
    for name in ("train", "val"):
        assert store.success[split == name].any()
        assert not store.success[split == name].all()
    assert result["audit"]["ok"]
    assert json.loads((tmp_path / "collected_data_report.json").read_text())["num_episodes"] == 12


@pytest.mark.parametrize("count", [4, 7])
def test_small_recordings_have_enough_to_validate_with(tmp_path, count):
    items = [recorded("0" * 6 + "1" * 6, seed=seed) for seed in range(count)]
    report = process(write(tmp_path / "data.pkl", items), tmp_path / "out")
    assert report.splits["val"] == 2
    assert report.splits["train"] == count - 2


def test_bad_recordings_are_refused_before_anything_is_written(tmp_path):
    place = write(tmp_path / "data.pkl", [recorded("0" * 8), recorded("00110011", seed=1)])
    with pytest.raises(DataError, match="2 episodes and no success"):
        process(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert process(place, tmp_path / "out", hold_steps=2).num_positive_frames == 4
    with pytest.raises(DataError, match="is there already"):
        process(place, tmp_path / "out", hold_steps=2)


def test_recordings_of_others_have_their_rewards_as_labels(tmp_path):
    """Still frames go, but neither held successes nor the last frame."""

    def step(value, reward, end=False, action=1.0):
        obs = {"main_images": torch.full((1, 8, 8, 3), value, dtype=torch.uint8)}
        return {
            "transitions": {"obs": obs, "next_obs": {"main_images": obs["main_images"] + 1}},
            "action": torch.full((1, 2), action),
            "rewards": torch.tensor([[reward]]),
            "terminations": torch.tensor([[end]]),
            "truncations": torch.tensor([[False]]),
        }

    steps = [step(0, 0.0, action=0.0), step(1, 0.0), step(2, 0.0, action=1e-7), step(3, 1.0, action=0.0)]
    (tmp_path / "data.pkl").write_bytes(pickle.dumps([*steps, step(4, 1.0, end=True, action=0.0)]))
    process(tmp_path / "data.pkl", tmp_path / "out")
    first = EpisodeStore(tmp_path / "out").read_episode(0)
    assert first.frames["base_camera"][:, 0, 0, 0].tolist() == [2, 4, 5]
    assert first.labels.tolist() == [0, 1, 1]
    process(tmp_path / "data.pkl", tmp_path / "all", keep_stationary=True)
    assert EpisodeStore(tmp_path / "all").num_frames == 5


def test_selecting_steps_cuts_every_part_of_an_episode():
    """Also those that are added to `Episode` some day: whatever has an entry for each step."""
    count, rng = 6, np.random.default_rng(0)
    vectors = {
        name: rng.normal(size=(count, 2)).astype(np.float32) for name in ("actions", "intended", "states")
    }
    marks = dict.fromkeys(("terminated", "truncated", "is_grasped", "at_rest"), np.zeros(count, np.bool_))
    floats = dict.fromkeys(("labels", "env_rewards"), np.zeros(count, np.float32))
    whole = Episode(
        frames={"front": rng.integers(0, 255, (count, 4, 4, 3), dtype=np.uint8)},
        success=False,
        initial_state=np.zeros(2, np.float32),
        **vectors,
        **marks,
        **floats,
    )
    keep = np.array([False, True, True, False, True, True])
    cut = select(whole, keep)
    for item in dataclasses.fields(Episode):
        value = getattr(whole, item.name)
        if isinstance(value, np.ndarray) and len(value) == count:
            np.testing.assert_array_equal(getattr(cut, item.name), value[keep], err_msg=item.name)
    np.testing.assert_array_equal(cut.frames["front"], whole.frames["front"][keep])
    np.testing.assert_array_equal(cut.initial_state, whole.states[0])
    unset = {item.name for item in dataclasses.fields(Episode) if getattr(whole, item.name) is None}
    assert unset == {"seed"}  # whatever else there is was looked at above
