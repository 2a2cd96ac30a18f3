"""`guerdon reward score --write-back`: a copy of a data set of LeRobot with learned rewards.

The data sets were written by LeRobot itself (`tests/data/store/lerobot/`).
"""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from guerdon.cli.main import main
from guerdon.config import RewardConfig, RewardModelConfig
from guerdon.core.errors import DataError, StorageError
from guerdon.core.types import Episode
from guerdon.data.formats import FORMATS, detect_format
from guerdon.data.formats.lerobot import LeRobotData
from guerdon.fit.write_back import write_back
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.serve import RewardManager
from tests.data.store.lerobot_files import HERE, change_columns, change_info, copy_of

LEARNED = ("next.reward", "next.success", "prob_success")


def manager_for(tmp_path, size, num_frames=1, cameras=("front", "wrist")):
    """A random model whose threshold has frames on both sides."""
    torch.manual_seed(0)
    config = RewardModelConfig(
        width=8, image_size=(3, size, size), image_keys=cameras, num_frames=num_frames, hidden_dim=8
    )
    model = build_model(config).eval()
    contract = Contract.of(model, frame_sizes=dict.fromkeys(cameras, (size, size, 3)), threshold=0.5)
    save_checkpoint(tmp_path / "model", model, contract)
    section = RewardConfig(
        use_reward_model=True, model=RewardModelConfig(checkpoint_path=str(tmp_path / "model"))
    )
    return RewardManager(section, device="cpu")


def median_threshold(manager, source):
    prob = np.concatenate(list(expected(manager, source).values()))
    manager.threshold = float(np.median(prob))
    return manager


def expected(manager, source, num_frames=1):
    """Episode -> probabilities of its rows' frames, one episode at a time."""
    found = {}
    data = LeRobotData(source)
    for number, place in enumerate(data.meta.episodes):
        frames = {key: data.frames(number, key, np.arange(place.length)) for key in manager.image_keys}
        if num_frames > 1:
            steps = np.maximum(np.arange(place.length)[:, None] + np.arange(1 - num_frames, 1), 0)
            frames = {key: images[steps] for key, images in frames.items()}
        found[place.index] = manager.score(frames).prob_success
    data.close()
    return found


