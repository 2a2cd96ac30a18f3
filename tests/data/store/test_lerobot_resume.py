"""An interrupted copy of a LeRobot data set goes on with the episodes that it lacks, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot_files import copy_of

from guerdon.core.types import Episode, control_mode_of
from guerdon.data.formats import get_format
from guerdon.data.formats.lerobot import LeRobotData
from guerdon.data.store import EpisodeStore
from guerdon.data.summary import convert

SOURCE = "guerdon/PointReach-v0 (control_mode joint)"


def collected(root: Path, lengths: list[int], source: str = SOURCE) -> Path:
    """A data set of Guerdon whose episodes all come from one environment."""
    with get_format("lerobot").writer(root) as writer:
        for seed, count in enumerate(lengths):
            frames = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
            labels = np.zeros(count, np.float32)
            writer.add(Episode(frames={"front": frames}, labels=labels, success=False, source=source))
    return root


def lengths_in(store: Path) -> list[int]:
    return [episode.num_frames for episode in EpisodeStore(store)]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy dies before its fourth episode; each is written at once."""
    monkeypatch.setattr("guerdon.data.summary.WRITE_BYTES", 1)
    whole = LeRobotData.episode

    def dies_once(self: LeRobotData, place: object) -> Episode:
        if getattr(place, "index", 0) == 3:
            monkeypatch.setattr(LeRobotData, "episode", whole)
            raise KeyboardInterrupt
        return whole(self, place)  # type: ignore[arg-type]

    monkeypatch.setattr(LeRobotData, "episode", dies_once)


def test_episodes_of_one_environment_are_told_apart(tmp_path: Path, interrupted: None) -> None:
    root, store = collected(tmp_path / "d", [2, 3, 4, 5, 6]), tmp_path / "n"
    with pytest.raises(KeyboardInterrupt):
        convert(root, store, "native")
    assert lengths_in(store) == [2, 3, 4]
    written, faults = convert(root, store, "native", resume=True)
    assert (written, faults, lengths_in(store)) == (2, [], [2, 3, 4, 5, 6])
    assert convert(root, store, "native", resume=True)[0] == 0
    sources = [str(each) for each in EpisodeStore(store).episode_column("source")]
    assert len(set(sources)) == 5 and {control_mode_of(each) for each in sources} == {"joint"}
    assert {item.source for item in get_format("lerobot").read(root) if isinstance(item, Episode)} == {SOURCE}


@pytest.mark.parametrize("own", [True, False])
def test_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: None, own: bool
) -> None:
    (tmp_path / "a").mkdir()
    if own:
        collected(tmp_path / "a/d", [2, 3, 4, 5, 6], "")
    else:
        copy_of("v30_images", tmp_path / "a/d")
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        convert("d", "n", "native")
    monkeypatch.chdir(tmp_path)
    assert convert("a/d", "a/n", "native", resume=True)[0] == 2
    assert len(EpisodeStore(tmp_path / "a/n")) == 5


@pytest.mark.parametrize("source", ["", "one", None])
def test_another_data_set_of_the_same_name_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    """Nor one whose episodes tell the same source: `one` is told by a single episode of each."""
    for place, count in (("a", 3), ("b", 4)):
        if source is None:
            copy_of("v30_images", tmp_path / place / "d")
        else:
            collected(tmp_path / place / "d", [count], source)
        monkeypatch.chdir(tmp_path / place)
        convert("d", "../n", "native", resume=True)
    assert len(EpisodeStore(tmp_path / "n")) == (10 if source is None else 2)


def test_a_source_that_is_no_text(tmp_path: Path) -> None:
    root = collected(tmp_path / "d", [2, 3])
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    table = pq.read_table(path)
    at = table.schema.get_field_index("guerdon/source")
    pq.write_table(table.set_column(at, "guerdon/source", pa.array([["x"], ["y"]])), path)
    convert(collected(tmp_path / "other", [4]), tmp_path / "n", "native")
    for _ in range(2):
        convert(root, tmp_path / "n", "native", resume=True)
    assert lengths_in(tmp_path / "n") == [4, 2, 3]


def test_copies_of_a_copy(tmp_path: Path) -> None:
    """What the first source told is still the end of it."""
    convert(collected(tmp_path / "d", [2]), tmp_path / "n", "native")
    convert(tmp_path / "n", tmp_path / "e", "lerobot")
    convert(tmp_path / "e", tmp_path / "m", "native")
    (episode,) = EpisodeStore(tmp_path / "m")
    assert episode.source.endswith(f"from {SOURCE}")
    assert episode.source.startswith(f"{tmp_path.resolve()}/e:episode_000000 from ")
