from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import ALL_FIELDS, assert_same, episodes

from guerdon.config import CollectConfig
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault
from guerdon.data.collect.archive import open_archive
from guerdon.data.datasets.audit import audit
from guerdon.data.formats import FORMATS, EpisodeWriter, Format, detect_format, get_format
from guerdon.data.formats.npy_trajectory import NpyTrajectoryWriter, read_directories
from guerdon.data.summary import convert, inspect

MINE = ("npy-trajectory", "pkl-episode", "realworld-pkl", "reward-pt", "folder", "lerobot")
RUN = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])

# What each format promises to give back, and in which order.
KEPT: dict[str, tuple[str, ...]] = {
    "npy-trajectory": ("frames", "labels", "success", "complete"),
    "pkl-episode": ALL_FIELDS,
    "realworld-pkl": ALL_FIELDS,
    "reward-pt": ("frames", "labels", "success", "complete", "seed", "source", "split"),
    "folder": ("frames", "labels", "success", "complete", "source"),
    "lerobot": ALL_FIELDS,
}
ORDER: dict[str, Callable[[Episode], Any]] = {
    "npy-trajectory": lambda item: (not item.complete, not item.success),
    "pkl-episode": lambda item: not item.complete,
    "realworld-pkl": lambda item: 0,
    "reward-pt": lambda item: ("train", "val", "test").index(item.split or "train"),
    "folder": lambda item: not item.complete,
    "lerobot": lambda item: 0,
}


def test_every_writable_format_is_covered() -> None:
    assert set(MINE) == {name for name, each in FORMATS.items() if each.writable} - {"native"}


@pytest.mark.parametrize("name", MINE)
@RUN
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    cameras = None
    if name == "reward-pt":  # one file has one set of cameras
        cameras = data.draw(st.sampled_from([("base_camera",), ("front view",), ("wrist_camera", "ä/b")]))
    written = data.draw(st.lists(episodes(cameras=cameras), min_size=1, max_size=4))
    if name == "folder":
        written = [_as_folder_keeps_it(item) for item in written]
    if name == "lerobot":  # all episodes have the same fields and sizes, and labels are 0 or 1
        first = replace(written[0], labels=(written[0].labels >= 0.5).astype(np.float32))
        written = [first, *(replace(first, seed=item.seed, source=item.source) for item in written[1:])]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "data"
        half = len(written) // 2
        for part in (written[:half], written[half:]):  # the second writer adds to what the first wrote
            with get_format(name).writer(root) as writer:
                places = [writer.add(item) for item in part]
                assert len(set(places)) == len(places)
        assert detect_format(root).name == name
        found = list(get_format(name).read(root))
        assert len(found) == len(written)
        for have, want in zip(found, sorted(written, key=ORDER[name]), strict=True):
            assert_same(have, want, KEPT[name])


def _as_folder_keeps_it(item: Episode) -> Episode:
    labels = (item.labels >= 0.5).astype(np.float32)
    return replace(item, labels=labels, success=bool(labels.any()))


def episode(count: int = 3, success: bool = True, seed: int = 0, **changes: Any) -> Episode:
    frames = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    labels = np.zeros(count, np.float32)
    labels[-1] = success
    values: dict[str, Any] = {
        "frames": {"base_camera": frames},
        "labels": labels,
        "success": success,
        **changes,
    }
    return Episode(**values)


@pytest.mark.parametrize("name", MINE)
def test_appending_leaves_files_alone(tmp_path: Path, name: str) -> None:
    with get_format(name).writer(tmp_path) as writer:
        writer.add(episode(seed=1))
        writer.add(episode(seed=2, success=False))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with get_format(name).writer(tmp_path) as writer:
        writer.add(episode(seed=3))
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if name in ("realworld-pkl", "reward-pt", "lerobot"):  # files that grow; their episodes are still there
        found = list(get_format(name).read(tmp_path))
        for have, seed in zip(found, (1, 2, 3), strict=True):
            assert_same(have, episode(seed=seed), ("frames",))
    else:
        assert before.items() <= after.items()
        assert len(after) > len(before)


@pytest.mark.parametrize("name", MINE)
def test_count(tmp_path: Path, name: str) -> None:
    assert get_format(name).count(tmp_path / "missing") == (0, 0)
    with get_format(name).writer(tmp_path) as writer:
        for success, complete in ((True, True), (False, True), (True, True), (False, False), (True, False)):
            writer.add(episode(success=success, complete=complete))
    assert get_format(name).count(tmp_path) == (2, 1)