def rows(root):
    """Column -> values of all rows, in the order of `index`."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted((root / "data").rglob("*.parquet"))])
    return table.sort_by("index").to_pydict()


@pytest.mark.parametrize("name", ["v30_images", "v30_videos"])
@pytest.mark.parametrize("label_at", ["next", "row"])
def test_rewards_stand_beside_what_was_recorded(tmp_path, name, label_at):
    source, target = HERE / name, tmp_path / "copy"
    manager = median_threshold(manager_for(tmp_path, 16 if "images" in name else 64), source)
    told = write_back(manager, source, target, label_at=label_at)
    prob = expected(manager, source)
    before, after = rows(source), rows(target)
    assert told["frames"] == len(before["index"]) and 0 < told["fires"] < told["frames"]
    np.testing.assert_allclose(after["prob_success"], np.concatenate(list(prob.values())), atol=1e-6)
    for number, values in prob.items():
        mine = np.flatnonzero(np.array(after["episode_index"]) == number)
        fired = values > manager.threshold
        wanted = np.append(fired[1:], fired[-1]) if label_at == "next" else fired
        assert np.array(after["next.success"])[mine].tolist() == wanted.tolist()
        assert np.array(after["next.reward"])[mine].tolist() == wanted.astype(float).tolist()
    for column, values in before.items():  # everything else is as it was
        kept = f"recorded.{column}" if column in LEARNED else column
        assert after[kept] == values, column
    videos = [path.relative_to(source) for path in source.rglob("*.mp4")]
    assert all((target / path).read_bytes() == (source / path).read_bytes() for path in videos)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "model"]


def test_what_meta_tells(tmp_path):
    source, target = HERE / "v30_images", tmp_path / "copy"
    write_back(median_threshold(manager_for(tmp_path, 16), source), source, target)
    info = json.loads((target / "meta/info.json").read_text())
    assert info["features"]["prob_success"] == {"dtype": "float32", "shape": [1], "names": None}
    assert info["features"]["next.success"]["dtype"] == "bool"
    assert "recorded.next.reward" in info["features"]
    after = rows(target)
    stats = json.loads((target / "meta/stats.json").read_text())
    np.testing.assert_allclose(stats["prob_success"]["mean"], [np.mean(after["prob_success"])], rtol=1e-5)
    np.testing.assert_allclose(stats["next.reward"]["max"], [max(after["next.reward"])])
    was = json.loads((source / "meta/stats.json").read_text())
    assert stats["action"] == was["action"]
    np.testing.assert_allclose(stats["recorded.next.reward"]["mean"], was["next.reward"]["mean"], atol=1e-6)
    (episodes,) = (target / "meta/episodes").rglob("*.parquet")
    told = pq.read_table(episodes).to_pydict()
    for number, mean in zip(told["episode_index"], told["stats/prob_success/mean"], strict=True):
        mine = [p for p, e in zip(after["prob_success"], after["episode_index"], strict=True) if e == number]
        assert mean == pytest.approx([np.mean(mine)])
    assert "stats/recorded.next.reward/mean" in told
    for path in (target / "data").rglob("*.parquet"):
        schema = pq.read_schema(path)
        known = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        assert set(known) == set(schema.names) and known["prob_success"] == {
            "dtype": "float32",
            "_type": "Value",
        }
        groups = pq.ParquetFile(source / path.relative_to(target)).num_row_groups
        assert pq.ParquetFile(path).num_row_groups == groups
    progress = pq.read_table(target / "guerdon_progress.parquet")
    assert progress.column_names == ["index", "episode_index", "frame_index", "progress_sparse"]
    assert progress.column("progress_sparse").to_pylist() == after["prob_success"]
    assert b"model" in progress.schema.metadata[b"reward_model_path"]


def test_a_copy_is_read_with_what_was_recorded(tmp_path):
    """Learned rewards are never taken for those of the environment, nor for labels where there are others."""
    source, target = HERE / "v30_images", tmp_path / "copy"
    manager = median_threshold(manager_for(tmp_path, 16), source)
    write_back(manager, source, target)
    assert detect_format(target).name == "lerobot"
    pairs = zip(FORMATS["lerobot"].read(source), FORMATS["lerobot"].read(target), strict=True)
    for was, now in pairs:
        assert isinstance(now, Episode)
        np.testing.assert_array_equal(now.labels, was.labels)
        np.testing.assert_array_equal(now.env_rewards, was.env_rewards)
    again = tmp_path / "again"
    manager.threshold = 2.0  # nothing fires
    write_back(manager, target, again)
    assert rows(again)["recorded.next.reward"] == rows(source)["next.reward"]
    assert set(rows(again)["next.reward"]) == {0.0}
    assert "recorded.recorded.next.reward" not in rows(again)


def test_data_without_labels(tmp_path):
    source, target = copy_of("v30_images", tmp_path / "plain"), tmp_path / "copy"
    gone = ("next.reward", "next.success", "next.done")

    def drop(_, columns):
        return {name: values for name, values in columns.items() if name not in gone}

    change_columns(source, drop)
    manager = median_threshold(manager_for(tmp_path, 16), source)
    told = write_back(manager, source, target)
    assert told["label_at"] == "next"
    learned = rows(target)
    assert set(learned["next.success"]) == {True, False}
    assert not [name for name in learned if name.startswith("recorded.")]
    data = LeRobotData(target)
    assert data.choice.column == "next.success" and "nobody has checked them" in data.choice.why
    assert all(each.env_rewards is None for each in data.items())
    data.close()


def test_stacks_of_frames(tmp_path):
    source, target = HERE / "v30_videos", tmp_path / "copy"
    manager = manager_for(tmp_path, 64, num_frames=2, cameras=("wrist",))
    write_back(manager, source, target)
    wanted = np.concatenate(list(expected(manager, source, num_frames=2).values()))
    np.testing.assert_allclose(rows(target)["prob_success"], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: shutil.rmtree(root), "is no data set of LeRobot"),
        (lambda root: (root / "data/chunk-000/file-001.parquet").write_bytes(b""), "file-001.parquet"),
        (
            lambda root: change_info(root, lambda info: info["features"].pop("observation.images.wrist")),
            "has no camera 'wrist'",
        ),
    ],
)
def test_nothing_is_left_of_a_copy_that_failed(tmp_path, prepare, message):
    source = copy_of("v30_images", tmp_path / "source")
    manager = manager_for(tmp_path, 16)
    prepare(source)
    with pytest.raises(DataError, match=message):
        write_back(manager, source, tmp_path / "copy")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("source", "model")]


def without_feature(name):
    return lambda root: change_info(root, lambda info: info["features"].pop(name))


def tear(name, content):
    return lambda root: (root / name).write_bytes(content)


def drop_column(root):
    path = root / "data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["index"]), path)


def damage_note(root):
    path = root / "data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": "{}"}), path)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: (root.parent / "copy").mkdir(), "copy exists already"),
        (without_feature("index"), "has no feature 'index'"),
        (without_feature("frame_index"), "has no feature 'frame_index'"),
        (without_feature("timestamp"), "has no feature 'timestamp'"),
        (tear("meta/stats.json", b'{"action": {"mi'), "stats.json: cannot be read as JSON"),
        (tear("meta/stats.json", b"[1]"), "stats.json: holds no dict"),
        (tear("meta/episodes_stats.jsonl", b'{"stats": {}}\n'), "line 1 names no episode"),
        (tear("meta/episodes_stats.jsonl", b'\n{"episode_index": 0, "stats": 1}'), "line 2 has statistics"),
        (drop_column, "file-001.parquet: episode . cannot be scored: has no column 'index'"),
        (damage_note, "file-001.parquet: its note for datasets tells no features"),
    ],
)
def test_what_cannot_be_written_is_told_before_scoring(tmp_path, monkeypatch, prepare, message):
    source = copy_of("v30_images", tmp_path / "source")
    manager = manager_for(tmp_path, 16)
    prepare(source)
    monkeypatch.setattr(manager, "score", lambda frames: pytest.fail("frames were scored"))
    with pytest.raises(DataError, match=message):
        write_back(manager, source, tmp_path / "copy")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("source", "model", "copy")]


def test_an_episode_without_statistics(tmp_path):
    source = copy_of("v21_videos", tmp_path / "source")
    lines = (source / "meta/episodes_stats.jsonl").read_text().splitlines()
    del (first := json.loads(lines[0]))["stats"]
    (source / "meta/episodes_stats.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    write_back(manager_for(tmp_path, 64), source, tmp_path / "copy")
    first, *_ = map(json.loads, (tmp_path / "copy/meta/episodes_stats.jsonl").read_text().splitlines())
    assert set(first["stats"]) >= {"prob_success", "next.reward"}


def test_a_copy_is_whole_or_not_there(tmp_path, monkeypatch):
    """The file of progress is the last that is written."""

    def full(*args):
        assert not (tmp_path / "copy").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("guerdon.fit.write_back._write_progress", full)
    with pytest.raises(StorageError, match="the disk is full"):
        write_back(manager_for(tmp_path, 16), HERE / "v30_images", tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_older_data_sets_and_taken_names(tmp_path):
    manager = manager_for(tmp_path, 64)
    told = write_back(manager, HERE / "v21_videos", tmp_path / "copy")
    wanted = expected(manager, HERE / "v21_videos")
    found = rows(tmp_path / "copy")
    assert told["frames"] == len(found["index"])
    np.testing.assert_allclose(found["prob_success"], np.concatenate(list(wanted.values())), atol=1e-6)
    assert found["recorded.next.reward"] == rows(HERE / "v21_videos")["next.reward"]
    with pytest.raises(DataError, match="exists already"):
        write_back(manager, HERE / "v30_videos", tmp_path / "copy")


def test_the_command(tmp_path, capsys):
    manager_for(tmp_path, 16)
    words = ["reward", "score", HERE / "v30_images", "--checkpoint", tmp_path / "model", "--threshold", "0.4"]
    done = main([str(word) for word in [*words, "--write-back", tmp_path / "copy", "--json"]])
    assert done == 0
    told = json.loads(capsys.readouterr().out)
    assert told["threshold"] == 0.4 and told["columns"][:3] == list(LEARNED)
    assert len(rows(tmp_path / "copy")["prob_success"]) == told["frames"] == 34
    both = [*words, "--write-back", tmp_path / "other", "--out", tmp_path / "x.parquet"]
    assert main([str(word) for word in both]) == 2
