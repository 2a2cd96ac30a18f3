"""Guerdon's LeRobot format against the real `lerobot` package, each in its own environment.

    PYTHON312 scripts/check_lerobot.py write DIR    with lerobot: data sets that Guerdon is to read
    python    scripts/check_lerobot.py guerdon DIR  with Guerdon: reads and compares them; writes its own
    PYTHON312 scripts/check_lerobot.py read DIR     with lerobot: opens and compares what Guerdon wrote

`write --small` makes the little files that are kept in `tests/data/store/lerobot`. Pictures and numbers are
computed from the numbers of episode and step, so that every side knows what the others should hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CAMERAS = ("front", "wrist")
FPS = 10
TASKS = ("place the cube", "lift the cube")
MIN_PSNR = 35.0


# What the data sets hold


def num_steps(episode: int) -> int:
    """Rows of an episode."""
    return 6 + episode % 3


def picture(episode: int, step: int, camera: str, size: int, noise: bool = False) -> NDArray[np.uint8]:
    """uint8 [size, size, 3]: a colour gradient and a spot that moves; or noise, which fills files."""
    if noise:
        seed = [episode, step, CAMERAS.index(camera)]
        return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    ramp, place = np.linspace(40, 160, size), np.arange(size) / size
    image = np.empty((size, size, 3))
    image[..., 0], image[..., 1] = ramp[None, :], ramp[:, None]
    image[..., 2] = 60 + 20 * (episode % 5) + (40 if camera == "wrist" else 0)
    at = 0.2 + 0.08 * (step % 8)
    image += 60 * np.exp(-(((place - at) ** 2)[:, None] + ((place - 0.5) ** 2)[None, :]) / 0.02)[..., None]
    return np.rint(image).astype(np.uint8)


def numbers(episode: int, step: int) -> dict[str, NDArray[Any]]:
    """The columns of a row, as LeRobot takes them; even episodes succeed in their last two rows."""
    success = episode % 2 == 0 and step >= num_steps(episode) - 2
    return {
        "observation.state": np.array([episode, step, 0.5 * step], np.float32),
        "action": np.array([step + 0.25, -episode], np.float32),
        "next.reward": np.array([float(success)], np.float32),
        "next.success": np.array([success], np.bool_),
        "next.done": np.array([step == num_steps(episode) - 1], np.bool_),
    }


def psnr(have: NDArray[Any], want: NDArray[Any]) -> float:
    """Of uint8 pictures, in dB."""
    error = float(np.mean((have.astype(np.float64) - want.astype(np.float64)) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(255.0**2 / error))


# With lerobot


def features(kind: str, size: int, layout: str) -> dict[str, Any]:
    """As LeRobot wants them."""
    shape, names = (size, size, 3), ["height", "width", "channels"]
    if layout == "CHW":
        shape, names = (3, size, size), ["channels", "height", "width"]
    cameras = {
        f"observation.images.{name}": {"dtype": kind, "shape": shape, "names": names} for name in CAMERAS
    }
    one = {"shape": (1,), "names": None}
    return {
        **cameras,
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "next.reward": {"dtype": "float32", **one},
        "next.success": {"dtype": "bool", **one},
        "next.done": {"dtype": "bool", **one},
    }


def write_with_lerobot(
    root: Path, kind: str, *, size: int, episodes: int, limit: float, layout: str = "HWC", noise: bool = False
) -> None:
    """A data set with two cameras whose files are at most `limit` MB."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    shutil.rmtree(root, ignore_errors=True)
    data = LeRobotDataset.create(
        repo_id=f"local/{root.name}",
        root=root,
        fps=FPS,
        features=features(kind, size, layout),
        use_videos=kind == "video",
        robot_type="check",
    )
    data.meta.update_chunk_settings(data_files_size_in_mb=limit, video_files_size_in_mb=limit)
    for episode in range(episodes):
        for step in range(num_steps(episode)):
            images = {
                f"observation.images.{name}": picture(episode, step, name, size, noise) for name in CAMERAS
            }
            data.add_frame({**images, **numbers(episode, step), "task": TASKS[episode % 2]})
        data.save_episode()
    data.finalize()
    files = [path for path in root.rglob("*") if path.suffix in (".parquet", ".mp4")]
    parts = {
        folder: sum(path.relative_to(root).parts[0] == folder for path in files)
        for folder in ("data", "videos")
    }
    print(f"{root.name}: {data.meta.total_episodes} episodes, {data.meta.total_frames} rows, files: {parts}")