@pytest.mark.parametrize("name", MINE)
def test_writer_that_is_closed_twice_or_unused(tmp_path: Path, name: str) -> None:
    writer = get_format(name).writer(tmp_path)
    writer.close()
    writer.add(episode())
    writer.close()
    writer.close()
    assert len(list(get_format(name).read(tmp_path))) == 1


@pytest.mark.parametrize("name", MINE)
def test_writer_copies_what_it_keeps(tmp_path: Path, name: str) -> None:
    """A collector reuses its buffers as soon as `add` returns."""
    item = episode(actions=np.ones((3, 2), np.float32), states=np.ones((3, 2), np.float32))
    want = {"frames": item.frames["base_camera"].copy(), "labels": item.labels.copy()}
    with get_format(name).writer(tmp_path) as writer:
        writer.add(item)
        item.frames["base_camera"][:] = 0
        item.labels[:] = 0.0
    (have,) = get_format(name).read(tmp_path)
    assert isinstance(have, Episode)
    np.testing.assert_array_equal(have.frames["base_camera"], want["frames"])
    np.testing.assert_array_equal(have.labels, want["labels"])


# The layouts of RLinf's reward workflow, written by others


def test_npy_file_is_what_the_document_says(tmp_path: Path) -> None:
    item = episode()
    place = get_format("npy-trajectory").writer(tmp_path).add(item)
    assert place == str(tmp_path / "positive" / "000000.npy")
    content = np.load(place, allow_pickle=True).item()
    assert list(content) == ["images", "labels"]
    images = content["images"]["base_camera"]
    assert images.dtype == np.float32 and images.shape == (3, 3, 8, 8)
    assert images.min() >= 0.0 and images.max() <= 1.0
    assert content["labels"].dtype == np.float32


def test_all_bytes_survive_the_float_files(tmp_path: Path) -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    np.save(
        tmp_path / "000000.npy",
        {"images": {"a": np.moveaxis(ramp, -1, 1) / np.float32(255)}, "labels": np.zeros(1)},
        allow_pickle=True,
    )
    (item,) = get_format("npy-trajectory").read(tmp_path)
    assert isinstance(item, Episode)
    np.testing.assert_array_equal(item.frames["a"], ramp)


def test_npy_success_rule(tmp_path: Path) -> None:
    """`success_once` is known from the directory; labels alone also make a success."""
    writer = NpyTrajectoryWriter(tmp_path / "pos", tmp_path / "neg")
    writer.add(episode(success=True))
    writer.add(episode(success=False))
    silent = episode(success=False)
    assert "pos" in writer.add(replace(silent, success=True))
    (tmp_path / "neg" / "000000.npy").rename(tmp_path / "pos" / "000007.npy")
    (tmp_path / "pos" / "000000.npy").rename(tmp_path / "neg" / "000000.npy")
    found = list(read_directories(tmp_path / "pos", tmp_path / "neg"))
    assert [item.success for item in found if isinstance(item, Episode)] == [True, True, True]


def test_pkl_counter_is_shared(tmp_path: Path) -> None:
    writer = get_format("pkl-episode").writer(tmp_path)
    for success in (True, False, False, True):
        writer.add(episode(success=success))
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pkl"))
    assert files == [
        "failure/episode_000001.pkl",
        "failure/episode_000002.pkl",
        "success/episode_000000.pkl",
        "success/episode_000003.pkl",
    ]


def test_pkl_of_the_document(tmp_path: Path) -> None:
    """No keys but RLinf's, torch values, float images with channels first and a batch axis."""
    frames = [
        {
            "obs": {"main_images": torch.full((1, 3, 8, 8), step / 4), "states": torch.ones(1, 5)},
            "action": torch.zeros(4),
            "reward": torch.tensor([0.5]),
            "done": step == 3,
            "grasp": np.bool_(step > 1),
            "success": torch.tensor(step == 3),
        }
        for step in range(4)
    ]
    (tmp_path / "success").mkdir()
    path = tmp_path / "success" / "episode_000000.pkl"
    path.write_bytes(pickle.dumps({"frames": frames, "success": True, "label": 1}, protocol=2))
    assert detect_format(tmp_path).name == "pkl-episode"
    (item,) = get_format("pkl-episode").read(tmp_path)
    assert isinstance(item, Episode)
    assert item.camera_shapes == {"base_camera": (8, 8, 3)}
    assert item.frames["base_camera"][:, 0, 0, 0].tolist() == [0, 64, 128, 191]
    assert item.labels.tolist() == [0, 0, 0, 1]
    assert item.states is not None and item.states.shape == (4, 5)
    assert item.is_grasped is not None and item.is_grasped.tolist() == [False, False, True, True]
    assert item.terminated is None and item.complete and item.success


