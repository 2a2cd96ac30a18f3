"""RLinf's spellings of settings, translated to today's: one table of renames and the few other rules.

RLinf's reward workflow was published in several generations of spelling. Everything here works on plain
nested dicts and changes none of its arguments; `schema.py` knows today's spellings alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from guerdon.config.nested import ABSENT, KeyPath, Tree, delete, dotted, get, leaves, parts, put, rename
from guerdon.core.errors import ConfigError

RENAMES: dict[str, str] = {
    # The classifier's own block, with the reward's type inside it.
    "reward.reward_model": "reward.model",
    "reward.reward_model.reward_type": "reward.reward_type",
    # Fitting settings that stood in the reward section.
    "reward.training_backend": "fit.backend",
    "reward.gpu_id": "fit.gpu_id",
    "reward.global_batch_size": "fit.global_batch_size",
    "reward.num_epochs": "fit.epochs",
    "reward.log_interval": "fit.log_interval",
    "reward.save_interval": "fit.save_interval",
    "reward.save_dir": "fit.save_dir",
    "reward.optim": "fit.optim",
    "reward.lr_sched": "fit.lr_sched",
    "reward.data": "fit.data",
    "reward.data.image_key": "fit.data.image_keys",
    # Collection and fitting as sections of their own; the ResNet reward model's block.
    "reward_data_collection": "collect",
    "reward_training": "fit",
    "reward_training.data_path": "fit.data.path",
    "reward_training.lr": "fit.optim.lr",
    "reward.reward_model_type": "reward.model.model_type",
    "reward.mode": "reward.combine_mode",
    "reward.resnet": "reward.model",
    # The real-world guide: a fitting run has its settings at the top.
    "reward.checkpoint_path": "reward.model.checkpoint_path",
    "model": "reward.model",
    "data": "fit.data",
    "data.data_path": "fit.data.path",
    "data.image_key": "fit.data.image_keys",
    "actor.global_batch_size": "fit.global_batch_size",
    "actor.micro_batch_size": "fit.micro_batch_size",
    "runner.max_epochs": "fit.epochs",
    "runner.val_check_interval": "fit.val_check_interval",
    "runner.save_interval": "fit.save_interval",
    "runner.early_stop": "fit.early_stop",
    # An asynchronous run as a switch of the runner.
    "runner.asynchronous": "asynchronous.enabled",
}
"""Older path -> today's. A path stands for everything below it; the longest one that fits is used."""

VALUES: dict[str, Callable[[Any], Any]] = {
    "reward.data.image_key": lambda value: [value],
    "data.image_key": lambda value: [value],
    "reward.reward_model_type": lambda value: "resnet_reward" if value == "resnet" else value,
}
"""Older path -> what becomes of its value."""

REFUSED: dict[str, str] = {
    f"{section}.use_negative_reward": (
        "is not supported, because negative rewards make a policy collapse: "
        "set reward.fail_reward to what a failure should give (0.0 is advised)"
    )
    for section in ("reward", "reward.model")
}
"""Path (today's) -> why a true value is refused; a false one says nothing new and is dropped."""


class Implied(NamedTuple):
    """Settings that a block in a file stands for without naming them."""

    marks: tuple[str, ...]
    """Any of these in the file, in the file's own spelling, implies the settings ..."""
    unless: str
    """... unless this one (today's) is given."""
    settings: Mapping[str, Any]
    """Path (today's) -> value, each used where it is not given."""


RLINF_FIT = {
    "fit.epochs": 100,
    "fit.global_batch_size": 32,
    "fit.optim.optimizer": "adam",
    "fit.optim.lr": 1e-4,
    "fit.optim.weight_decay": 0.0,
    "fit.lr_sched.name": "constant",
    "fit.lr_sched.warmup_steps": 0,
    "fit.augment.shift_pixels": 0,
    "fit.augment.color": 0.0,
}
"""How RLinf fits a reward model; `conf/rlinf/fit.yaml` says the same for configs named after its pages."""

IMPLIED: tuple[Implied, ...] = (
    Implied(  # These blocks configure `BinaryRewardClassifier`, which had the ResNet10 encoder only.
        ("reward.reward_model", "reward.model.num_spatial_blocks"),
        "reward.model.model_type",
        {"reward.model.model_type": "binary_classifier", "reward.model.arch": "resnet10"},
    ),
    # RLinf's `DataCollectorWrapper` writes one pickle per episode.
    Implied(("reward_data_collection",), "collect.format", {"collect.format": "pkl-episode"}),
)

RLINF_DEFAULTS: tuple[Implied, ...] = (
    Implied(
        ("reward.reward_model", "reward.model.num_spatial_blocks", "reward.resnet", "reward_training"),
        "reward.model.width",
        {"reward.model.arch": "resnet18", "reward.model.width": 64},
    ),
    Implied(("reward.optim", "reward.num_epochs", "reward_training"), "fit.augment", RLINF_FIT),
)
"""What RLinf's blocks leave to its own defaults, which differ from ours; filled in without a notice."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One value given on the command line; it beats every file."""

    key: str
    """Dotted path in any spelling."""
    value: Any = None
    delete: bool = False
    """Remove the key (`~key`); with a value, only if that is what it holds."""


def translate_override(key: str) -> str:
    """Today's spelling of a dotted path."""
    return dotted(rename(parts(key), RENAMES)[0])


