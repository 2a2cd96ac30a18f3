"""Refits of the reward model within a run: mine, refit, swap, save and take up again."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

from guerdon.agents.registry import agent_class
from guerdon.config import GuerdonConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path
from guerdon.fit.refit import FILE, Refitter
from guerdon.rewards.image.checkpoint import find_checkpoint
from guerdon.rewards.image.scorer import RewardManager
from guerdon.training.loop import Iteration
from guerdon.training.reward_workers import RewardWorkers

log = logging.getLogger("guerdon")

MODEL = "reward_model"
"""The refitted model in a policy's checkpoint."""


class Refits:
    """Who mines frames of the policy, refits the reward model with them and hands it to the workers."""

    def __init__(
        self,
        config: GuerdonConfig,
        rewards: RewardManager | RewardWorkers,
        folder: Path,
        *,
        knows_success: bool,
    ) -> None:
        """Refuse what cannot work, and open the data of the first fit."""
        if not knows_success:
            raise ConfigError(
                f"reward.refit_interval needs labels, but {config.env.train.id} does not tell success in its "
                "info"
            )
        if config.asynchronous.enabled:
            raise ConfigError(
                "reward.refit_interval is not for asynchronous runs: set asynchronous.enabled=false"
            )
        on_policy = agent_class(config.learner.algorithm).on_policy
        if not on_policy and config.reward.relabel_at != "sampling":
            raise ConfigError(
                f"reward.refit_interval with learner.algorithm={config.learner.algorithm} needs "
                "reward.relabel_at=sampling: stored verdicts would be those of the model before"
            )
        self._rewards = rewards
        self._fitter = Refitter(config.reward, config.fit, rewards.facts.contract, folder, config.seed)
        self._checkpoint = find_checkpoint(Path(str(config.reward.model.checkpoint_path)))
        self._last: dict[str, float] = {}

    @property
    def count(self) -> int:
        """Refits so far."""
        return self._fitter.num_refits

    def metrics(self) -> dict[str, float]:
        """Counts, and after a refit what came of it; each refit is reported once."""
        last, self._last = self._last, {}
        return self._fitter.metrics() | last

    def add(self, step: int, iteration: Iteration) -> None:
        """Keep frames of an iteration."""
        if iteration.scored is not None:
            self._fitter.add(step, iteration.scored, self._rewards.facts.threshold)

    def refit(self, step: int) -> bool:
        """Refit and swap the model; returns whether there was enough to learn from."""
        began = time.perf_counter()
        before = self._rewards.facts.threshold
        result = self._fitter.refit(step, self._checkpoint)
        if result is None:
            return False
        self._checkpoint = find_checkpoint(result.checkpoint)
        self._rewards.use_checkpoint(self._checkpoint)
        self._last = {
            "reward/refit_auc": float(result.metrics["auc"]),
            "reward/refit_threshold": self._rewards.facts.threshold,
            "time/refit": time.perf_counter() - began,
        }
        log.info(
            "step %d: the reward model was refitted with %d frames of the policy, %d of them false fires: "
            "AUC %.4f, threshold %.3f to %.3f, %s",
            step,
            len(self._fitter.mined),
            self._fitter.mined.num_false_fires,
            result.metrics["auc"],
            before,
            self._rewards.facts.threshold,
            display_path(self._checkpoint),
        )
        return True

    def save(self, folder: Path) -> dict[str, Any]:
        """What resuming needs; frames and the model go to `folder`."""
        self._fitter.mined.save(folder / FILE)
        if self.count:
            shutil.copytree(self._checkpoint.parent, folder / MODEL, dirs_exist_ok=True)
        return {"count": self.count}

    def load(self, state: dict[str, Any] | None, folder: Path) -> None:
        """Go on from `save`; None if the run had no refits."""
        if state is None:
            return
        self._fitter.num_refits = int(state["count"])
        self._fitter.mined.load(folder / FILE)
        if self.count:
            self._checkpoint = find_checkpoint(folder / MODEL)
            self._rewards.use_checkpoint(self._checkpoint)