def transition(
    value: int, reward: float, end: str = "", next_obs: bool = True, action: float = 1.0
) -> dict[str, Any]:
    def obs(number: int) -> dict[str, Any]:
        image = torch.full((1, 8, 8, 3), number, dtype=torch.uint8)
        return {"main_images": image, "states": torch.full((1, 2), float(number))}

    pair = {"obs": obs(value)} | ({"next_obs": obs(value + 1)} if next_obs else {})
    return {
        "transitions": pair,
        "action": torch.full((1, 6), action),
        "rewards": torch.tensor([[reward]]),
        "terminations": torch.tensor([[end == "terminated"]]),
        "truncations": torch.tensor([[end == "truncated"]]),
    }


def test_realworld_of_the_document(tmp_path: Path) -> None:
    steps = [
        transition(10, 0.0),
        transition(11, 0.4),
        transition(12, 1.0, "terminated"),
        transition(20, 0.0, "truncated", next_obs=False),
        transition(30, 0.0),
    ]
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(steps))
    assert detect_format(tmp_path).name == detect_format(tmp_path / "data.pkl").name == "realworld-pkl"
    first, second, tail = get_format("realworld-pkl").read(tmp_path)
    assert isinstance(first, Episode) and isinstance(second, Episode) and isinstance(tail, Episode)
    assert first.frames["base_camera"][:, 0, 0, 0].tolist() == [11, 12, 13]  # the frames that actions led to
    assert first.initial_state is not None and first.initial_state.tolist() == [10.0, 10.0]
    assert first.labels.tolist() == [0, 0, 1] and first.success and first.complete
    assert first.terminated is not None and first.terminated.tolist() == [False, False, True]
    assert second.frames["base_camera"][0, 0, 0, 0] == 20 and second.initial_state is None
    assert not second.success and second.complete
    assert not tail.complete
    with get_format("realworld-pkl").writer(tmp_path) as writer:  # the open tail stays an episode of its own
        writer.add(episode())
    found = list(get_format("realworld-pkl").read(tmp_path))
    assert [item.complete for item in found if isinstance(item, Episode)] == [True, True, False, True]


def test_reward_pt_of_others(tmp_path: Path) -> None:
    """Shuffled frames without ids: one pseudo-episode for each file and label."""
    images = [torch.full((3, 8, 8), value, dtype=torch.uint8) for value in range(5)]
    labels = [0, 1, 0, 1, 1]
    torch.save({"images": images, "labels": labels, "metadata": {"val_split": 0.2}}, tmp_path / "train.pt")
    torch.save({"images": torch.stack(images), "labels": torch.zeros(5)}, tmp_path / "val.pt")
    assert detect_format(tmp_path).name == "reward-pt"
    bad, good, val = get_format("reward-pt").read(tmp_path)
    assert isinstance(bad, Episode) and isinstance(good, Episode) and isinstance(val, Episode)
    assert bad.frames["base_camera"][:, 0, 0, 0].tolist() == [0, 2] and not bad.success
    assert good.frames["base_camera"][:, 0, 0, 0].tolist() == [1, 3, 4] and good.success
    assert (bad.split, val.split, val.num_frames) == ("train", "val", 5)
    with get_format("reward-pt").writer(tmp_path) as writer:
        writer.add(episode())
    assert [item.num_frames for item in get_format("reward-pt").read(tmp_path)] == [2, 3, 3, 5]
    content = torch.load(tmp_path / "train.pt", weights_only=True)
    assert len(content["images"]) == len(content["labels"]) == 8
    assert content["metadata"]["val_split"] == 0.2


def test_reward_pt_refuses_other_cameras(tmp_path: Path) -> None:
    other = replace(episode(), frames={"x": episode().frames["base_camera"]})
    with get_format("reward-pt").writer(tmp_path) as writer:
        writer.add(episode())
        with pytest.raises(DataError, match=r"train\.pt: an episode has the cameras \['x'\]"):
            writer.add(other)
    with (
        pytest.raises(DataError, match=r"cannot add to .*train\.pt: it has the cameras \['base_camera'\]"),
        get_format("reward-pt").writer(tmp_path) as writer,
    ):
        writer.add(other)


