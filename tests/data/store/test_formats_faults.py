"""One bad file among good ones: it is named with a reason, its code does not run, and the others are read."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from guerdon.core.errors import DataError, UnsafeDataError
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import get_format

Raw = dict[str, Any]
"""An episode before it is written: `images` {camera: list}, `labels` list, and `extra` to be put beside."""


def raw(seed: int = 0, count: int = 4) -> Raw:
    rng = np.random.default_rng(seed)
    images = {
        camera: list(rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)) for camera in ("main", "side")
    }
    return {"images": images, "labels": [0.0] * (count - 1) + [1.0]}


# Writers of their own, so that they can write what ours would not


def write_npy(root: Path, items: list[Raw]) -> list[Path]:
    paths = []
    (root / "positive").mkdir(parents=True)
    for number, item in enumerate(items):
        images = {}
        for camera, frames in item["images"].items():
            if frames and frames[0].dtype == np.uint8:
                frames = [frame / np.float32(255) for frame in frames]
            channels_first = [np.moveaxis(frame, -1, 0) for frame in frames]
            same = len({frame.shape for frame in channels_first}) == 1
            images[camera] = np.stack(channels_first) if same else channels_first
        record = {"images": images, "labels": np.array(item["labels"], np.float32)} | item.get("extra", {})
        paths.append(root / "positive" / f"{number:06d}.npy")
        np.save(paths[-1], np.array(record, dtype=object), allow_pickle=True)
    return paths


def observation(item: Raw, step: int) -> Raw:
    obs: Raw = {"states": np.zeros(3, np.float32)}
    if step < len(item["images"].get("main", [])):
        obs["main_images"] = item["images"]["main"][step]
    if step < len(item["images"].get("side", [])):
        obs["extra_view_images"] = {"side": item["images"]["side"][step]}
    return obs


def num_steps(item: Raw) -> int:
    return max(len(frames) for frames in item["images"].values()) if item["images"] else len(item["labels"])


def with_labels(item: Raw, key: str, steps: list[Raw]) -> list[Raw]:
    for step, label in zip(steps, item["labels"], strict=False):
        step[key] = label
    return steps


def write_pkl(root: Path, items: list[Raw]) -> list[Path]:
    paths = []
    (root / "success").mkdir(parents=True)
    for number, item in enumerate(items):
        frames = with_labels(item, "success", [{"obs": observation(item, t)} for t in range(num_steps(item))])
        record = {"frames": frames, "success": True, "label": 1} | item.get("extra", {})
        paths.append(root / "success" / f"episode_{number:06d}.pkl")
        paths[-1].write_bytes(pickle.dumps(record))
    return paths


def write_realworld(root: Path, items: list[Raw]) -> list[Path]:
    transitions: list[Any] = []
    for item in items:
        steps = [
            {
                "transitions": {"obs": observation(item, t), "next_obs": observation(item, t)},
                "action": torch.ones(1, 2),
                "terminations": torch.tensor([[t == num_steps(item) - 1]]),
                "truncations": torch.tensor([[False]]),
            }
            for t in range(num_steps(item))
        ]
        transitions += with_labels(item, "rewards", steps)
        transitions[-1].update(item.get("extra", {}))
    root.mkdir()
    (root / "data.pkl").write_bytes(pickle.dumps(transitions))
    return [root / "data.pkl"] * len(items)


def write_reward_pt(root: Path, items: list[Raw]) -> list[Path]:
    """Each episode is a file, since there is one damaged and one good file."""
    root.mkdir()
    paths = []
    for name, item in zip(("train.pt", "val.pt"), items, strict=True):
        images = item["images"]
        metadata = {
            "episode_ids": [0] * num_steps(item),
            "camera_names": ["main"],
            "extra_images": {"side": [torch.from_numpy(frame) for frame in images.get("side", [])]},
        }
        record = {
            "images": [torch.from_numpy(frame) for frame in images.get("main", [])],
            "labels": [int(label) for label in item["labels"]],
            "metadata": metadata,
        } | item.get("extra", {})
        paths.append(root / name)
        torch.save(record, paths[-1])
    return paths


def write_rlinf(root: Path, items: list[Raw]) -> list[Path]:
    root.mkdir()
    paths = []
    for number, item in enumerate(items):
        count = num_steps(item)
        record = {
            "observations": [observation(item, t) for t in range(count)],
            "actions": [np.ones(2, np.float32)] * count,
            "rewards": [0.0] * count,
            "terminated": [False] * (count - 1) + [True],
            "truncated": [False] * count,
            "infos": [{"success": bool(label)} for label in item["labels"]],
        } | item.get("extra", {})
        paths.append(root / f"rank_0_env_0_episode_{number}_step_5_success.pkl")
        paths[-1].write_bytes(pickle.dumps(record))
    return paths


def write_folder(root: Path, items: list[Raw]) -> list[Path]:
    for kind in ("success", "failure"):
        (root / kind).mkdir(parents=True)
    firsts = []
    for number, item in enumerate(items):
        paths = []
        for camera, frames in item["images"].items():
            for step, frame in enumerate(frames):
                kind = "success" if item["labels"][step] >= 0.5 else "failure"
                paths.append(root / kind / f"x_{number:06d}_frame{step:03d}_{camera}.png")
                Image.fromarray(frame).save(paths[-1])
        firsts.append(paths[0])
    return firsts


WRITERS: dict[str, Callable[[Path, list[Raw]], list[Path]]] = {
    "npy-trajectory": write_npy,
    "pkl-episode": write_pkl,
    "realworld-pkl": write_realworld,
    "reward-pt": write_reward_pt,
    "rlinf-episode": write_rlinf,
    "folder": write_folder,
}
ONE_FILE = ("realworld-pkl",)


def read(name: str, root: Path) -> tuple[list[Episode], list[Fault]]:
    items = list(get_format(name).read(root))
    faults = [item for item in items if isinstance(item, Fault)]
    for fault in faults:
        assert fault.reason and "\n" not in fault.reason
        assert fault.path not in fault.reason
        assert fault.reason.count("Traceback") == 0
    return [item for item in items if isinstance(item, Episode)], faults


def check(name: str, root: Path, bad: Raw, reason: str) -> None:
    """Write a bad episode and a good one; the bad one is named, and the good one read."""
    good = raw(1)
    paths = WRITERS[name](root, [bad, good])
    episodes, faults = read(name, root)
    assert len(episodes) == 1
    (images,) = (episodes[0].frames[camera] for camera in episodes[0].frames if camera == "side")
    np.testing.assert_array_equal(images, np.stack(good["images"]["side"]))
    assert len(faults) == 1
    assert Path(faults[0].path) == paths[0]
    assert reason in faults[0].reason, faults[0].reason


@pytest.mark.parametrize("name", WRITERS)
def test_good_files(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "d", [raw(0), raw(1)])
    episodes, faults = read(name, tmp_path / "d")
    assert len(episodes) == 2 and not faults
    assert all(item.labels.tolist() == [0, 0, 0, 1] and item.success for item in episodes)


@pytest.mark.parametrize("name", WRITERS)
def test_mixed_image_sizes(tmp_path: Path, name: str) -> None:
    bad = raw()
    bad["images"]["side"][2] = np.zeros((4, 4, 3), np.uint8)
    check(name, tmp_path / "d", bad, "mixed image sizes: frame 2 of camera 'side' has shape")


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("npy-trajectory", "reward-pt")])
def test_missing_camera_in_a_frame(tmp_path: Path, name: str) -> None:
    bad = raw()
    del bad["images"]["side"][-1]
    check(name, tmp_path / "d", bad, "missing camera key: ")


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "folder"])
def test_no_camera_at_all(tmp_path: Path, name: str) -> None:
    bad = raw()
    if name == "npy-trajectory":
        bad["images"] = {}
    elif name == "reward-pt":
        bad["images"]["side"] = []
    else:
        del bad["images"]["main"]
    check(name, tmp_path / "d", bad, "missing camera key: ")


def test_npy_cameras_of_different_length(tmp_path: Path) -> None:
    bad = raw()
    del bad["images"]["side"][-1]
    check("npy-trajectory", tmp_path / "d", bad, "different numbers of frames: {'main': 4, 'side': 3}")


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "folder"])
def test_label_count(tmp_path: Path, name: str) -> None:
    bad = raw()
    del bad["labels"][-1]
    reasons = {
        "pkl-episode": "label missing: frame 3 has no 'success'",
        "realworld-pkl": "episode 0: transition 3 has no 'rewards'",
        "rlinf-episode": "has 3 infos for 4 actions",
    }
    check(name, tmp_path / "d", bad, reasons.get(name, "has 3 labels for 4 frames"))


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "folder"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_frames(tmp_path: Path, name: str, value: float) -> None:
    bad = raw()
    bad["images"]["side"] = [frame / np.float32(255) for frame in bad["images"]["side"]]
    bad["images"]["side"][1][0, 0, 0] = value
    check(name, tmp_path / "d", bad, "frame 1 of camera 'side' holds NaN or infinite values")


@pytest.mark.parametrize("name", ["npy-trajectory", "pkl-episode"])
def test_nan_or_impossible_labels(tmp_path: Path, name: str) -> None:
    for number, value in enumerate((np.nan, 2.0)):
        bad = raw()
        bad["labels"][1] = value
        check(name, tmp_path / str(number), bad, f"has the label {value:g} in frame 1")


@pytest.mark.parametrize("name", ["pkl-episode", "npy-trajectory"])
def test_mixed_value_types(tmp_path: Path, name: str) -> None:
    bad = raw()
    bad["images"]["side"][1] = bad["images"]["side"][1].astype(np.int64) * 1000
    reasons = {"pkl-episode": "is int64, frame 0 is uint8", "npy-trajectory": "expected 0 to"}
    check(name, tmp_path / "d", bad, reasons[name])


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("damage", ["empty", "half", "few bytes", "garbage", "text"])
def test_damaged_files(tmp_path: Path, name: str, damage: str) -> None:
    root = tmp_path / "d"
    path = WRITERS[name](root, [raw(0), raw(1)])[0]
    data = path.read_bytes()
    content = {
        "empty": b"",
        "half": data[: len(data) // 2],
        "few bytes": data[:5],
        "garbage": bytes(range(255, 0, -1)),
        "text": b"<html>not found</html>\n",
    }[damage]
    path.write_bytes(content)
    assert get_format(name).detect(root)
    episodes, faults = read(name, root)
    assert len(faults) == 1 and Path(faults[0].path) == path
    if damage == "empty" and name != "folder":
        assert faults[0].reason == "is empty"
    if name in ONE_FILE:
        assert not episodes
    elif name == "folder":  # only the step of the bad picture is lost
        assert sorted(item.num_frames for item in episodes) == [3, 4]
    else:
        assert len(episodes) == 1


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", WRITERS)
def test_payload_does_not_run(tmp_path: Path, name: str) -> None:
    """In every format: a file that would make a directory is refused, and what it asks for is named."""
    root, marker = tmp_path / "d", tmp_path / "marker"
    bad = raw() | {"extra": {"x": Payload(marker)}}
    path = WRITERS[name](root, [bad, raw(1)])[0]
    if name == "folder":
        path.write_bytes(pickle.dumps(Payload(marker)))
    elif path.suffix == ".npy":
        np.load(path, allow_pickle=True)
    elif path.suffix == ".pt":
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())
    assert marker.exists() == (name != "folder"), "the payload is a live one"
    if marker.exists():
        marker.rmdir()
    assert get_format(name).detect(root)
    episodes, faults = read(name, root)
    assert not marker.exists()
    assert len(faults) == 1 and Path(faults[0].path) == path
    if name == "folder":
        assert "not a readable picture" in faults[0].reason
    else:
        assert faults[0].reason == "asks for posix.mkdir, which is not plain data; nothing was run"
    assert len(episodes) == {"realworld-pkl": 0, "folder": 2}.get(name, 1)


def test_payload_in_an_old_torch_file(tmp_path: Path) -> None:
    torch.save(
        {"images": [Payload(tmp_path / "ran")]}, tmp_path / "train.pt", _use_new_zipfile_serialization=False
    )
    _, faults = read("reward-pt", tmp_path)
    assert "asks for posix.mkdir" in faults[0].reason
    assert not (tmp_path / "ran").exists()


class Foreign:
    """A class that is not ours."""


@pytest.mark.parametrize("name", ["npy-trajectory", "pkl-episode", "reward-pt", "rlinf-episode"])
def test_foreign_classes(tmp_path: Path, name: str) -> None:
    bad = raw() | {"extra": {"x": np.array([Foreign()], dtype=object)}}
    check(name, tmp_path / "d", bad, "Foreign, which is not plain data")


@pytest.mark.parametrize(
    ("name", "file", "content", "reason"),
    [
        ("npy-trajectory", "positive/000000.npy", np.zeros(3), "holds an array of shape [3], not a dict"),
        ("npy-trajectory", "positive/000000.npy", np.array([1], dtype=object), "not a dict"),
        ("npy-trajectory", "positive/000000.npy", {"labels": [1]}, "has no 'images'; it has ['labels']"),
        ("pkl-episode", "success/episode_000000.pkl", [1, 2], "it is a list, not a dict"),
        ("pkl-episode", "success/episode_000000.pkl", {"frames": []}, "has no frames"),
        ("pkl-episode", "success/episode_000000.pkl", {"frames": [1]}, "frame 0 is a int, not a dict"),
        (
            "pkl-episode",
            "success/episode_000000.pkl",
            {"frames": [{"obs": 5, "success": 1}]},
            "frame 0 is a int",
        ),
        ("realworld-pkl", "data.pkl", {"a": 1}, "holds a dict, not a list of transitions"),
        ("realworld-pkl", "data.pkl", [1, 2], "episode 0: transition 0 is a int, not a dict"),
        ("reward-pt", "train.pt", {"images": 1}, "'images' is not a list of tensors"),
        ("reward-pt", "train.pt", {"images": []}, "has no frames"),
        ("reward-pt", "train.pt", [1], "it is a list, not a dict"),
        ("rlinf-episode", "rank_0_env_0_episode_0_fail.pkl", {"actions": []}, "has no actions"),
        ("rlinf-episode", "rank_0_env_0_episode_0_fail.pkl", {"actions": [1]}, "has no 'observations'"),
    ],
)
def test_other_content(tmp_path: Path, name: str, file: str, content: Any, reason: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, content, allow_pickle=True)
    elif path.suffix == ".pt":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    _, faults = read(name, tmp_path)
    assert len(faults) == 1 and reason in faults[0].reason, faults


def test_one_image_a_million_times(tmp_path: Path) -> None:
    """A small file can refer to one image so often that the stack of them would not fit into memory."""
    image = np.zeros((300, 300, 3), np.uint8)
    frame = {"obs": {"main_images": image}, "success": False}
    (tmp_path / "success").mkdir()
    path = tmp_path / "success" / "episode_000000.pkl"
    path.write_bytes(pickle.dumps({"frames": [frame] * 200_000}))
    assert path.stat().st_size < 1 << 20
    _, faults = read("pkl-episode", tmp_path)
    assert "200000 frames in 670670 bytes" in faults[0].reason


def test_picture_in_both_directories(tmp_path: Path) -> None:
    """Its label is contradictory: the step is left out, and the rest is read."""
    write_folder(tmp_path / "d", [raw(0)])
    name = "x_000000_frame001_main.png"
    (tmp_path / "d" / "success" / name).write_bytes((tmp_path / "d" / "failure" / name).read_bytes())
    (item,), (fault,) = read("folder", tmp_path / "d")
    assert item.num_frames == 3 and item.labels.tolist() == [0, 0, 1]
    assert fault.path.endswith(name) and "is there twice" in fault.reason


@pytest.mark.parametrize(("name", "file"), [("realworld-pkl", "data.pkl"), ("reward-pt", "train.pt")])
def test_damaged_file_is_not_added_to(tmp_path: Path, name: str, file: str) -> None:
    (tmp_path / file).write_bytes(b"half a file")
    with pytest.raises(DataError, match=file):
        get_format(name).writer(tmp_path)
    assert (tmp_path / file).read_bytes() == b"half a file"


def test_errors_name_the_file_when_read_directly(tmp_path: Path) -> None:
    buffer = io.BytesIO(pickle.dumps(Payload(tmp_path / "ran")))
    from guerdon.data.files.safe_pickle import load

    with pytest.raises(UnsafeDataError, match=r"^<stream>: asks for posix\.mkdir"):
        load(buffer)
