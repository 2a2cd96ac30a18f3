"""`prove`: does the policy succeed because of the learned reward?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from guerdon.api.agents import Agent
from guerdon.api.settings import check_count, shown
from guerdon.config import GuerdonConfig
from guerdon.core.errors import ConfigError
from guerdon.core.notebook import html_frame
from guerdon.core.types import display_path
from guerdon.monitoring.proof import ARMS
from guerdon.rewards.image.function import FunctionScorer
from guerdon.training.prove import load
from guerdon.training.prove import prove as run

CHECKS = 4
"""Evaluations of an agent's arm over its steps."""


@dataclass(frozen=True, kw_only=True)
class ProofResult:
    """What a training and its controls show; `folder` has `prove.html` and the runs."""

    verdict: str
    """One sentence."""
    level: str
    """`good`, `care` or `bad`."""
    reasons: tuple[str, ...]
    """What supports the verdict, and what cannot be concluded."""
    arms: Mapping[str, Mapping[str, Any]]
    """Arm (`start`, `learned`, `off`, `shuffled`, `true`) -> `mean`, `low`, `high`, `episodes`, `seeds`."""
    differences: Mapping[str, Mapping[str, Any]]
    """Another arm -> how much higher `learned` is, with its interval."""
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return {**vars(self), "reasons": list(self.reasons), "folder": str(self.folder)}

    def __str__(self) -> str:
        rows = [f"{name:<10}{_interval(arm)}" for name, arm in self.arms.items()]
        return "\n".join([self.verdict, *rows, *self.reasons])

    def __repr__(self) -> str:
        return f"ProofResult({self.verdict!r}, level={self.level}, folder={display_path(self.folder)})"

    def _repr_html_(self) -> str:
        return html_frame((self.folder / "prove.html").read_text(encoding="utf-8"))


def _interval(arm: Mapping[str, Any]) -> str:
    return f"{arm['mean']:.3f} ({arm['low']:.3f} to {arm['high']:.3f})"


def prove(
    agent: Agent | GuerdonConfig | str | os.PathLike[str],
    *,
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    arms: Sequence[str] = ARMS,
    episodes: int | None = None,
    workers: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> ProofResult:
    """Train again beside controls: the learned reward is `off`, `shuffled`, or replaced by the `true` one.

    Args:
        agent: an agent whose environment was given by its id and whose reward is a `Reward`; a config, or
            the name or path of one as `guerdon train` and `guerdon zoo` take it.
        seeds: how many, or which.
        steps: environment steps of each training; None: those of the agent so far, or of the config.
        arms: which of `start`, `learned`, `off`, `shuffled` and `true`; the first two always run.
        episodes: of each evaluation.
        workers: trainings at a time; None: one for each core.
        out: the folder; what is finished in it is not run again. None makes a new one below `runs`.
        progress: whether to show progress.

    Example:
        >>> proof = gd.prove(agent, seeds=3)
        >>> print(proof.verdict)
    """
    config = _config_of(agent) if isinstance(agent, Agent) else agent
    if isinstance(config, str | os.PathLike):
        try:
            config = load(os.fspath(config))
        except ConfigError as error:
            raise ConfigError(f"agent: {error}") from error
    if not isinstance(config, GuerdonConfig):
        raise ConfigError(f"agent must be an agent, a config or the name or path of one, not {agent!r:.80}")
    learner, runner = config.learner, config.runner
    if steps is not None:
        learner = replace(learner, total_steps=check_count("steps", steps))
    if isinstance(agent, Agent):
        interval = max(learner.total_steps // CHECKS, 1)
        learner = replace(learner, eval_interval=interval, save_interval=interval)
    if out is not None:
        runner = replace(runner, logger=replace(runner.logger, log_path=os.fspath(out)))
    with shown(progress):
        found = run(
            replace(config, learner=learner, runner=runner),
            seeds=seeds,
            arms=arms,
            episodes=episodes,
            workers=workers,
        )
    return ProofResult(
        verdict=found["verdict"],
        level=found["level"],
        reasons=tuple(text for _, text in found["reasons"]),
        arms=found["arms"],
        differences=found["differences"],
        folder=Path(found["folder"]),
    )


def _config_of(agent: Agent) -> GuerdonConfig:
    """The settings that other processes train the same agent with."""
    if not agent.from_id:
        raise ConfigError("agent: prove trains in other processes, so the agent's env has to be an id")
    config = agent.runner.config
    if isinstance(agent.runner.rewards, FunctionScorer):
        raise ConfigError("agent: its reward is a function, and other processes cannot load it")
    if not config.reward.use_reward_model:
        raise ConfigError("agent: there is no `Reward` to prove; for a model of the zoo give a config")
    steps = agent.num_steps or config.learner.total_steps
    runner = replace(config.runner, experiment_name=config.learner.algorithm, resume_dir=None)
    return replace(config, learner=replace(config.learner, total_steps=steps), runner=runner)