def rlinf_record(
    reset: bool, infos: list[dict[str, Any]], rewards: list[float], success: bool
) -> dict[str, Any]:
    count = len(rewards)
    lead: list[Any] = [None] if reset else []
    observations = [
        {
            "main_images": torch.full((8, 8, 3), step, dtype=torch.uint8),
            "states": np.full(4, step, np.float32),
            "wrist_images": np.zeros((8, 8, 3), np.uint8),
            "extra_view_images": torch.zeros((2, 8, 8, 3), dtype=torch.uint8),
            "task_descriptions": "pick",
        }
        for step in range(count + reset)
    ]
    return {
        "rank": 0,
        "success": success,
        "observations": observations,
        "actions": [torch.ones(3)] * count,
        "rewards": [0.0 for _ in lead] + [torch.tensor(value) for value in rewards],
        "terminated": [False for _ in lead] + [torch.tensor(step == count - 1) for step in range(count)],
        "truncated": [False] * (count + reset),
        "infos": [{} for _ in lead] + infos,
    }


@pytest.mark.parametrize(
    ("infos", "rewards", "success", "labels"),
    [
        ([{"success": torch.tensor(False)}, {"success": torch.tensor(True)}], [0.9, 0.0], True, [0, 1]),
        ([{"episode": {"success_once": torch.tensor([True])}}] * 2, [0.0, 0.0], True, [1, 1]),
        (
            [{"episode": {"success_once": False}}, {"episode": {"success_once": True}}],
            [0.0] * 2,
            True,
            [0, 1],
        ),
        ([{"is_obj_placed": True}, {"is_obj_placed": False}], [0.0, 0.0], True, [1, 0]),
        ([{}, {}], [0.9, 0.0], True, [1, 0]),
        ([{}, {}], [0.0, 0.1], True, [0, 1]),
        ([{}, {}], [0.9, 0.9], False, [0, 0]),
    ],
)
@pytest.mark.parametrize("reset", [True, False])
def test_rlinf_episode(
    tmp_path: Path, infos: list[Any], rewards: list[float], success: bool, labels: list[int], reset: bool
) -> None:
    record = rlinf_record(reset, infos, rewards, success)
    kind = "success" if success else "fail"
    (tmp_path / f"rank_0_env_3_episode_12_step_900_{kind}.pkl").write_bytes(pickle.dumps(record))
    assert detect_format(tmp_path).name == "rlinf-episode"
    (item,) = get_format("rlinf-episode").read(tmp_path)
    assert isinstance(item, Episode)
    assert item.labels.tolist() == labels and item.success == success and item.complete
    assert item.frames["base_camera"][:, 0, 0, 0].tolist() == ([1, 2] if reset else [0, 1])
    assert set(item.frames) == {"base_camera", "wrist_camera", "extra_view_0", "extra_view_1"}
    assert (item.initial_state is not None) == reset
    assert item.terminated is not None and item.terminated.tolist() == [False, True]


def test_rlinf_order_and_read_only(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        record = rlinf_record(False, [{}], [0.0], False)
        (tmp_path / f"rank_0_env_0_episode_{number}_fail.pkl").write_bytes(pickle.dumps(record))
    sources = [
        item.source for item in get_format("rlinf-episode").read(tmp_path) if isinstance(item, Episode)
    ]
    assert [source.split("_")[-2] for source in sources] == ["1", "9", "10"]
    with pytest.raises(DataError, match="rlinf-episode can be read but not written"):
        get_format("rlinf-episode").writer(tmp_path)


def test_folder_of_others(tmp_path: Path) -> None:
    """Any pictures: an episode for each; names like RLinf's are put together."""
    from PIL import Image

    for kind, name in [
        ("success", "cat.png"),
        ("failure", "cat.jpg"),
        ("success", "positive_000001_frame049.png"),
        ("failure", "positive_000001_frame048.png"),
    ]:
        (tmp_path / kind).mkdir(exist_ok=True)
        Image.new("RGBA" if name.endswith("png") else "RGB", (6, 4), (10, 20, 30)).save(
            tmp_path / kind / name
        )
    assert detect_format(tmp_path).name == "folder"
    found = [item for item in get_format("folder").read(tmp_path) if isinstance(item, Episode)]
    assert [item.labels.tolist() for item in found] == [[0.0], [1.0], [0.0, 1.0]]
    assert all(item.camera_shapes == {"base_camera": (4, 6, 3)} for item in found)


# Which format is it?


def test_detection_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        detect_format(tmp_path / "nowhere")
    (tmp_path / "positive").mkdir()
    with pytest.raises(DataError, match="is a directory without files"):
        detect_format(tmp_path)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(DataError, match=r"empty\.bin is an empty file"):
        detect_format(tmp_path / "empty.bin")
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            DataError, match=r"holds no known format; looked for .*positive/\*\.npy.*train\.pt"
        ):
            detect_format(path)


