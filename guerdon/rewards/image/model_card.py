"""The model card of a reward model: `README.md` with front matter, as model hubs show it.

It says what is known. What the contract or the reward card does not tell is named as not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from guerdon.rewards.image.contract import Contract

_FRONT_MATTER = """---
library_name: guerdon
pipeline_tag: robotics
tags:
- guerdon
- robotics
- reward-model
- success-detection
---"""
_MARKS = {"good": "✅", "care": "⚠️", "bad": "❌"}
UNKNOWN = "not known"
_NUMBERS = {
    "auc": "AUC",
    "average_precision": "average precision",
    "true_positive_rate": "success frames that fire",
    "false_positive_rate": "failure frames that fire",
    "ece": "calibration error",
    "detection_delay_median": "detection delay in steps, median",
    "false_fires_per_episode": "false fires per episode",
    "num_episodes": "held-out episodes",
}
"""Metrics of a fit that the card shows, where the contract has them."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a reward card showed; made by `guerdon.monitoring.model_card`."""

    level: str
    """`good`, `care` or `bad`."""
    headline: str
    reasons: tuple[tuple[str, str], ...]
    """Level and reason."""
    uses: tuple[tuple[str, str, str], ...]
    """Use, level and reason."""
    numbers: tuple[tuple[str, str], ...]
    data: str
    """Which episodes it was measured on."""
    pictures: Mapping[str, tuple[str, bytes]] = field(default_factory=dict, repr=False)
    """File name -> what it shows, and the PNG."""


