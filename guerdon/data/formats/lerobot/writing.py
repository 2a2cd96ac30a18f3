"""Writing data sets of LeRobot v3.0.

Files hold many episodes, and a parquet file is none until it is closed. An episode is therefore written to a
folder of its own in `.guerdon-staging/` first, where it is safe; from there episodes are joined to files of
the size that is asked for: when enough are there, and when the writer is closed. A killed writer's episodes
are joined by the next one.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from guerdon.core.atomic import (
    fsync_directory,
    locked_directory,
    make_directory,
    storage_errors,
    write_atomic,
)
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, display_path
from guerdon.data.files.bounds import read_json
from guerdon.data.formats.base import EpisodeWriter
from guerdon.data.formats.lerobot import encoding
from guerdon.data.formats.lerobot.joining import Joiner, Staged
from guerdon.data.formats.lerobot.labels import REWARD
from guerdon.data.formats.lerobot.meta import INFO, OWN, read_info
from guerdon.data.formats.lerobot.rows import columns_of, facts_of, feature_of, features_of, table_of
from guerdon.data.formats.lerobot.settings import WriteSettings
from guerdon.data.store.shard import check_storable

STAGING = ".guerdon-staging"
_LAYOUT = "layout.json"
_ROWS, _FACTS = "rows.parquet", "facts.json"
_MAX_FACTS = 64 << 20
_DISCARDED = ".joined"
_STALE_SECONDS = 24 * 3600


class LeRobotWriter(EpisodeWriter):
    """Appends to a data set that Guerdon wrote, or makes one; the first episode decides the features."""

    def __init__(self, path: Path, settings: WriteSettings) -> None:
        self.path, self.settings = path, settings
        self._staging = path / STAGING
        self._layout: dict[str, Any] | None = None
        self._expected: dict[str, Any] | None = None
        self._staged_bytes: Counter[str] = Counter()
        """By file of an episode's folder: what this writer has staged since it joined."""
        make_directory(self._staging)
        with locked_directory(path):
            self._find_layout()

    def _find_layout(self) -> None:
        """What the data set has decided already: `features`, and what its rewards are."""
        note = self._staging / _LAYOUT
        if (self.path / INFO).exists():
            info = read_info(self.path)
            own = info.get(OWN)
            if not isinstance(own, dict):
                raise DataError(
                    f"{display_path(self.path)} is a data set of LeRobot that Guerdon did not write; write "
                    "to a new folder"
                )
            self._layout = {"features": info["features"], "reward": own["reward"]}
            self.settings = self.settings.with_info(info)
        elif note.exists():
            noted = read_json(note)
            self._layout = {name: noted[name] for name in ("features", "reward")}
            self.settings = replace(self.settings, **noted["settings"])

    def _layout_of(self, episode: Episode) -> dict[str, Any]:
        features = features_of(episode, videos=self.settings.videos, fps=self.settings.fps)
        return {"features": features, "reward": "label" if episode.env_rewards is None else "env"}

    def check(self, episode: Episode) -> None:
        """Raise unless it has the cameras, sizes and fields of the data set."""
        check_storable(episode)
        wanted = self._layout_of(episode)
        self._expected = self._layout or self._expected or wanted  # several are checked before one is added
        if wanted == self._expected:
            return
        have, known = wanted["features"], self._expected["features"]
        names = [name for name in dict.fromkeys((*known, *have)) if have.get(name) != known.get(name)]
        name = names[0] if names else REWARD
        differs = "lacks" if name not in have else "has" if name not in known else "has another kind of"
        raise DataError(
            f"does not fit into {display_path(self.path)}, where all episodes have the same fields: it "
            f"{differs} {name!r}"
        )

    def add(self, episode: Episode) -> str:
        """Write one episode; it is safe when this returns, and seen by readers once the writer is closed."""
        self.check(episode)
        if self._layout is None:
            self._decide(episode)
        place = self._stage(episode)
        limits = {_ROWS: self.settings.data_files_mb}
        if any(
            size > limits.get(name, self.settings.video_files_mb) * 2**20
            for name, size in self._staged_bytes.items()
        ):
            self._staged_bytes.clear()
            with locked_directory(self.path):
                self._join(everything=False)
        return place

    def _decide(self, episode: Episode) -> None:
        """The first episode decides the layout, also for other processes."""
        with locked_directory(self.path):
            self._find_layout()
            if self._layout is None:
                self._layout = self._layout_of(episode)
                kept = {name: value for name, value in asdict(self.settings).items() if name != "task"}
                note = make_directory(self._staging) / _LAYOUT
                write_atomic(note, json.dumps({**self._layout, "settings": kept}))
        self.check(episode)  # another process may have been first

    def _stage(self, episode: Episode) -> str:
        """Write a folder with all of an episode; it has its name when it is complete."""
        assert self._layout is not None
        token = secrets.token_hex(8)
        temp = make_directory(self._staging / f".{token}")
        try:
            columns = columns_of(episode, self.settings.fps)
            table = table_of(episode, columns, self._layout["features"])
            facts = {**facts_of(episode, columns), "token": token, "task": self.settings.task, "videos": {}}
            write_atomic(temp / _ROWS, lambda file: pq.write_table(table, file, compression="snappy"))
            for number, (camera, frames) in enumerate(episode.frames.items()):
                if self.settings.videos:
                    facts["videos"][feature_of(camera)] = f"{number}.mp4"
                    write_atomic(temp / f"{number}.mp4", encoding.encode(frames, self.settings.fps))
            write_atomic(temp / _FACTS, json.dumps(facts))
            with storage_errors(temp), locked_directory(self.path):
                numbers = [int(item.name) for item in self._staging.iterdir() if item.name.isdecimal()]
                self._staged_bytes.update({file.name: file.stat().st_size for file in temp.iterdir()})
                temp.rename(self._staging / f"{max(numbers, default=-1) + 1:06d}")
                fsync_directory(self._staging)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        return f"{self.path}#{token}"

    def _staged(self) -> list[Staged]:
        """Complete episodes in the order in which they were written."""
        found = []
        joined = read_info(self.path)[OWN]["joined"] if (self.path / INFO).exists() else []
        for folder in sorted(item for item in self._staging.iterdir() if item.name.isdecimal()):
            try:
                facts = read_json(folder / _FACTS, _MAX_FACTS)
            except FileNotFoundError:  # it was joined, and an older version was killed while it deleted it
                _discard(folder)
                continue
            if facts["token"] in joined:
                _discard(folder)
                continue
            videos = {name: folder / file for name, file in facts["videos"].items()}
            found.append(Staged(folder=folder, rows=folder / _ROWS, videos=videos, facts=facts))
        return found

    def _join(self, *, everything: bool) -> None:
        """Join what is staged to files, as far as they are full, or all; nobody else writes meanwhile."""
        staged = self._staged()
        if not staged:
            return
        if self._layout is None:
            self._find_layout()
        assert self._layout is not None  # there is a note of it as long as an episode is staged
        joiner = Joiner(self.path, self._layout["features"], self.settings, self._layout["reward"])
        for group, is_full in joiner.groups(staged):
            if is_full or everything:
                joiner.join(group)
                for each in group:
                    _discard(each.folder)

    def close(self) -> None:
        """Join what is staged; safe to call twice."""
        if not self._staging.is_dir():
            return
        with locked_directory(self.path):
            self._join(everything=True)
            if (self.path / INFO).exists():
                (self._staging / _LAYOUT).unlink(missing_ok=True)
            for item in self._staging.iterdir():  # of killed writers
                is_stale = time.time() - item.stat().st_mtime > _STALE_SECONDS
                if item.name.startswith(".") and (is_stale or item.name.endswith(_DISCARDED)):
                    shutil.rmtree(item, ignore_errors=True)
            if not any(self._staging.iterdir()):
                self._staging.rmdir()


def _discard(folder: Path) -> None:
    """Delete a staged episode; a kill halfway leaves nothing that looks like one."""
    hidden = folder.with_name(f".{secrets.token_hex(8)}{_DISCARDED}")
    with storage_errors(folder):
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