def translate(tree: Mapping[str, Any], overrides: Sequence[Override] = ()) -> tuple[Tree, list[str]]:
    """The tree in today's spelling with the overrides applied, and notices of what was translated.

    Where a file holds an older and today's spelling of one setting, the older one wins: it is what the
    user pasted in. Overrides come after the file whatever their spelling, in their own order.

    Raises:
        ConfigError: A setting is refused, or a value stands where a section is needed.
    """
    notices: dict[str, None] = {}  # an ordered set
    renamed: Tree = {}
    older: list[tuple[KeyPath, KeyPath, Any]] = []
    for path, value in leaves(tree):
        new_path, new_value = _translate_setting(path, value, notices)
        if new_path == path:
            put(renamed, path, new_value)
        elif new_path:
            older.append((path, new_path, new_value))
    for path, new_path, value in older:
        present = get(renamed, new_path)
        if isinstance(present, dict) and (value is None or value == {}):
            continue
        if present is not ABSENT and present != value and present != {}:
            notices[f"{dotted(path)}={value!r} replaces {dotted(new_path)}={present!r}"] = None
        put(renamed, new_path, value)
    for override in overrides:
        _apply(renamed, override, notices)
    _match_images(renamed, notices)
    _fill_implied(renamed, IMPLIED, tree, notices)
    return renamed, list(notices)


def fill_rlinf_defaults(translated: Tree, tree: Mapping[str, Any]) -> None:
    """Put RLinf's defaults into a translated tree, where the file's own one holds blocks of RLinf's."""
    _fill_implied(translated, RLINF_DEFAULTS, tree, {})


def notice_line(notices: Sequence[str]) -> str:
    """All notices in the one line that is logged."""
    return "config: older spellings translated: " + ", ".join(notices)


def _translate_setting(path: KeyPath, value: Any, notices: dict[str, None]) -> tuple[KeyPath, Any]:
    """A leaf in today's spelling; its path is empty if nothing of it remains."""
    new_path, rule = rename(path, RENAMES)
    if rule is not None:
        below = ".*" if len(path) > len(parts(rule)) else ""
        notices[f"{rule}{below} -> {RENAMES[rule]}{below}"] = None
    refusal = REFUSED.get(dotted(new_path))
    if refusal is not None:
        if value:
            raise ConfigError(f"{dotted(path)} {refusal}")
        return (), None
    if dotted(path) in VALUES:
        value = VALUES[dotted(path)](value)
    return new_path, _absolute_references(value, path)


_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.\-]*)\}")


def _absolute_references(value: Any, path: KeyPath) -> Any:
    """`${...}` references to other settings, absolute and in today's spelling, so that moving is safe."""
    if isinstance(value, list):
        return [_absolute_references(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _absolute_references(item, (*path, key)) for key, item in value.items()}
    if not isinstance(value, str):
        return value

    def rewrite(match: re.Match[str]) -> str:
        dots, key = match.groups()
        base = path[: -len(dots)] if dots else ()
        return "${" + translate_override(dotted((*base, key))) + "}"

    return _REFERENCE.sub(rewrite, value)


def _apply(tree: Tree, override: Override, notices: dict[str, None]) -> None:
    """Put one override into a tree that is in today's spelling."""
    path = parts(override.key)
    if override.delete:
        delete_override(tree, override, rename(path, RENAMES)[0])
        return
    for leaf, value in leaves(override.value, path):
        new_path, new_value = _translate_setting(leaf, value, notices)
        if new_path and not (new_value == {} and isinstance(get(tree, new_path), dict)):
            put(tree, new_path, new_value)


def _fill_implied(
    tree: Tree, rules: Sequence[Implied], file: Mapping[str, Any], notices: dict[str, None]
) -> None:
    """Fill in what the blocks of the file imply."""
    marks: set[str] = set()  # all paths that the file holds
    for path, value in leaves(file):
        says_nothing = value is None or value == {}  # a section with nothing in it
        marks.update(dotted(path[:length]) for length in range(1, len(path) + 1 - says_nothing))
    for rule in rules:
        mark = next((mark for mark in rule.marks if mark in marks), None)
        if mark is None or get(tree, rule.unless) is not ABSENT:
            continue
        for key, value in rule.settings.items():
            if get(tree, key) is ABSENT:
                put(tree, key, value)
                notices[f"{mark} implies {key}={value}"] = None


def _match_images(tree: Tree, notices: dict[str, None]) -> None:
    """RLinf's policy and collector name their images too; they must be those of the reward model.

    `actor.model.image_size` [C, H, W] is the size that the environments render. A policy sees the cameras of
    its observations, so that `image_keys` is only compared.
    """
    for key in ("image_keys", "image_size"):
        wanted = get(tree, f"reward.model.{key}", None)
        for place in ("actor.model", "reward.data_collection"):
            path = parts(f"{place}.{key}")
            if place == "reward.data_collection" and key == "image_keys":
                continue  # a setting of ours
            value = get(tree, path)
            if value is ABSENT:
                continue
            if wanted is not None and list(value) != list(wanted):
                raise ConfigError(
                    f"{place}.{key} is {value}, and reward.model.{key} {wanted}: they must match"
                )
            delete(tree, path)
            notices[f"{place}.{key}"] = None
            if key == "image_size":
                for env in ("train", "eval"):
                    if get(tree, f"env.{env}.init_params.image_size") is ABSENT:
                        put(tree, f"env.{env}.init_params.image_size", list(value)[1:])
    if get(tree, "actor", None) == {"model": {}}:
        delete(tree, ("actor",))


def delete_override(tree: Tree, override: Override, path: KeyPath) -> None:
    """Apply `~key` or `~key=value` to the setting at `path`."""
    present = get(tree, path)
    if present is ABSENT:
        raise ConfigError(f"~{override.key}: there is nothing to remove, {dotted(path)} is not set")
    if override.value is not None and override.value != present:
        raise ConfigError(f"~{override.key}: {dotted(path)} is {present!r}, not {override.value!r}")
    delete(tree, path)