def test_detection_of_single_files(tmp_path: Path) -> None:
    for name in ("npy-trajectory", "pkl-episode", "realworld-pkl", "reward-pt"):
        with get_format(name).writer(tmp_path / name) as writer:
            writer.add(episode())
        (file,) = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        assert detect_format(file).name == name
        (item,) = get_format(name).read(file)
        assert_same(item, episode(), ("frames", "labels", "success"))
    renamed = tmp_path / "recording.pkl"
    (tmp_path / "realworld-pkl" / "data.pkl").rename(renamed)
    assert detect_format(renamed).name == "realworld-pkl"


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(DataError, match="unknown format 'npy'; did you mean 'npy-trajectory'"):
        get_format("npy")
    with pytest.raises(DataError, match="unknown format 'fodler'; did you mean 'folder'"):
        get_format("fodler")


def test_reading_a_missing_path() -> None:
    for name in (*MINE, "rlinf-episode"):
        with pytest.raises(DataError, match="nowhere does not exist"):
            list(get_format(name).read(Path("/nowhere")))


def test_unfinished_episodes_are_kept_apart(tmp_path: Path) -> None:
    for name in ("npy-trajectory", "pkl-episode", "folder"):
        root = tmp_path / name
        with get_format(name).writer(root) as writer:
            writer.add(episode(success=False, complete=False))
        with get_format(name).writer(root / "unfinished") as writer:  # as the collectors do it
            writer.add(episode(success=True, complete=False))
        assert not (root / "unfinished" / "unfinished").exists()
        for place in (root, root / "unfinished"):
            found = list(get_format(name).read(place))
            assert len(found) == 2 and not any(isinstance(item, Fault) or item.complete for item in found)
        assert get_format(name).count(root) == (0, 0)


class OneFile(Format):
    """All that a new format needs: a class, and its line in the table."""

    name = "one-file"
    looks_for = "labels.npy"

    def detect(self, path):
        return (path / "labels.npy").is_file()

    def read(self, path):
        labels = np.load(path / "labels.npy")
        frames = {"base_camera": np.zeros((len(labels), 4, 4, 3), np.uint8)}
        yield Episode(frames=frames, labels=labels, success=bool(labels.any()), source="one")

    def writer(self, path):
        class Writer(EpisodeWriter):
            def add(self, episode):
                path.mkdir(parents=True)
                np.save(path / "labels.npy", episode.labels)
                return str(path)

        return Writer()


def test_a_new_format_is_a_class_and_a_line_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, OneFile.name, OneFile())
    labels = np.array([0, 1], np.float32)
    OneFile().writer(tmp_path / "a").add(
        Episode(frames={"c": np.zeros((2, 1, 1, 3), np.uint8)}, labels=labels, success=True)
    )
    assert OneFile().writable and detect_format(tmp_path / "a").name == "one-file"
    assert convert(tmp_path / "a", tmp_path / "b", "native") == (1, [])
    assert convert(tmp_path / "b", tmp_path / "c", "one-file") == (1, [])
    assert (inspect(tmp_path / "c").num_success_episodes, FORMATS["one-file"].count(tmp_path / "c")) == (
        1,
        (1, 0),
    )
    assert audit(tmp_path / "c").num_episodes == 1
    config = CollectConfig(
        save_dir=str(tmp_path / "d"), format="one-file", target_success=1, target_failure=1
    )
    archive = open_archive(config.save_dir, config.format, config.target_success, config.target_failure)
    archive.add(next(iter(OneFile().read(tmp_path / "c"))))
    archive.close()
    assert inspect(tmp_path / "d").format == "one-file"
