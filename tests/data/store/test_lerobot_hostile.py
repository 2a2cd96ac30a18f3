"""Small LeRobot files that stand for much: reading them takes little memory, and they are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot_files import copy_of

from guerdon.core.errors import DataError
from guerdon.core.types import Fault
from guerdon.data.formats import get_format
from guerdon.data.formats.lerobot import add_columns, meta
from guerdon.data.formats.lerobot.meta import read_meta

CHILD = """
import re, sys
from pathlib import Path
import guerdon.data.formats, pyarrow.compute
from guerdon.data.formats import get_format
from guerdon.data.formats.lerobot.meta import read_meta
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
before = peak()
faults = read_meta(Path(sys.argv[1])).faults
for item in get_format("lerobot").facts(Path(sys.argv[1])):
    faults = (*faults, item)
print(peak() - before)
print("; ".join(getattr(fault, "reason", "") for fault in faults)[:2000])
"""
MOST_MIB = 150
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")


def measured(root: Path) -> tuple[int, str]:
    """(MiB that reading takes, faults), of a process of its own."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(root)], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    mib, _, faults = child.stdout.partition("\n")
    return int(mib), faults


def repeated(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), [text])


def write_episodes(root: Path, columns: dict[str, pa.Array]) -> Path:
    """In the place of the rows of `meta/episodes`; they are few bytes however long their texts are."""
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    rows = len(next(iter(columns.values())))
    counters = {name: pa.array(range(rows), pa.int64()) for name in ("episode_index",)}
    counters |= {"length": pa.array([6] * rows, pa.int64())}
    counters |= {f"data/{name}": pa.array([0] * rows, pa.int64()) for name in ("chunk_index", "file_index")}
    pq.write_table(pa.table({**counters, **columns}), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.parametrize("name", ["guerdon/source", "episode_index", "else"])
def test_a_long_text_in_many_rows(tmp_path: Path, name: str) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    path = write_episodes(root, {name: repeated("x" * (1 << 20), 700)})
    assert path.stat().st_size < 20_000
    mib, faults = measured(root)
    assert mib < MOST_MIB
    if name == "guerdon/source":
        assert "has a text of more than 4096 characters in guerdon/source" in faults


def test_a_long_text_that_is_written_out_in_each_row(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    path = write_episodes(root, {"guerdon/source": pa.array(["x" * (1 << 20)] * 200)})
    pq.write_table(pq.read_table(path), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 30_000
    mib, faults = measured(root)
    assert mib < MOST_MIB and "has more than 64 MiB of texts" in faults


def test_texts_in_a_column_of_numbers(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    path = min((root / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    rows = 700
    columns = {name: pa.array([0] * rows, pa.int64()) for name in ("episode_index", "index", "frame_index")}
    columns |= {each: repeated("x" * (1 << 20), rows) for each in table.column_names if each not in columns}
    pq.write_table(pa.table(columns), path, compression="zstd", store_schema=False)
    write_episodes(root, {"length": pa.array([rows], pa.int64())})
    mib, faults = measured(root)
    assert mib < MOST_MIB and "observation.state holds string; expected numbers" in faults


def test_columns_that_nobody_needs(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    rows = 20_000
    write_episodes(root, {f"else/{number}": pa.array([True] * rows) for number in range(500)})
    assert measured(root)[0] < MOST_MIB


def test_lists_that_grow_large(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    state = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 8_000_000, pa.float32()), 80_000)
    path = write_episodes(root, {"guerdon/initial_state": state.cast(pa.list_(pa.float32()))})
    assert path.stat().st_size < 20_000
    mib, faults = measured(root)
    assert mib < MOST_MIB and "numbers, more than its size allows for" in faults


def test_rows_are_bounded_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "MAX_EPISODES", 8)
    root = copy_of("v30_images", tmp_path / "d")
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    path.with_name("file-001.parquet").write_bytes(path.read_bytes())
    found = read_meta(root)
    assert len(found.episodes) == 5 and found.faults[0].reason == "has 5 rows; at most 3 are read"
    old = copy_of("v21_videos", tmp_path / "e")
    (old / "meta/episodes.jsonl").write_text("\n" * 9)
    with pytest.raises(DataError, match="has more than 8 lines"):
        read_meta(old)


def test_a_text_that_guerdon_itself_would_write_is_read(tmp_path: Path) -> None:
    root = copy_of("v30_images", tmp_path / "d")
    texts = ["ä" * 4096, "", "b", "b", "c"]
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    table = pq.read_table(path).append_column("guerdon/source", pa.array(texts))
    pq.write_table(table.append_column("guerdon/seed", pa.array([1, None, 2, 3, 4])), path, row_group_size=2)
    items = list(get_format("lerobot").read(root))
    assert not [item for item in items if isinstance(item, Fault)]
    assert [getattr(item, "source", "") for item in items] == texts
    assert [getattr(item, "seed", "") for item in items] == [1, None, 2, 3, 4]


def test_a_large_row_group_is_copied_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guerdon.data.formats.lerobot.columns._BATCH", 2)
    monkeypatch.setattr("guerdon.data.formats.lerobot.columns._GROUP_BYTES", 1)
    root = copy_of("v30_images", tmp_path / "d")
    add_columns(root, tmp_path / "e", {"score": {0: pa.array(range(6)).to_numpy()}})
    for path in (root / "data").rglob("*.parquet"):
        copy = tmp_path / "e" / path.relative_to(root)
        table = pq.read_table(copy)
        assert table.drop_columns(["score"]).equals(pq.read_table(path))
        rows = pq.ParquetFile(copy).metadata
        assert max(rows.row_group(number).num_rows for number in range(rows.num_row_groups)) <= 2
    first = pq.read_table(min((tmp_path / "e/data").rglob("*.parquet")))
    assert first.column("score").to_pylist()[:6] == list(range(6))
    assert json.loads((tmp_path / "e/meta/info.json").read_text())["features"]["score"]["dtype"] == "int64"