def model_card(contract: Contract, evidence: Evidence | None, *, name: str | None = None) -> str:
    """The text of `README.md`.

    Args:
        contract: of the model.
        evidence: of a reward card; None if none was made for this export.
        name: `OWNER/NAME` if it goes to a hub; the example then loads it from there.
    """
    parts = [
        _FRONT_MATTER,
        f"# Reward model{'' if name is None else f' {name}'}",
        _summary(contract),
        _verdict(evidence),
        *_numbers(contract, evidence),
        *_pictures(evidence),
        _usage(contract, name),
        "## What it expects",
        _table(("", ""), _inputs(contract)),
        "Frames of another size or type are refused when it scores.",
        "## Threshold and calibration",
        _table(("", ""), _decisions(contract)),
        "## What it was fitted to",
        _table(("", ""), _origin(contract)),
        "## Limits",
        "Probabilities and rates hold for episodes of the same kind: the same camera, task and light. Before "
        "it gives rewards elsewhere, make a reward card on labelled episodes from there "
        "(`guerdon reward card`).",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(contract: Contract) -> str:
    encoder = contract.encoder
    network = f"{contract.model['arch']} of width {contract.model['width']}"
    if encoder is not None:
        network = f"{_code(encoder['source'])} ({_text(encoder['config'].get('model_type', UNKNOWN))})"
    cameras = ", ".join(map(_code, contract.model["image_keys"]))
    return (
        f"An image success classifier: it tells from the camera {cameras} how likely a frame shows success, "
        f"and serves as a reward for reinforcement learning. Head {_code(contract.model['model_type'])} on "
        f"the encoder {network}; made with Guerdon {_text(contract.guerdon_version)}."
    )


def _verdict(evidence: Evidence | None) -> str:
    if evidence is None:
        return (
            "## Can it be trusted?\n\n**Not assessed here.** This folder was written without a reward card; "
            "`guerdon reward export --data DATA` adds one."
        )
    lines = [f"## Can it be trusted?\n\n{_MARKS[evidence.level]} **{_text(evidence.headline)}**\n"]
    lines += [f"- {_MARKS[level]} {_text(reason)}" for level, reason in evidence.reasons]
    rows = [(use, f"{_MARKS[level]} {_text(reason)}") for use, level, reason in evidence.uses]
    return "\n".join(lines) + "\n\n" + _table(("use as", "verdict"), rows)


def _numbers(contract: Contract, evidence: Evidence | None) -> list[str]:
    if evidence is not None:
        rows = [(name, _text(value)) for name, value in evidence.numbers]
        return ["## Key numbers", f"Measured on {_text(evidence.data)}.", _table(("", ""), rows)]
    known = [(words, contract.metrics.get(key)) for key, words in _NUMBERS.items()]
    rows = [(words, f"{value:.4g}") for words, value in known if isinstance(value, int | float)]
    if not rows:
        return ["## Key numbers", f"{UNKNOWN.capitalize()}: its contract has no metrics."]
    return ["## Key numbers", "On the held-out episodes of its fit.", _table(("", ""), rows)]


def _pictures(evidence: Evidence | None) -> list[str]:
    if evidence is None or not evidence.pictures:
        return ["## Curves", f"{UNKNOWN.capitalize()}: they need labelled episodes of both outcomes."]
    return [
        "## Curves",
        *(
            f"**{_text(words)}**\n\n![{_text(words)}]({file})"
            for file, (words, _) in evidence.pictures.items()
        ),
    ]


def _usage(contract: Contract, name: str | None) -> str:
    extra = "'guerdon[hf]'" if name is not None or contract.encoder is not None else "guerdon"
    place = "FOLDER" if name is None else name
    return (
        f"## How to use it\n\n```bash\npip install {extra}\n```\n\n```python\nimport guerdon as gd\n\n"
        f'reward = gd.Reward.from_pretrained("{place}")\n'
        "probabilities = reward.predict(frames)  # uint8 [N, H, W, 3] -> float32 [N]\n"
        "rewards = reward(frames)\n```"
    )


def _inputs(contract: Contract) -> list[tuple[str, str]]:
    sizes = [
        f"{_code(camera)} {size[0]}x{size[1]}x{size[2]}" for camera, size in contract.frame_sizes.items()
    ]
    return [
        ("cameras", ", ".join(map(_code, contract.model["image_keys"]))),
        ("frames as collected (H x W x C)", ", ".join(sizes) or UNKNOWN),
        ("layout, values, colours", f"{contract.layout}, {contract.value_range}, {contract.colour_order}"),
        ("resized inside the model to", "x".join(map(str, contract.model["image_size"])) + " (C x H x W)"),
        ("frames scored together", str(contract.num_frames)),
        ("scores robots at rest alone", "yes" if contract.only_at_rest else "no"),
    ]


def _decisions(contract: Contract) -> list[tuple[str, str]]:
    promised = (contract.calibration or {}).get("threshold") or {}
    threshold = contract.threshold
    rows = [
        ("threshold", f"{UNKNOWN}; 0.5 is used" if threshold is None else f"{threshold:.6g}"),
        ("calibration", contract.calibration_map.kind if contract.calibration else UNKNOWN),
    ]
    for key, words in (("false_positive", "failure frames that fire"), ("true_positive", "success frames")):
        rate, interval = promised.get(f"{key}_rate"), promised.get(f"{key}_interval")
        if isinstance(rate, int | float) and interval and None not in interval:
            words = f"{words}, at calibration"
            rows.append((words, f"{rate:.2%}; fresh episodes {interval[0]:.2%} to {interval[1]:.2%}"))
    return rows


def _origin(contract: Contract) -> list[tuple[str, str]]:
    rows = [
        ("hash of the data", UNKNOWN if contract.data_hash is None else _code(contract.data_hash)),
        ("license", UNKNOWN),
    ]
    if contract.encoder is not None:
        kept = "kept as they were" if contract.model["freeze_encoder"] else "trained further"
        weights = f"included, {kept}; hash at the start {_code(contract.encoder['weights_hash'])}"
        rows += [("encoder", _code(contract.encoder["source"])), ("weights of the encoder", weights)]
    return rows


def _table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [names, tuple("---" for _ in names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _text(value: Any) -> str:
    """One line without markup: names and paths come from files of strangers."""
    line = re.sub(r"\s+", " ", escape(str(value), quote=False))
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", line)


def _code(value: Any) -> str:
    line = re.sub(r"[\s`|]+", " ", str(value))
    return f"`{line}`"
