"""`Card`: whether a reward model can be trusted, and for what."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guerdon.api.data import Dataset, data_path
from guerdon.api.settings import check_path, shown
from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.notebook import html_frame
from guerdon.monitoring.assess import assess

if TYPE_CHECKING:
    from guerdon.api.reward import Reward


@dataclass(frozen=True, kw_only=True)
class Card:
    """The reward card of a model on a data set; made by `Reward.card`.

    Example:
        >>> card = reward.card("fresh")
        >>> card.headline, card.metrics["auc"], card.uses["binary"]
        >>> card.save("card.html")
    """

    headline: str
    """What it can be used for, in one sentence."""
    level: str
    """`good`, `care` or `bad`."""
    uses: Mapping[str, Mapping[str, str]]
    """For `continuous`, `binary` and `terminal` rewards and for ending episodes: `level` and `reason`."""
    next_steps: tuple[Mapping[str, str], ...]
    """What to do next: `why` and `command`."""
    metrics: Mapping[str, float]
    """On this data set, at `threshold`."""
    threshold: float
    html: str
    """The whole page."""

    def show(self) -> None:
        """Show the page in a notebook; elsewhere print what it says."""
        if "ipykernel" in sys.modules:
            notebook: Any = import_module("IPython.display")
            notebook.display(notebook.HTML(self._repr_html_()))
        else:
            print(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, one file that needs no other."""
        path = check_path("path", path)
        make_directory(path.parent)
        write_atomic(path, self.html)
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON; without the page."""
        return {
            "headline": self.headline,
            "level": self.level,
            "uses": {use: dict(verdict) for use, verdict in self.uses.items()},
            "next_steps": [dict(step) for step in self.next_steps],
            "metrics": dict(self.metrics),
            "threshold": self.threshold,
        }

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"{use:<17}{verdict['level']}: {verdict['reason']}" for use, verdict in self.uses.items()]
        for step in self.next_steps:
            lines += [f"next: {step['why']}", *([f"  {step['command']}"] if step["command"] else [])]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Card({self.headline!r}, auc={self.metrics['auc']:.4f}, threshold={self.threshold:.4g})"

    def _repr_html_(self) -> str:
        return html_frame(self.html)


def make_card(reward: Reward, data: Dataset | str | os.PathLike[str], *, progress: bool = True) -> Card:
    """Score a data set and judge the model by it; see `Reward.card`."""
    path = data_path(data)
    given = reward.cfg.reward_threshold
    with tempfile.TemporaryDirectory() as folder, shown(progress):
        page = Path(folder) / "card.html"
        found = assess(
            str(reward.cfg.model.checkpoint_path),
            path,
            page,
            precision=reward.model.config.precision,
            threshold=None if given == "calibrated" else float(given),
        )
        html = page.read_text(encoding="utf-8")
    plain = found.to_dict()
    return Card(
        headline=plain["headline"],
        level=plain["verdict"],
        uses=plain["uses"],
        next_steps=tuple(plain["next_steps"]),
        metrics=plain["metrics"],
        threshold=plain["threshold"],
        html=html,
    )