def write_all(root: Path, small: bool) -> None:
    """All data sets of the check."""
    print(versions("lerobot", "torch", "av", "pyarrow", "datasets"))
    if small:
        write_with_lerobot(root / "v30_images", "image", size=16, episodes=5, limit=0.02, layout="CHW")
        write_with_lerobot(root / "v30_videos", "video", size=64, episodes=5, limit=0.003)
    else:
        write_with_lerobot(root / "v30_images", "image", size=96, episodes=12, limit=1, noise=True)
        write_with_lerobot(root / "v30_chw", "image", size=32, episodes=4, limit=1, layout="CHW")
        write_with_lerobot(root / "v30_videos", "video", size=128, episodes=12, limit=1)
        write_with_lerobot(root / "v30_split", "video", size=256, episodes=6, limit=1, noise=True)
    write_v21(root / "v21_videos", size=64, episodes=4)


def write_v21(root: Path, *, size: int, episodes: int) -> None:
    """The layout of v2.1 by hand: a parquet file and a video for each episode and camera."""
    import av
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.rmtree(root, ignore_errors=True)
    (root / "meta").mkdir(parents=True)
    columns = features("video", size, "HWC")
    for key in CAMERAS:
        columns[f"observation.images.{key}"]["info"] = {
            "video.fps": FPS, "video.height": size, "video.width": size, "video.channels": 3,
            "video.codec": "h264", "video.pix_fmt": "yuv420p", "has_audio": False,
        }  # fmt: skip
    one = {"shape": (1,), "names": None}
    columns["timestamp"] = {"dtype": "float32", **one}
    for key in ("frame_index", "episode_index", "index", "task_index"):
        columns[key] = {"dtype": "int64", **one}
    total, facts, stats = 0, [], []
    for episode in range(episodes):
        count = num_steps(episode)
        rows = [numbers(episode, step) for step in range(count)]
        table: dict[str, Any] = {
            key: pa.array([row[key].tolist() for row in rows], pa.list_(pa.float32(), size_of))
            for key, size_of in (("observation.state", 3), ("action", 2))
        }
        for key in ("next.reward", "next.success", "next.done"):
            table[key] = pa.array([row[key][0].item() for row in rows])
        table["next.reward"] = table["next.reward"].cast(pa.float32())
        table["timestamp"] = pa.array(np.arange(count, dtype=np.float32) / np.float32(FPS))
        table["frame_index"] = pa.array(range(count), pa.int64())
        table["episode_index"] = pa.array([episode] * count, pa.int64())
        table["index"] = pa.array(range(total, total + count), pa.int64())
        table["task_index"] = pa.array([episode % 2] * count, pa.int64())
        file = root / f"data/chunk-000/episode_{episode:06d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), file)
        for name in CAMERAS:
            video = root / f"videos/chunk-000/observation.images.{name}/episode_{episode:06d}.mp4"
            video.parent.mkdir(parents=True, exist_ok=True)
            with av.open(str(video), "w") as output:
                stream: Any = output.add_stream("libx264", rate=FPS, options={"crf": "10", "g": "2"})
                stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
                for step in range(count):
                    frame = av.VideoFrame.from_ndarray(picture(episode, step, name, size), format="rgb24")
                    output.mux(stream.encode(frame))
                output.mux(stream.encode())
        total += count
        facts.append({"episode_index": episode, "tasks": [TASKS[episode % 2]], "length": count})
        stats.append({"episode_index": episode, "stats": _stats_v21(columns, rows, count)})
    info = {
        "codebase_version": "v2.1", "robot_type": "check", "total_episodes": episodes,
        "total_frames": total, "total_tasks": 2, "total_videos": episodes * len(CAMERAS), "total_chunks": 1,
        "chunks_size": 1000, "fps": FPS, "splits": {"train": f"0:{episodes}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": columns,
    }  # fmt: skip
    (root / "meta/info.json").write_text(json.dumps(info, indent=2))
    for name, lines in (
        ("episodes", facts),
        ("episodes_stats", stats),
        ("tasks", [{"task_index": number, "task": task} for number, task in enumerate(TASKS)]),
    ):
        (root / f"meta/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{root.name}: {episodes} episodes, {total} rows")


def _stats_v21(columns: dict[str, Any], rows: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """Enough for LeRobot's converter."""
    made: dict[str, Any] = {}
    for key, column in columns.items():
        if column["dtype"] == "video":
            flat = [[[0.5]]] * 3
            made[key] = {"min": flat, "max": flat, "mean": flat, "std": flat, "count": [count]}
            continue
        values = np.stack([np.asarray(row[key], np.float64) for row in rows]) if key in rows[0] else None
        values = np.zeros((count, 1)) if values is None else values
        kinds = ("min", "max", "mean", "std")
        made[key] = {kind: getattr(values, kind)(axis=0).tolist() for kind in kinds} | {"count": [count]}
    return made


def read_with_lerobot(root: Path) -> None:
    """Open what Guerdon wrote, and compare every row."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    print(versions("lerobot", "torch", "av", "pyarrow", "datasets"))
    for folder in sorted(root.glob("guerdon_*")):
        data = LeRobotDataset(f"local/{folder.name}", root=folder, video_backend="pyav")
        video = bool(data.meta.video_keys)
        worst, rows = float("inf"), 0
        starts = {int(ep["episode_index"]): int(ep["dataset_from_index"]) for ep in data.meta.episodes}
        for index in range(len(data)):
            item = data[index]
            episode = int(item["episode_index"])
            step = index - starts[episode]
            check(int(item["frame_index"]) == step, f"{folder.name}: frame_index of row {index}")
            check(abs(float(item["timestamp"]) - step / data.meta.fps) < 1e-4, f"timestamp of row {index}")
            _compare_row(folder.name, item, episode, step)
            for name in CAMERAS:
                image = item[f"observation.images.{name}"].permute(1, 2, 0).numpy()
                have = np.rint(image * 255).astype(np.uint8)
                want = picture(episode, step, name, have.shape[0])
                worst = min(worst, psnr(have, want))
            rows += 1
        check(worst >= (MIN_PSNR if video else float("inf")), f"{folder.name}: {worst:.1f} dB")
        ways = f"videos, worst frame {worst:.1f} dB" if video else "images equal"
        tasks = list(data.meta.tasks.index)
        files = len(list((folder / "data").rglob("*.parquet")))
        print(f"{folder.name}: {data.num_episodes} episodes, {rows} rows in {files} files, {ways}; {tasks}")


def _compare_row(folder: str, item: Any, episode: int, step: int) -> None:
    """The row's own label and state; the action that was chosen in it, which is the next step's."""
    want, last = numbers(episode, step), num_steps(episode) - 1
    following = numbers(episode, min(step + 1, last))
    for key, value in (
        ("observation.state", want["observation.state"]),
        ("action", following["action"]),
        ("next.success", want["next.success"]),
        ("next.reward", want["next.reward"]),
        ("next.done", want["next.done"]),
    ):
        have = item[key].numpy().reshape(value.shape)
        check(
            np.array_equal(have, value), f"{folder}: {key} of episode {episode}, step {step}: {have}, {value}"
        )


# With Guerdon


def with_guerdon(root: Path) -> None:
    """Read and compare what lerobot wrote; write data sets for lerobot to read."""
    from guerdon.core.types import Episode
    from guerdon.data.formats import get_format

    print(versions("guerdon", "av", "pyarrow", "numpy"))
    reader = get_format("lerobot").configured(label_at="row")
    for folder in sorted([*root.glob("v30_*"), *root.glob("v21_*")]):
        items = list(reader.read(folder))
        worst = float("inf")
        for episode, item in enumerate(items):
            check(isinstance(item, Episode), f"{folder.name}: {item}")
            worst = min(worst, compare_episode(folder.name, item, episode))
        print(f"{folder.name}: {len(items)} episodes read, worst frame {worst:.1f} dB")
    for name, settings in (("images", {}), ("videos", {"videos": True})):
        target = root / f"guerdon_{name}"
        shutil.rmtree(target, ignore_errors=True)
        with get_format("lerobot").configured(fps=FPS, task=TASKS[0], **settings).writer(target) as writer:
            writer.add_many(made_episodes(12, 96))
        print(f"{target.name}: written")


def made_episodes(count: int, size: int) -> Iterator[Any]:
    """The same content as episodes of Guerdon."""
    from guerdon.core.types import Episode

    for episode in range(count):
        steps = range(num_steps(episode))
        rows = [numbers(episode, step) for step in steps]
        labels = np.array([row["next.success"][0] for row in rows], np.float32)
        yield Episode(
            frames={
                name: np.stack([picture(episode, step, name, size) for step in steps]) for name in CAMERAS
            },
            labels=labels,
            success=bool(labels.any()),
            states=np.stack([row["observation.state"] for row in rows]),
            actions=np.stack([row["action"] for row in rows]),
            env_rewards=labels,
            terminated=np.array([row["next.done"][0] for row in rows]),
            truncated=np.zeros(len(rows), np.bool_),
        )


def compare_episode(
    folder: str, item: Any, episode: int, make: Callable[..., NDArray[np.uint8]] = picture
) -> float:
    """The worst PSNR of the frames of an episode, read with `label_at=row`; all else must be equal."""
    rows = [numbers(episode, step) for step in range(num_steps(episode))]
    check(item.num_frames == len(rows), f"{folder}: {item.num_frames} frames in episode {episode}")
    states = np.stack([row["observation.state"] for row in rows])
    actions = np.stack([row["action"] for row in rows])
    check(np.array_equal(item.states, states), f"{folder}: states of episode {episode}")
    check(np.array_equal(item.actions[1:], actions[:-1]), f"{folder}: actions of episode {episode}")
    success = np.array([row["next.success"][0] for row in rows])
    check(np.array_equal(item.labels >= 0.5, success), f"{folder}: labels of episode {episode}")
    noise = folder in ("v30_images", "v30_split") and item.frames["front"].shape[1] > 64
    worst = float("inf")
    for name in CAMERAS:
        for step, have in enumerate(item.frames[name]):
            want = make(episode, step, name, have.shape[0], noise)
            if not (noise and folder == "v30_split"):  # AV1 cannot keep noise; only the time is compared
                worst = min(worst, psnr(have, want))
    exact = folder in ("v30_images", "v30_chw")
    check(worst == float("inf") if exact else worst >= MIN_PSNR, f"{folder}: {worst:.1f} dB")
    return worst


def check(holds: bool, what: str) -> None:
    """End with a message unless it holds."""
    if not holds:
        raise SystemExit(f"FAILED: {what}")


def versions(*names: str) -> str:
    """Installed versions in one line."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main() -> None:
    """One of the three steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["write", "guerdon", "read"])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--small", action="store_true", help="the files that are kept in the tests")
    arguments = parser.parse_args()
    if arguments.step == "write":
        write_all(arguments.dir, arguments.small)
    elif arguments.step == "guerdon":
        with_guerdon(arguments.dir)
    else:
        read_with_lerobot(arguments.dir)


if __name__ == "__main__":
    main()
