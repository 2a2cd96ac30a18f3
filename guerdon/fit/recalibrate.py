"""Another calibration or threshold for a fitted model, from labelled episodes; the weights stay."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.progress import progress
from guerdon.core.types import display_path
from guerdon.data.datasets.frames import RewardDataset, open_store, rows_of
from guerdon.fit.calibrate import calibrate
from guerdon.fit.metrics import LabelledScores, summarize
from guerdon.fit.score import labelled_scores
from guerdon.fit.threshold import DEFAULT_TARGET, Threshold, choose_threshold, measure_threshold
from guerdon.rewards.image import Contract, RewardModel, load_checkpoint, save_checkpoint
from guerdon.rewards.image.checkpoint import (
    CARD_FILE,
    TORCH_SUFFIXES,
    WEIGHTS_FILE,
    check_own,
    find_checkpoint,
)
from guerdon.rewards.image.int8_file import int8_path, load_int8
from guerdon.rewards.image.scorer import MINI_BATCH, ImageScorer
from guerdon.rewards.relabel import Calibration

log = logging.getLogger("guerdon")

TWIN_FILE = "reward_model_best.pt"
"""The copy that a fit leaves beside `best_model/`, in RLinf's layout."""


@dataclass(frozen=True, kw_only=True)
class Recalibration:
    """What `recalibrate` wrote."""

    checkpoint: Path
    contract: Contract = field(repr=False)
    threshold: Threshold
    previous_threshold: float | None


def recalibrate(
    checkpoint: Path | str,
    data: Path | str,
    *,
    fpr: float | None = None,
    threshold: float | None = None,
    out: Path | str | None = None,
    seed: int = 0,
) -> Recalibration:
    """Calibrate a checkpoint again on `data`, and write threshold and calibration map into it.

    Args:
        checkpoint: a file or folder.
        data: labelled episodes that the model was not fitted to, in any format.
        fpr: at most this share of the failure frames may fire; None: what was asked for at the last
            calibration, or 0.01. The calibration map is fitted again, too.
        threshold: this threshold instead. The calibration map stays, because the number is one of its
            probabilities; only the rates are measured again.
        out: write the checkpoint here, and leave the old one as it is.
        seed: of folds and resamples.
    """
    if fpr is not None and threshold is not None:
        raise ConfigError("give fpr or threshold, not both: one follows from the other")
    for name, value in (("fpr", fpr), ("threshold", threshold)):
        if value is not None and not 0.0 < value < 1.0:
            raise ConfigError(f"{name} must lie between 0 and 1, not {value}")
    if out is None:
        check_own(checkpoint, "a threshold")
    file = find_checkpoint(Path(checkpoint))
    model, contract, extra = load_checkpoint(file)
    promised = (contract.calibration or {}).get("threshold") or {}
    target = fpr or promised.get("target_false_positive_rate") or DEFAULT_TARGET
    confidence = promised.get("confidence") or 0.95
    calibration, scores = _scores(
        ImageScorer(model, contract, source=display_path(file), threshold=0.5),
        Path(data),
        refit_map=threshold is None,
        seed=seed,
    )
    if threshold is None:
        found = choose_threshold(scores, target_fpr=target, confidence=confidence, seed=seed, raise_to=0.5)
    else:
        found = measure_threshold(scores, threshold, confidence=confidence, seed=seed)
    if found.caveat:
        log.warning("calibration: %s", found.caveat)
    new = replace(
        contract,
        threshold=found.threshold,
        calibration={"map": calibration.to_dict(), "threshold": found.to_dict()},
        metrics={**contract.metrics, **summarize(scores, found.threshold)},
    )
    place = file if file.suffix in TORCH_SUFFIXES else file.parent
    written = save_checkpoint(place if out is None else Path(out), model, new, extra)
    _check_int8(int8_path(file), int8_path(written), model, new)
    twin = file.parent.parent / TWIN_FILE
    if out is None and file.name == WEIGHTS_FILE and twin.is_file():
        log.info("%s is not changed and keeps its threshold", display_path(twin))
    if out is None and (file.parent / CARD_FILE).is_file():
        log.info("%s tells of the threshold before: export the model again", CARD_FILE)
    return Recalibration(
        checkpoint=written, contract=new, threshold=found, previous_threshold=contract.threshold
    )


def _scores(
    scorer: ImageScorer, data: Path, *, refit_map: bool, seed: int
) -> tuple[Calibration, LabelledScores]:
    """A calibration map, fitted again (`refit_map`) or the present one, and the probabilities it gives."""
    contract = scorer.contract
    with tempfile.TemporaryDirectory() as copy:
        store, _ = open_store(str(data), None, None, Path(copy))
        if store.content_hash == contract.data_hash:
            log.warning(
                "%s is what the model was fitted to: on frames that it has learned, its errors look smaller "
                "than they are. Give episodes that it has not seen.",
                display_path(data),
            )
        episodes = np.flatnonzero(store.complete)
        rows = rows_of(store, episodes, only_at_rest=contract.only_at_rest)
        if not len(rows):
            raise DataError(f"{display_path(data)} has no finished episode to calibrate on")
        dataset = RewardDataset(store, cameras=scorer.image_keys, rows=rows, num_frames=contract.num_frames)
        edges = progress(range(0, len(rows), MINI_BATCH), "scoring", unit="batch")
        batches = (dataset.batch(np.arange(at, min(at + MINI_BATCH, len(rows)))).frames for at in edges)
        logits = np.concatenate([scorer.logits(frames)[0] for frames in batches])
        positive = store.labels[rows] >= 0.5
        if positive.all() or not positive.any():
            lacking = "failure" if positive.all() else "success"
            raise DataError(f"{display_path(data)} has no {lacking} frame; calibration needs both kinds")
        calibration = contract.calibration_map
        if refit_map:
            calibration = calibrate(logits, store.labels[rows], store.episode[rows], seed=seed)
        return calibration, labelled_scores(calibration.apply(logits), store, rows)


def _check_int8(before: Path, path: Path, model: RewardModel, contract: Contract) -> None:
    """An int8 file is verified for one threshold: one that does not fit the new one is removed."""
    if before != path and before.is_file():
        log.info("%s is not copied; make one with guerdon reward quantize", display_path(before))
    if not path.is_file():
        return
    assert contract.threshold is not None
    try:
        load_int8(path, model, contract.calibration_map.logit_at(contract.threshold))
    except (ConfigError, DataError) as error:
        path.unlink()
        log.warning("%s is removed, because it does not fit any more: %s", display_path(path), error)
