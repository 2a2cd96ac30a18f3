"""Small data sets of the real `lerobot` package, and changed copies of them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent / "lerobot"
REAL = ("v30_images", "v30_videos", "v21_videos")


def script() -> Any:
    """`scripts/check_lerobot.py`, which wrote the data sets and knows what they hold."""
    path = Path(__file__).parents[3] / "scripts" / "check_lerobot.py"
    spec = importlib.util.spec_from_file_location("check_lerobot", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_of(name: str, target: Path) -> Path:
    """A copy that can be changed."""
    shutil.copytree(HERE / name, target)
    return target


def change_info(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change `info.json`."""
    info = json.loads((root / "meta/info.json").read_text())
    change(info)
    (root / "meta/info.json").write_text(json.dumps(info))


def change_columns(root: Path, change: Callable[[int, dict[str, list[Any]]], dict[str, list[Any]]]) -> None:
    """Change the columns of every episode: (episode, columns) -> columns; new ones go to `info.json`."""
    new: dict[str, str] = {}
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        parts = []
        for episode in sorted(set(table.column("episode_index").to_pylist())):
            rows = table.filter(pa.compute.equal(table.column("episode_index"), episode))
            columns = {name: rows.column(name).to_pylist() for name in rows.column_names}
            changed = change(episode, columns)
            arrays = {
                name: pa.array(values, rows.schema.field(name).type if name in columns else None)
                for name, values in changed.items()
            }
            new |= {name: str(arrays[name].type) for name in changed if name not in columns}
            gone = set(columns) - set(changed)
            parts.append(pa.table(arrays))
        with pq.ParquetWriter(path, parts[0].schema) as writer:
            for part in parts:
                writer.write_table(part)

    def features(info: dict[str, Any]) -> None:
        for name in gone:
            del info["features"][name]
        for name, dtype in new.items():
            kind = {"double": "float32", "int64": "int64"}.get(dtype, dtype)
            info["features"][name] = {"dtype": kind, "shape": [1], "names": None}

    change_info(root, features)
