"""The files of an encoder in the Hugging Face layout, checked before `transformers` sees them."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line, read_small
from guerdon.data.files.hub import local_folder

logger = logging.getLogger("guerdon")

PREFIX = "hf:"
"""Of an encoder's name in settings."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_FILES = ("config.json", "preprocessor_config.json", "*.safetensors", "*.safetensors.index.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")


@dataclass(frozen=True, kw_only=True)
class EncoderFiles:
    """A folder with `config.json`, safetensors files and perhaps `preprocessor_config.json`."""

    folder: Path
    source: str
    """For messages."""
    config: dict[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @staticmethod
    def is_local(name: str) -> bool:
        """Whether `name` is a folder here, and not one of the hub."""
        return Path(name).expanduser().is_dir()


def absolute_encoder(name: str | None) -> str | None:
    """`hf:FOLDER` with the whole path, for processes that were started elsewhere; other names as they are."""
    if name is None or not EncoderFiles.is_local(name.removeprefix(PREFIX)):
        return name
    return PREFIX + str(Path(name.removeprefix(PREFIX)).expanduser().resolve())


def open_encoder(name: str) -> EncoderFiles:
    """Find and check the files of an encoder.

    Args:
        name: a folder, or a repository of the hub.

    Raises:
        DataError: something is missing or damaged, or the weights are pickled.
    """
    folder = local_folder(name, _FILES)
    source = display_path(folder) if EncoderFiles.is_local(name) else name
    config = read_object(folder / "config.json")
    if config is None:
        raise DataError(f"{source}: has no config.json: it is no model in the Hugging Face layout")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise DataError(
                f"{source}: has pickled weights alone ({pickles[0]}), which can run code and are refused: "
                "save the model again with transformers, which writes model.safetensors"
            )
        raise DataError(f"{source}: has no weights (*.safetensors)")
    mean, std = _normalisation(folder, source)
    return EncoderFiles(folder=folder, source=source, config=config, mean=mean, std=std)


def _normalisation(folder: Path, source: str) -> tuple[Any, Any]:
    """Mean and deviation of the colours from 0 to 1 that the encoder was trained with."""
    found = read_object(folder / "preprocessor_config.json")
    if found is None:
        logger.info("%s has no preprocessor_config.json: colours are normalised as ImageNet's", source)
        return IMAGENET_MEAN, IMAGENET_STD
    if found.get("do_normalize") is False:
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean, std = found.get("image_mean", IMAGENET_MEAN), found.get("image_std", IMAGENET_STD)
    for numbers in (mean, std):
        if not isinstance(numbers, list | tuple) or len(numbers) != 3 or not all(map(_is_number, numbers)):
            raise DataError(
                f"{source}: image_mean and image_std in preprocessor_config.json must be three numbers each, "
                f"not {one_line(numbers)}"
            )
    if min(std) <= 0:
        raise DataError(f"{source}: image_std in preprocessor_config.json must be positive: {one_line(std)}")
    return tuple(map(float, mean)), tuple(map(float, std))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a small file; None if there is no such file.

    Raises:
        DataError: the file holds something else.
    """
    try:
        found = json.loads(read_small(path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{display_path(path)}: is no JSON: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise DataError(f"{display_path(path)}: holds a {type(found).__name__}; expected a JSON object")
    return found
