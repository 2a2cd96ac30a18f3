"""The files of `realworld-pkl`: one `data.pkl`, a list of transitions, and parts beside it while it grows.

An episode is a file of its own first, in `data.pkl.parts/`; closing makes one file of all of them. Several
writers may do so at the same time. Readers see what a killed writer left in `data.pkl.parts/`. A part has a
token in `episode_info` of its last transition, by which it is known once it is in the file.
"""

from __future__ import annotations

import pickle
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guerdon.core.atomic import NumberedFiles, clear_stale, locked_directory, make_directory, write_atomic
from guerdon.core.errors import DataError, StorageError
from guerdon.core.types import display_path
from guerdon.data.files.safe_pickle import load
from guerdon.data.formats.values import to_scalar

FILE_NAME = "data.pkl"
INFO, PART = "episode_info", "part"
MAX_LOOKS = 4
_PREFIX, _SUFFIX = "episode_", ".pkl"
_NAME, _OLD_NAME = re.compile(r"episode_[0-9]{6,}\.pkl"), re.compile(r"[0-9]{1,18}\.pkl")


def data_file(path: Path) -> Path:
    """The `data.pkl` at or below `path`."""
    return path if path.suffix == ".pkl" and not path.is_dir() else path / FILE_NAME


def load_transitions(path: Path) -> list[Any]:
    """The transitions of a file and of the parts beside it; again if a writer has joined them meanwhile."""
    for _ in range(MAX_LOOKS - 1):
        before = _version(path)
        try:
            content = _load_once(path)
        except FileNotFoundError:
            if _version(path) == before:
                raise
            continue
        if _version(path) == before:
            return content
    return _load_once(path)


def _version(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _load_once(path: Path) -> list[Any]:
    parts = find_parts(path)
    content = _load_list(path) if path.exists() or not parts else []
    joined = {token for step in content if (token := _token(step))}
    for first, part in parts:
        if first is not None and first < len(content):
            continue  # it is in the file already: only its removal was interrupted
        steps = _load_list(part)
        if steps and _token(steps[-1]) in joined:
            continue  # the same
        content = _closed(content)
        content += steps
    return content


def _load_list(path: Path) -> list[Any]:
    content = load(path)
    if not isinstance(content, list):
        raise DataError(f"{display_path(path)}: holds a {type(content).__name__}, not a list of transitions")
    return content


def _token(transition: Any) -> str | None:
    info = transition.get(INFO) if isinstance(transition, Mapping) else None
    token = info.get(PART) if isinstance(info, Mapping) else None
    return token if isinstance(token, str) else None


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


def find_parts(path: Path) -> list[tuple[int | None, Path]]:
    """Files of episodes that are not in `data.pkl` yet, in order.

    Those of an older version are named by the number of their first transition, which is returned too.
    """
    folder = _folder(path)
    files = sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []
    old = [(int(file.stem), file) for file in files if _OLD_NAME.fullmatch(file.name)]
    return [*sorted(old), *((None, file) for file in files if _NAME.fullmatch(file.name))]


def ends(transition: Any) -> bool:
    """Whether an episode ends with this transition."""
    if not isinstance(transition, Mapping):
        return False
    flags = (transition.get("terminations"), transition.get("truncations"))
    return any(flag is not None and bool(to_scalar(flag, "an end flag")) for flag in flags)


def _closed(transitions: list[Any]) -> list[Any]:
    """The transitions that are there, with an end after the last, so that the next episode stays apart."""
    if not transitions or ends(transitions[-1]) or not isinstance(transitions[-1], Mapping):
        return transitions
    import torch

    last = dict(transitions[-1])
    last["truncations"] = torch.tensor([[True]])
    last[INFO] = {**(last.get(INFO) or {}), "complete": False}
    return [*transitions[:-1], last]


class PartsWriter:
    """Adds episodes to a `data.pkl`; what is in it already is kept, and the new ones follow."""

    def __init__(self, path: Path) -> None:
        self.path = data_file(Path(path))
        make_directory(self.path.parent)
        for place in (self.path.parent, _folder(self.path)):
            clear_stale(place)
        with locked_directory(self.path.parent):
            there = self.path.exists() or bool(find_parts(self.path))
            self.num_before = len(load_transitions(self.path)) if there else 0  # raises if it is damaged

    def write(self, transitions: list[dict[str, Any]]) -> None:
        """Keep the transitions of one episode, whose last one has an `episode_info`."""
        transitions[-1][INFO][PART] = secrets.token_hex(8)
        folder = _folder(self.path)
        with locked_directory(self.path.parent):  # whoever joins the parts removes their folder
            files = NumberedFiles([make_directory(folder)], prefix=_PREFIX, suffix=_SUFFIX)
            files.write(folder, lambda file: pickle.dump(transitions, file, protocol=5))

    def close(self) -> None:
        """Make one file of all episodes, also those of other writers; safe to call twice."""
        with locked_directory(self.path.parent):
            parts, folder = find_parts(self.path), _folder(self.path)
            if parts:
                content = load_transitions(self.path)
                try:
                    write_atomic(self.path, lambda file: pickle.dump(content, file, protocol=5))
                except StorageError as error:
                    kept = f"all episodes are safe in {display_path(folder)}, and read from there"
                    raise StorageError(f"{error}; {kept}") from error
            for _, part in parts:
                part.unlink()
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
