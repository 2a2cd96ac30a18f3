"""Data sets of LeRobot v3.0 that Guerdon writes, against those of the real package with the same content."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot_files import HERE, copy_of, script
from strategies import assert_same

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import get_format
from guerdon.data.formats.lerobot import LeRobotData, add_columns, writing
from guerdon.data.summary import convert, inspect

CHECK = script()


def write(root: Path, episodes: list[Episode], **settings: Any) -> Path:
    with get_format("lerobot").configured(fps=CHECK.FPS, **settings).writer(root) as writer:
        writer.add_many(episodes)
    return root


def read(root: Path) -> list[Any]:
    return list(get_format("lerobot").read(root))


def same_content(size: int = 16) -> list[Episode]:
    """What the real package wrote to `v30_images`, with its labels and actions at the same rows."""
    episodes = []
    for number, episode in enumerate(CHECK.made_episodes(5, size)):
        rows = [CHECK.numbers(number, step)["action"] for step in range(episode.num_frames)]
        actions = np.stack([rows[0], *rows[:-1]])  # the action of a row is the next step's
        episodes.append(replace(episode, actions=actions))
    return episodes


def test_columns_types_and_statistics_are_those_of_the_real_package(tmp_path: Path) -> None:
    root = write(tmp_path / "d", same_content())
    ours = pq.read_table(next((root / "data").rglob("*.parquet")))
    theirs = pq.read_table(min((HERE / "v30_images/data").rglob("*.parquet")))
    for field in theirs.schema:
        assert ours.schema.field(field.name).type == field.type, field.name
    for name in ("timestamp", "frame_index", "episode_index", "index", "observation.state", "next.success"):
        assert ours.column(name)[:13].to_pylist() == theirs.column(name)[:13].to_pylist(), name
    assert ours.column("action")[:5].to_pylist() == theirs.column("action")[:5].to_pylist()
    mine = pq.read_table(next((root / "meta/episodes").rglob("*.parquet")))
    real = pq.read_table(next((HERE / "v30_images/meta/episodes").rglob("*.parquet")))
    assert set(real.column_names) <= set(mine.column_names)
    for name in ("episode_index", "length", "dataset_from_index", "dataset_to_index"):
        assert mine.column(name).to_pylist() == real.column(name).to_pylist(), name
    ours, theirs = (
        json.loads((path / "meta/stats.json").read_text()) for path in (root, HERE / "v30_images")
    )
    assert set(theirs) <= set(ours)
    for name in ("observation.images.front", "observation.images.wrist", "observation.state", "next.reward"):
        for key in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(ours[name][key], theirs[name][key], rtol=1e-4, atol=1e-5, err_msg=name)
        for key in ("q10", "q50", "q90"):  # theirs are of histograms, and at other places between two values
            assert np.shape(ours[name][key]) == np.shape(theirs[name][key])
    info = json.loads((root / "meta/info.json").read_text())
    real = json.loads((HERE / "v30_images/meta/info.json").read_text())
    assert set(real) - {"tools"} <= set(info)
    assert (info["data_path"], info["chunks_size"], info["splits"]) == (
        real["data_path"],
        real["chunks_size"],
        real["splits"],
    )


def test_files_split_at_their_limits(tmp_path: Path) -> None:
    noise = [
        replace(
            episode,
            frames={
                name: np.stack(
                    [CHECK.picture(number, step, name, 64, noise=True) for step in range(episode.num_frames)]
                )
                for name in CHECK.CAMERAS
            },
        )
        for number, episode in enumerate(same_content())
    ]
    root = tmp_path / "images"
    with get_format("lerobot").configured(data_files_mb=0.3).writer(root) as writer:
        writer.add_many(noise)
        assert 0 < len(read(root)) < 5, "full files are written before the writer is closed"
    sizes = [path.stat().st_size for path in (root / "data").rglob("*.parquet")]
    assert len(sizes) > 1 and max(sizes) < 0.35 * 2**20
    for have, want in zip(read(root), noise, strict=True):
        assert_same(have, want, ("frames", "labels", "actions", "states"))
    groups = [pq.ParquetFile(path).num_row_groups for path in (root / "data").rglob("*.parquet")]
    assert sum(groups) == 5, "a row group an episode"


@pytest.mark.parametrize("limit", [200, 0.006])
def test_videos_hold_several_episodes_and_keep_their_frames(tmp_path: Path, limit: float) -> None:
    episodes = same_content(size=64)
    root = write(tmp_path / "d", episodes, videos=True, video_files_mb=limit)
    files = len(list((root / "videos").rglob("*.mp4")))
    assert files == 2 if limit == 200 else 2 < files < 10
    for number, (have, want) in enumerate(zip(read(root), episodes, strict=True)):
        assert isinstance(have, Episode)
        assert CHECK.compare_episode("ours", replace(have, actions=_unshifted(number, have)), number) >= 35
        np.testing.assert_array_equal(have.labels, want.labels)
    info = json.loads((root / "meta/info.json").read_text())
    about = info["features"]["observation.images.front"]["info"]
    assert about["video.codec"] == "av1" and about["video.pix_fmt"] == "yuv420p" and about["video.g"] == 2


def _unshifted(number: int, episode: Episode) -> Any:
    """As `compare_episode` expects them."""
    return np.stack([CHECK.numbers(number, max(step - 1, 0))["action"] for step in range(episode.num_frames)])


def test_gray_frames_as_video(tmp_path: Path) -> None:
    gray = [
        replace(item, frames={name: frames[..., :1] for name, frames in item.frames.items()})
        for item in same_content(64)[:1]
    ]
    (found,) = read(write(tmp_path / "d", gray, videos=True))
    assert found.frames["front"].shape == gray[0].frames["front"].shape
    assert CHECK.psnr(found.frames["front"], gray[0].frames["front"]) > 35


def test_odd_sizes_and_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a video needs even sides"):
        write(tmp_path / "d", same_content(17)[:1], videos=True)
    for settings in ({"task": " "}, {"data_files_mb": 0}):
        with pytest.raises(ConfigError):
            write(tmp_path / "e", [], **settings)
    with pytest.raises(ConfigError, match="fps must be a whole number"):
        get_format("lerobot").configured(fps=0).writer(tmp_path / "e")


def test_an_episode_that_does_not_fit_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    good = same_content()
    source = tmp_path / "source"
    with get_format("pkl-episode").writer(source) as writer:
        writer.add_many([good[0], replace(good[1], states=None), good[2]])
    written, faults = convert(source, tmp_path / "d", "lerobot")
    assert written == 2 and len(faults) == 1
    assert "it lacks 'observation.state'" in faults[0].reason
    assert inspect(tmp_path / "d").num_episodes == 2


def test_a_data_set_of_others_is_not_added_to(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    with pytest.raises(DataError, match="Guerdon did not write; write to a new folder"):
        get_format("lerobot").writer(root)


def test_what_a_killed_writer_has_staged_is_joined_by_the_next(tmp_path: Path) -> None:
    episodes = same_content()
    killed = get_format("lerobot").writer(tmp_path)
    killed.add_many(episodes[:2])
    torn = tmp_path / writing.STAGING / ".torn"
    torn.mkdir()
    (torn / "rows.parquet").write_bytes(b"PAR1")
    with get_format("lerobot").writer(tmp_path) as writer:
        writer.add(episodes[2])
    for have, want in zip(read(tmp_path), episodes[:3], strict=True):
        assert_same(have, want, ("frames", "labels", "actions"))


def test_no_episode_is_joined_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is killed after `info.json` and before its staged episodes are gone."""
    episodes = same_content()
    with monkeypatch.context() as patch:
        patch.setattr(writing.shutil, "rmtree", lambda *args, **kwargs: 1 / 0)
        writer = get_format("lerobot").writer(tmp_path)
        writer.add_many(episodes[:2])
        with pytest.raises(ZeroDivisionError):
            writer.close()
    with get_format("lerobot").writer(tmp_path) as writer:
        writer.add(episodes[2])
    assert [item.num_frames for item in read(tmp_path)] == [item.num_frames for item in episodes[:3]]
    assert not (tmp_path / writing.STAGING).exists()


