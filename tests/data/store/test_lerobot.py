"""Data sets of LeRobot, written by its own package: what each row becomes, and what damage costs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from lerobot_files import HERE, REAL, change_columns, change_info, copy_of, script

from guerdon.cli.main import main
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import Episode, Fault
from guerdon.data.datasets.audit import audit
from guerdon.data.formats import detect_format, get_format
from guerdon.data.formats.lerobot import LeRobotData, frames
from guerdon.data.formats.lerobot.labels import read_outcomes
from guerdon.data.store import EpisodeStore
from guerdon.data.summary import convert, inspect

CHECK = script()


def read(root: Path, **settings: Any) -> tuple[list[Episode], list[Fault]]:
    items = list(get_format("lerobot").configured(**settings).read(root))
    return [i for i in items if isinstance(i, Episode)], [i for i in items if isinstance(i, Fault)]


@pytest.mark.parametrize("name", REAL)
def test_what_the_real_package_wrote_is_read(name: str) -> None:
    """Images and numbers are equal, frames of videos are those of their times."""
    assert detect_format(HERE / name).name == "lerobot"
    episodes, faults = read(HERE / name, label_at="row")
    assert not faults and len(episodes) == (4 if name.startswith("v21") else 5)
    for number, episode in enumerate(episodes):
        CHECK.compare_episode(name, episode, number)
        assert episode.terminated is not None and episode.truncated is not None
        assert (episode.terminated | episode.truncated).tolist() == [False] * (episode.num_frames - 1) + [
            True
        ]
        assert episode.env_rewards is not None and episode.env_rewards.tolist() == episode.labels.tolist()


def test_several_files_are_in_the_stored_data() -> None:
    assert len(list((HERE / "v30_images/data").rglob("*.parquet"))) > 1
    assert len(list((HERE / "v30_videos/videos").rglob("*.mp4"))) > 2


def test_next_moves_every_label_to_the_frame_it_was_recorded_for() -> None:
    rows, _ = read(HERE / "v30_images", label_at="row")
    moved, _ = read(HERE / "v30_images", label_at="next")
    for row, item in zip(rows, moved, strict=True):
        np.testing.assert_array_equal(item.frames["front"], row.frames["front"][1:])
        np.testing.assert_array_equal(item.labels, row.labels[:-1])
        assert row.states is not None and item.states is not None and item.initial_state is not None
        np.testing.assert_array_equal(item.states, row.states[1:])
        np.testing.assert_array_equal(item.initial_state, row.states[0])
        assert row.actions is not None and item.actions is not None
        np.testing.assert_array_equal(item.actions, row.actions[1:])


def last_row_only(episode: int, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    count = len(columns["index"])
    return {**columns, "next.success": [False] * (count - 1) + [episode % 2 == 0]}


def test_label_at_is_chosen_by_the_data_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held, _ = read(HERE / "v30_images")  # the last two rows of a success are positive
    assert "label_at=next" in caplog.text and held[0].num_frames == 5
    assert held[0].labels.tolist() == [0, 0, 0, 0, 1]
    caplog.clear()
    root = copy_of("v30_images", tmp_path / "d")
    change_columns(root, last_row_only)
    ended, _ = read(root)
    assert "label_at=row: in 3 of 3 successful episodes the last row alone is positive" in caplog.text
    assert ended[0].labels.tolist() == [0, 0, 0, 0, 0, 1] and ended[0].success
    assert [item.success for item in ended] == [True, False, True, False, True]


def test_audit_measures_what_each_choice_would_lose(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    change_columns(root, last_row_only)
    for label_at, level in (("row", "info"), ("next", "warning")):
        report = audit(root, get_format("lerobot").configured(label_at=label_at))
        (found,) = (item for item in report.findings if item.check == "label_at")
        assert found.level == level
        assert "3 of 3 positive labels" in found.message
        assert "all success of 3 of 3 successes" in found.message
        assert "label_at=row puts 3 labels on the frame one step before success" in found.message


def without_labels(episode: int, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: values for name, values in columns.items() if not name.startswith("next.")}


def test_the_outcome_of_an_episode_is_no_label_of_its_frames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RLinf writes `is_success` of the whole episode on every row."""
    root = copy_of("v30_images", tmp_path / "d")
    change_columns(
        root,
        lambda e, c: {**without_labels(e, c), "is_success": [e % 2 == 0] * len(c["index"])},
    )
    episodes, _ = read(root)
    assert "taken for the outcome of the episode" in caplog.text
    assert [item.success for item in episodes] == [True, False, True, False, True]
    assert all(item.complete for item in episodes)
    assert all(item.labels[:-1].max() == 0 and item.labels[-1] == item.success for item in episodes)
    assert any("outcome of the episode" in finding.message for finding in audit(root).findings)


