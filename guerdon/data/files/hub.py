"""The Hugging Face hub: folders of repositories fetched and uploaded; only files that run no code."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
SAFE_FILES = ("*.json", "*.safetensors", "*.md", "*.svg", "*.png")
"""What is fetched: no pickles and no Python."""


def require(module: str, what: str) -> Any:
    """A package of the extra `hf`; a `ConfigError` that names the command if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs {module}: pip install 'guerdon[hf]'") from error


def local_folder(name: str | os.PathLike[str], patterns: Sequence[str] = SAFE_FILES) -> Path:
    """A folder as it is, or the local copy of a repository of the hub.

    Args:
        name: a folder, or `OWNER/NAME` or `OWNER/NAME@REVISION`.
        patterns: names of the files to fetch.

    Raises:
        DataError: there is no such folder, or the hub cannot be reached or has no such repository.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if path.exists():
        if not path.is_dir():
            raise DataError(f"{display_path(path)}: is a file; expected a folder")
        return path
    if not _REPOSITORY.fullmatch(text) or text.startswith((".", "/", "~")):
        raise DataError(f"{text}: there is no such folder, and it is no repository OWNER/NAME of the hub")
    repository, _, revision = text.partition("@")
    hub = require("huggingface_hub", f"the hub's {text}")
    try:
        return Path(
            hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(patterns))
        )
    except Exception as error:  # of the network, the hub or its cache, in many classes
        raise DataError(
            f"{text}: there is no such folder here, and the Hugging Face hub did not give it: "
            f"{one_line(error)}. Without a network, download it elsewhere and give the folder's path"
        ) from error


def upload_folder(
    folder: Path,
    repository: str,
    *,
    files: Sequence[str] = SAFE_FILES,
    private: bool,
    token: str | None,
    message: str,
) -> str:
    """Upload files of a folder to a repository, which is made if there is none; returns its address.

    Raises:
        DataError: the hub cannot be reached, or refuses.
    """
    if not _REPOSITORY.fullmatch(repository) or "@" in repository:
        raise ConfigError(f"a repository of the hub is OWNER/NAME, not {repository!r}")
    hub = require("huggingface_hub", "uploading to the hub")
    try:
        api = hub.HfApi(token=token)
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            allow_patterns=list(files),
            commit_message=message,
        )
    except Exception as error:  # of the network, or a refusal by the hub, in many classes
        raise DataError(
            f"{repository}: the Hugging Face hub did not take the upload: {one_line(error)}. The model is in "
            "the folder that save_pretrained writes, and can be uploaded later with `hf upload`"
        ) from error
    return str(address)
