"""From a checkpoint and a data set to the reward card."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from guerdon.config import RewardConfig, RewardModelConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import UInt8Array, display_path
from guerdon.data.datasets.audit import audit
from guerdon.fit.metrics import summarize
from guerdon.fit.score import ScoredFrames, score_path
from guerdon.fit.threshold import Threshold, choose_threshold, measure_threshold
from guerdon.monitoring.advice import NextStep, next_steps
from guerdon.monitoring.card import write_card
from guerdon.monitoring.verdict import CardInputs, Verdict
from guerdon.rewards.image.scorer import RewardManager
from guerdon.rewards.relabel import fires

Precision = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What a card says, in short."""

    card: Path
    verdict: Verdict
    next_steps: tuple[NextStep, ...]
    summary: dict[str, Any] = field(repr=False)
    """`summarize_scores` of all frames."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            **self.summary,
            "card": str(self.card),
            "verdict": self.verdict.level,
            "headline": self.verdict.headline,
            "uses": {each.use: {"level": each.level, "reason": each.reason} for each in self.verdict.uses},
            "next_steps": [{"why": step.why, "command": step.command} for step in self.next_steps],
        }


def load_manager(
    checkpoint: Path | str, *, precision: Precision = "fp32", threshold: float | None = None
) -> RewardManager:
    """The reward model of a checkpoint; `threshold` None takes the calibrated one."""
    if threshold is not None and not 0.0 < threshold < 1.0:
        raise ConfigError(f"the threshold must lie between 0 and 1, not {threshold}")
    model = replace(RewardModelConfig(), checkpoint_path=str(checkpoint), precision=precision)
    cfg = RewardConfig(model=model, reward_threshold="calibrated" if threshold is None else threshold)
    return RewardManager(cfg)


def summarize_scores(scored: ScoredFrames, threshold: float) -> dict[str, Any]:
    """Scores in plain numbers; `metrics` only where there are labels."""
    count = len(scored.prob_success)
    summary: dict[str, Any] = {
        "frames": count,
        "episodes": len(scored.sources),
        "threshold": threshold,
        "fires": int(fires(scored.prob_success, threshold).sum()),
        "mean_probability": float(scored.prob_success.mean()),
        "frames_per_second": round(count / scored.seconds, 1),
        "faults": [asdict(fault) for fault in scored.faults],
    }
    if scored.store is not None:
        summary["metrics"] = summarize(scored.labelled(), threshold)
    return summary


def assess(
    checkpoint: Path | str,
    data: Path | str,
    out: Path | str,
    *,
    precision: Precision = "fp32",
    threshold: float | None = None,
) -> Assessment:
    """Score a data set and write the reward card of it to `out`.

    Args:
        checkpoint: of another program it has no calibrated threshold; the card then chooses one on `data`.
        data: labelled episodes, best such that the model was not fitted to.
        out: an HTML file.
        precision: of scoring.
        threshold: decide at this one, not as calibrated.
    """
    manager = load_manager(checkpoint, precision=precision, threshold=threshold)
    with tempfile.TemporaryDirectory() as copy:
        scored = score_path(manager, Path(data), Path(copy))
        summary = summarize_scores(scored, manager.threshold)
        inputs = card_inputs(manager, scored, Path(data), given=threshold)
        verdict = write_card(out, inputs)
    return Assessment(
        card=Path(out), verdict=verdict, next_steps=tuple(next_steps(inputs, verdict)), summary=summary
    )


def card_inputs(
    manager: RewardManager, scored: ScoredFrames, data: Path, *, given: float | None = None
) -> CardInputs:
    """Everything that a card shows of scored episodes; `given` is a threshold that is not the calibrated."""
    scores, store, camera = scored.labelled(), scored.store, manager.image_keys[0]
    assert store is not None  # `labelled` has seen to it

    def frame(episode: int, step: int) -> UInt8Array:
        picture: UInt8Array = store.frames(camera, [int(store.starts[episode]) + step])[0]
        return np.repeat(picture, 3, axis=-1) if picture.shape[-1] == 1 else picture

    stored = (manager.contract.calibration or {}).get("threshold")
    if given is not None:
        threshold = measure_threshold(scores, given, seed=0)
    else:
        threshold = choose_threshold(scores, seed=0) if stored is None else Threshold.from_dict(stored)
    rate = round(len(scored.prob_success) / scored.seconds, 1)
    checkpoint, precision = display_path(str(manager.cfg.model.checkpoint_path)), manager.cfg.model.precision
    return CardInputs(
        title=f"Reward card: {checkpoint}",
        checkpoint=checkpoint,
        scores=scores,
        threshold=threshold,
        calibration=manager.contract.calibration_map,
        metrics=summarize(scores, threshold.threshold),
        frame=frame,
        contract=manager.contract.to_dict(),
        audit=audit(data),
        data_hash=store.content_hash,
        speed={f"frames per second ({precision})": rate, "milliseconds per batch of 256": 256e3 / rate},
        data=display_path(data),
    )