def test_progress_is_no_label_unless_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """opensarm writes a progress from 0 to 1 as `reward`."""
    root = copy_of("v30_images", tmp_path / "d")
    change_columns(
        root,
        lambda e, c: {**without_labels(e, c), "reward": np.linspace(0, 1, len(c["index"])).tolist()},
    )
    episodes, _ = read(root)
    assert "'reward' takes other values than 0 and 1" in caplog.text
    assert not any(item.success or item.complete or item.labels.any() for item in episodes)
    assert any("looks like progress" in finding.message for finding in audit(root).findings)
    asked, _ = read(root, label_from="reward", label_at="row")
    assert asked[0].labels[2] == pytest.approx(0.4)
    with pytest.raises(DataError, match="has no column 'rewards'"):
        read(root, label_from="rewards")


def test_episodes_without_labels_get_outcomes_from_a_file(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    change_columns(root, without_labels)
    plain, _ = read(root)
    assert not any(item.complete or item.success for item in plain)
    for name, content in (
        ("a.json", '{"0": true, "3": false}'),
        ("b.json", '[{"episode_index": 0, "success": true}, {"episode_index": 3, "success": false}]'),
        ("c.csv", "episode_index,success\n0,true\n3,0\n"),
    ):
        (tmp_path / name).write_text(content)
        episodes, _ = read(root, outcomes=tmp_path / name)
        assert [item.complete for item in episodes] == [True, False, False, True, False], name
        assert [item.success for item in episodes] == [True, False, False, False, False]
        assert episodes[0].labels.tolist() == [0, 0, 0, 0, 0, 1]
    (tmp_path / "bom.csv").write_bytes(
        b"\xef\xbb\xbfepisode_index,success\r\n2,true\r\n"
    )  # as Excel saves it
    assert read_outcomes(tmp_path / "bom.csv") == {2: True}
    (tmp_path / "long.csv").write_text(f"episode_index,success\n{'1' * 200_000},true\n")
    with pytest.raises(DataError, match="cannot be read as CSV: field larger"):
        read_outcomes(tmp_path / "long.csv")
    for content, reason in (
        ("[1]", "holds no outcomes"),
        ('{"x": true}', "no episode_index"),
        ('{"0": 2}', "no outcome"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(DataError, match=reason):
            read_outcomes(tmp_path / "bad.json")


def test_outcomes_and_columns_that_are_asked_for_win_over_what_guerdon_noted(tmp_path: Path) -> None:
    with get_format("lerobot").writer(tmp_path / "d") as writer:
        for success in (True, False):
            labels = np.array([0, 0, success], np.float32)
            images = {"front": np.zeros((3, 8, 8, 3), np.uint8)}
            rewards = np.array([0, 0, not success], np.float32)
            writer.add(Episode(frames=images, labels=labels, success=success, env_rewards=rewards))
    (tmp_path / "o.json").write_text('{"0": false, "1": true}')
    for settings in ({"outcomes": tmp_path / "o.json"}, {"label_from": "next.reward"}):
        episodes, _ = read(tmp_path / "d", **settings)
        assert [item.success for item in episodes] == [False, True], settings
        assert [item.labels.tolist() for item in episodes] == [[0, 0, 0], [0, 0, 1]]
    assert [item.success for item in read(tmp_path / "d")[0]] == [True, False]


def test_a_recording_that_crashed_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    whole, _ = read(root)
    last = sorted((root / "data").rglob("*.parquet"))[-1]
    lost = len(set(pq.read_table(last).column("episode_index").to_pylist()))
    last.write_bytes(last.read_bytes()[:-200])
    episodes, faults = read(root)
    assert len(episodes) == len(whole) - lost and len(faults) == lost
    assert all("has no footer" in fault.reason and Path(fault.path) == last for fault in faults)
    meta = next((root / "meta/episodes").rglob("*.parquet"))
    meta.write_bytes(meta.read_bytes()[:-200])
    episodes, faults = read(root)
    assert not episodes and ["has no footer" in fault.reason for fault in faults] == [True, False]
    assert "5 are in no readable file" in faults[1].reason


@pytest.mark.parametrize("damage", ["picture", "no bytes", "size", "length", "label"])
def test_one_bad_episode_costs_no_other(tmp_path: Path, damage: str) -> None:
    root = copy_of("v30_images", tmp_path / "d")

    def change(episode: int, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if episode == 1:
            cells = columns["observation.images.front"]
            if damage == "picture":
                cells[2] = {**cells[2], "bytes": cells[2]["bytes"][:60]}
            elif damage == "no bytes":
                cells[2] = {"bytes": None, "path": "/etc/passwd"}
            elif damage == "size":
                cells[2] = {**cells[2], "bytes": _png(9)}
            elif damage == "length":
                columns = {name: values[:-1] for name, values in columns.items()}
            else:
                columns["next.reward"][1] = None
        return columns

    change_columns(root, change)
    episodes, faults = read(root)
    reasons = {
        "picture": "not a readable picture",
        "no bytes": "no embedded picture in row",
        "size": "has a picture of 9x9; info.json tells of 16x16",
        "length": "has 6 rows of the episode; meta/ tells of 7",
        "label": "next.reward has 1 gaps",
    }
    assert len(episodes) == 4 and len(faults) == 1
    assert faults[0].reason.startswith("episode 1: ") and reasons[damage] in faults[0].reason


def _png(side: int) -> bytes:
    from guerdon.data.formats.lerobot.encoding import png

    return png(np.zeros((side, side, 3), np.uint8))


def test_a_video_that_is_gone_or_torn_costs_its_episodes(tmp_path: Path) -> None:
    root = copy_of("v21_videos", tmp_path / "d")
    videos = sorted(root.rglob("*.mp4"))
    videos[0].unlink()
    videos[1].write_bytes(videos[1].read_bytes()[:1000])
    for find in (lambda: read(root)[1], lambda: list(inspect(root).faults)):
        faults = find()
        assert [fault.reason[:10] for fault in faults] == ["episode 0:", "episode 1:"]
        assert "does not exist" in faults[0].reason and "is not a readable video" in faults[1].reason
    assert len(read(root)[0]) == 2


def test_a_frame_must_be_at_its_time(tmp_path: Path) -> None:
    root = copy_of("v21_videos", tmp_path / "d")
    change_columns(root, lambda e, c: {**c, "timestamp": [t + 0.004 * (e == 2) for t in c["timestamp"]]})
    episodes, faults = read(root)
    assert len(episodes) == 3 and "has no frame at 0.1040 s" in faults[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data_path": "../other/{chunk_index}.parquet"}, "is no path inside the data set"),
        ({"data_path": "/etc/{file_index:03d}"}, "is no path inside the data set"),
        ({"data_path": "{chunk_index.__class__}"}, "is no path inside the data set"),
        ({"data_path": "{root}/x"}, "which names 'root'"),
        ({"codebase_version": "v4.0"}, "of LeRobot's version v4.0"),
        ({"fps": 0}, "has the fps 0"),
        ({"features": {}}, "has no features"),
        ({"features": {"observation.images.a/../b": {"dtype": "video", "shape": [8, 8, 3]}}}, "the camera"),
    ],
)
def test_info_that_leads_astray_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    change_info(root, lambda info: info.update(change))
    assert detect_format(root).name == "lerobot"
    try:
        found = read(root)[1]
        assert len(found) == 5
        message = found[0].reason
    except DataError as error:
        message = str(error)
    assert reason in message


def test_random_access_decodes_little_and_keeps_a_bounded_number_of_frames() -> None:
    data = LeRobotData(HERE / "v30_videos")
    try:
        episodes, _ = read(HERE / "v30_videos", label_at="row")
        rng = np.random.default_rng(0)
        for _ in range(12):
            number = int(rng.integers(len(episodes)))
            rows = rng.integers(0, episodes[number].num_frames, 3)
            found = data.frames(number, "wrist", rows)
            np.testing.assert_array_equal(found, episodes[number].frames["wrist"][rows])
        decoded = data.videos.num_decoded
        assert decoded <= 12 * 3 * 3  # a key frame every second frame
        data.frames(number, "wrist", rows)
        assert data.videos.num_decoded == decoded, "they are kept"
        with pytest.raises(DataError, match="is none of them"):
            data.frames(0, "wrist", [99])
    finally:
        data.close()
    small = frames.VideoReader(cache_bytes=3 * 64 * 64 * 3)
    place = data.meta.episodes[0].videos["observation.images.front"]
    small.frames(place.path, place.from_seconds + np.arange(6) / 10, (64, 64, 3))
    assert len(small._frames) == 3
    small.close()


def test_pictures_in_any_order_are_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes, _ = read(HERE / "v30_images", label_at="row")
    opened: list[int] = []
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, *a, **k: opened.append(1) or whole(self, *a, **k)
    )
    data = LeRobotData(HERE / "v30_images")
    data.frames(1, "wrist", [0])
    opened.clear()
    rows = [5, 0, 3, 3, 1]
    np.testing.assert_array_equal(data.frames(1, "wrist", rows), episodes[1].frames["wrist"][rows])
    assert len(opened) == 1
    assert data.frames(1, "wrist", []).shape == (0, 16, 16, 3)
    data.close()


def test_a_large_cache_of_frames_is_not_summed_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bookkeeping is one of numbers; what is kept stays within the bound."""
    reader = frames.VideoReader(cache_bytes=50 * 12)
    touched: list[int] = []

    class Frame(np.ndarray):  # type: ignore[type-arg]
        @property
        def nbytes(self) -> int:  # type: ignore[override]
            touched.append(1)
            return 12

    for number in range(100):
        reader._keep((Path("v"), number, 3), np.zeros((2, 2, 3), np.uint8).view(Frame))
    assert len(reader._frames) == 50 and len(touched) < 400
    reader._keep((Path("v"), 100, 3), np.zeros((30, 30, 3), np.uint8))
    assert len(reader._frames) == 50, "it would not fit alone"
    reader.close()
    assert reader._room == 50 * 12


def test_looking_decodes_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames.VideoReader, "_decoded", lambda *args: pytest.fail("a frame was decoded"))
    summary = inspect(HERE / "v30_videos")
    assert (summary.num_episodes, summary.num_success_episodes, summary.faults) == (5, 3, ())
    assert summary.cameras == {"front": (64, 64, 3), "wrist": (64, 64, 3)}
    assert get_format("lerobot").count(HERE / "v30_videos") == (3, 2)


def test_convert_is_interrupted_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode is read once: what the copy has is not decoded again."""
    monkeypatch.setattr("guerdon.data.summary.WRITE_BYTES", 1)
    whole = LeRobotData.episode
    seen: list[int] = []

    def stop_at_the_third(self: LeRobotData, place: Any) -> Episode:
        if place.index == 3 and 3 not in seen:
            seen.append(place.index)
            raise KeyboardInterrupt
        seen.append(place.index)
        return whole(self, place)

    monkeypatch.setattr(LeRobotData, "episode", stop_at_the_third)
    arguments = ["data", "convert", str(HERE / "v30_images"), str(tmp_path / "n"), "--to", "native"]
    assert main([*arguments, "--label-at", "row"]) == 1
    assert len(EpisodeStore(tmp_path / "n")) == 3
    assert main([*arguments, "--label-at", "row", "--resume"]) == 0
    assert seen == [0, 1, 2, 3, 3, 4]
    store = EpisodeStore(tmp_path / "n")
    assert len(store) == 5 and not store.faults
    for number, episode in enumerate(store):
        CHECK.compare_episode("v30_images", episode, number)
    with pytest.raises(DataError, match="cannot be resumed"):
        convert(HERE / "v30_images", tmp_path / "p", "pkl-episode", resume=True)


def test_settings_of_one_format_are_refused_by_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="the format native has no setting 'label_at'"):
        get_format("native").configured(label_at="row")
    assert main(["data", "inspect", str(HERE / "v30_images"), "--label-at", "row", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_frames"] == 34
