"""Reward models as folders to share: `save_pretrained`, `from_pretrained`, `push_to_hub`.

The folder is a checkpoint (`model.safetensors` with the contract inside, `contract.json`) with `config.json`,
which tells model hubs what it is, and a model card, `README.md`. The weights of an `hf:` encoder are in
`model.safetensors` too: a shared model gives the same rewards where there is no network, and when the
encoder's repository changes or goes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guerdon.core import strict_json
from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.files.hub import local_folder, upload_folder
from guerdon.rewards.image.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    CONTRACT_FILE,
    KIND,
    TORCH_SUFFIXES,
    WEIGHTS_FILE,
    load_checkpoint,
    save_checkpoint,
)
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.hf_files import read_object
from guerdon.rewards.image.model_card import Evidence, model_card

if TYPE_CHECKING:
    from guerdon.rewards.image.base import RewardModel

FORMAT_VERSION = 1
_PICTURES = "card_*.png"
SHARED_FILES = (CONFIG_FILE, WEIGHTS_FILE, CONTRACT_FILE, CARD_FILE, _PICTURES)
"""What is uploaded of a folder, whatever else is in it."""


def save_shared(
    folder: Path | str,
    model: RewardModel,
    contract: Contract,
    evidence: Evidence | None = None,
    *,
    name: str | None = None,
) -> Path:
    """Write the folder of a model; one that is there is replaced.

    Args:
        folder: made if there is none; other files in it stay.
        model: its weights.
        contract: with threshold and calibration.
        evidence: what the reward card showed; None: the model card says that nothing was assessed.
        name: `OWNER/NAME` if it goes to a hub.
    """
    folder = Path(folder).expanduser()
    if folder.suffix in TORCH_SUFFIXES or folder.is_file():
        raise ConfigError(f"{display_path(folder)}: a shared model is a folder, not a file")
    if (folder / CONFIG_FILE).exists() and not _is_ours(folder):
        raise ConfigError(f"{display_path(folder)}: holds another model; nothing was written")
    make_directory(folder)
    save_checkpoint(folder, model, contract)
    write_atomic(folder / CONFIG_FILE, strict_json.dumps(_config(contract), indent=2) + "\n")
    pictures = {} if evidence is None else evidence.pictures
    for stale in set(folder.glob(_PICTURES)) - {folder / file for file in pictures}:
        stale.unlink()  # of an older card
    for file, (_, png) in pictures.items():
        write_atomic(folder / file, png)
    write_atomic(folder / CARD_FILE, model_card(contract, evidence, name=name))
    return folder


def _is_ours(folder: Path) -> bool:
    return (read_object(folder / CONFIG_FILE) or {}).get("model_type") == KIND


def _config(contract: Contract) -> dict[str, Any]:
    encoder = None
    if contract.encoder is not None:
        named = {key: contract.encoder[key] for key in ("source", "weights_hash")}
        encoder = {**named, "weights_included": True}
    return {
        "model_type": KIND,
        "format_version": FORMAT_VERSION,
        "guerdon_version": contract.guerdon_version,
        "model": contract.to_dict()["model"],
        "encoder": encoder,
    }


def shared_folder(name: str | os.PathLike[str]) -> Path:
    """The folder that `from_pretrained` was given: a local one, or `OWNER/NAME` of the hub (`hf:` may lead).

    Raises:
        DataError: there is no such folder or repository, or it holds no reward model.
    """
    folder = local_folder(os.fspath(name).removeprefix("hf:"))
    if not (folder / WEIGHTS_FILE).is_file():
        found = sorted(path.name for path in folder.iterdir())[:5]
        raise DataError(f"{name}: holds no {WEIGHTS_FILE}: it is no reward model ({one_line(found)})")
    return folder


def load_shared(name: str | os.PathLike[str], wanted: type[RewardModel]) -> RewardModel:
    """The model of a folder or of the hub, in eval mode; it must be a `wanted`."""
    model = load_checkpoint(shared_folder(name))[0]
    if not isinstance(model, wanted):
        raise DataError(f"{name}: holds a {type(model).__name__}, not a {wanted.__name__}")
    return model


def push_shared(
    name: str,
    model: RewardModel,
    contract: Contract,
    evidence: Evidence | None = None,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Reward model",
) -> str:
    """Write the folder to a temporary place and upload it; returns the address.

    Raises:
        DataError: the hub cannot be reached, or refuses.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = save_shared(Path(place) / "model", model, contract, evidence, name=name)
        options: Mapping[str, Any] = {"private": private, "token": token, "message": message}
        return upload_folder(folder, name, files=SHARED_FILES, **options)