@pytest.mark.parametrize("file", ["facts.json", "rows.parquet"])
def test_a_kill_while_a_staged_episode_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Whichever file is gone first: the data set can still be written, and no episode is there twice."""
    episodes = same_content()

    def dies(folder: Path, **settings: Any) -> None:
        (folder / file).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing.shutil, "rmtree", dies)
        writer = get_format("lerobot").writer(tmp_path)
        writer.add_many(episodes[:2])
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    with get_format("lerobot").writer(tmp_path) as writer:
        writer.add(episodes[2])
    assert [item.num_frames for item in read(tmp_path)] == [item.num_frames for item in episodes[:3]]
    assert not (tmp_path / writing.STAGING).exists()


@pytest.mark.parametrize("file", ["facts.json", "rows.parquet"])
def test_what_an_older_version_left_half_deleted(tmp_path: Path, file: str) -> None:
    """It deleted staged episodes under their own names."""
    episodes = same_content()
    killed = get_format("lerobot").writer(tmp_path)
    killed.add(episodes[0])
    kept = shutil.copytree(tmp_path / writing.STAGING / "000000", tmp_path / "kept")
    killed.close()
    (kept / file).unlink()
    (tmp_path / writing.STAGING).mkdir()
    kept.rename(tmp_path / writing.STAGING / "000000")
    with get_format("lerobot").writer(tmp_path) as writer:
        writer.add(episodes[1])
    assert [item.num_frames for item in read(tmp_path)] == [item.num_frames for item in episodes[:2]]
    assert not (tmp_path / writing.STAGING).exists()


def test_two_writers_at_once(tmp_path: Path) -> None:
    episodes = same_content()
    one, other = get_format("lerobot").writer(tmp_path), get_format("lerobot").writer(tmp_path)
    one.add(episodes[0])
    other.add(episodes[1])
    one.close()
    other.add(episodes[2])
    other.close()
    lengths = [item.num_frames for item in read(tmp_path)]
    assert lengths == [item.num_frames for item in episodes[:3]]


@pytest.mark.parametrize("name", ["v30_videos", "v21_videos", "v30_images"])
def test_add_columns_to_a_copy(tmp_path: Path, name: str) -> None:
    data = LeRobotData(HERE / name)
    rows = {place.index: place.length for place in data.meta.episodes}
    prob = {index: np.linspace(0, 1, count, dtype=np.float32) for index, count in rows.items() if index != 1}
    flip = {index: np.arange(count) == 0 for index, count in rows.items()}
    target = tmp_path / "copy"
    assert add_columns(HERE / name, target, {"score": prob, "next.success": flip}) == []
    with pytest.raises(DataError, match="exists already"):
        add_columns(HERE / name, target, {"prob_success": prob})
    before = list(get_format("lerobot").configured(label_at="row").read(HERE / name))
    after = list(get_format("lerobot").configured(label_at="row").read(target))
    for number, (have, want) in enumerate(zip(after, before, strict=True)):
        assert not isinstance(have, Fault)
        assert_same(have, want, ("frames", "actions", "states", "env_rewards"))
        assert have.labels.tolist() == flip[number].tolist()
    copied = LeRobotData(target)
    values = copied.numbers(copied.meta.episodes[2], ["score"])["score"].reshape(-1)
    np.testing.assert_array_equal(values, prob[2])
    gap = copied.numbers(copied.meta.episodes[1], ["score"])["score"]
    assert np.isnan(gap).all()
    if name.startswith("v30"):
        stats = json.loads((target / "meta/stats.json").read_text())
        assert stats["score"]["max"] == [1.0]
    for bad in ({"index": flip}, {"observation.images.front": flip}, {"x": {0: np.zeros(3, np.float32)}}):
        with pytest.raises(DataError):
            add_columns(HERE / name, tmp_path / "other", bad)
    assert not (tmp_path / "other").exists()
    shutil.rmtree(target)


@pytest.mark.parametrize(
    "numbers", [lambda count: range(3, count + 3), lambda count: range(-1, -count - 1, -1)]
)
def test_columns_go_by_rows_whatever_their_frame_index(tmp_path: Path, numbers: Any) -> None:
    """Also where an episode lies in several row groups."""
    root = copy_of("v30_images", tmp_path / "d")
    for path in (root / "data").rglob("*.parquet"):
        table = pq.read_table(path)
        episodes = table.column("episode_index").to_pylist()
        counts = [episodes.count(index) for index in dict.fromkeys(episodes)]
        values = pa.array([number for count in counts for number in numbers(count)], pa.int64())
        at = table.schema.get_field_index("frame_index")
        pq.write_table(table.set_column(at, "frame_index", values), path, row_group_size=4)
    data = LeRobotData(root)
    score = {place.index: np.arange(place.length) / 10 + place.index for place in data.meta.episodes}
    add_columns(root, tmp_path / "e", {"score": {i: each.astype(np.float32) for i, each in score.items()}})
    copied = LeRobotData(tmp_path / "e")
    for place in copied.meta.episodes:
        found = copied.numbers(place, ["score"])["score"].reshape(-1)
        np.testing.assert_array_equal(found, score[place.index].astype(np.float32))


def test_rows_that_do_not_fit_the_columns_are_refused(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    path = min((root / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    lengths = {place.index: place.length for place in LeRobotData(root).meta.episodes}
    score = {index: np.zeros(length, np.float32) for index, length in lengths.items()}
    for changed, count in ((table.slice(1), 5), (pa.concat_tables([table.slice(0, 1), table]), 7)):
        pq.write_table(changed, path)
        with pytest.raises(DataError, match=f"has {count} rows of the episode 0; meta/ tells of 6"):
            add_columns(root, tmp_path / "e", {"score": score})
    assert [item.name for item in tmp_path.iterdir()] == ["d"]
    del score[0]  # which leaves that episode alone
    assert add_columns(root, tmp_path / "e", {"score": score}) == []
