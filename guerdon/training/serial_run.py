"""A run of a serial pipeline: the loop to its end, with evaluations, logs, checkpoints and resume."""

from __future__ import annotations

import logging
import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from guerdon.agents.agent import AnyAgent
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.atomic import make_directory, storage_errors
from guerdon.core.errors import ConfigError, DataError, RunInterrupted
from guerdon.core.interrupts import Interrupts
from guerdon.core.progress import progress_bar
from guerdon.core.types import display_path
from guerdon.fit.logs import MetricLog
from guerdon.rewards import BaseRewardModel
from guerdon.training.checkpoints import (
    BEST,
    LAST,
    PREVIOUS,
    STATE,
    SavedPolicy,
    find_sound_policy,
    load_policy,
    readable_state,
    save_policy,
)
from guerdon.training.evaluation import Evaluation, evaluate
from guerdon.training.folders import CHECKPOINTS, held, new_run_folder
from guerdon.training.online_reward import Notes
from guerdon.training.rollouts import play_for
from guerdon.training.runs import (
    check_finite,
    check_same_agent,
    episode_seed,
    is_due,
    write_config,
    write_summary,
)
from guerdon.training.serial_loops import SerialLoop

log = logging.getLogger("guerdon")

REWARD_MODEL_FILE = "reward_model.pt"
"""Beside each saved policy; `BaseRewardModel.load` reads it."""


@dataclass(kw_only=True)
class SerialResult:
    """What a pipeline returns."""

    policy: AnyAgent
    reward_model: BaseRewardModel
    folder: Path | None = None
    """Where the run is kept; None: nothing was written."""
    env_steps: int = 0
    train_iter: int = 0
    seconds: float = 0.0
    solved: bool = False
    """An evaluation reached `stop_value`."""
    evaluations: list[tuple[int, float, Evaluation]] = field(default_factory=list)
    """(environment steps, seconds of training, result)."""

    @property
    def best_return(self) -> float:
        """The highest mean return of an evaluation."""
        return max((result.env_return for _, _, result in self.evaluations), default=float("-inf"))

    @property
    def last_return(self) -> float:
        """The mean return of the last evaluation."""
        return self.evaluations[-1][2].env_return if self.evaluations else float("nan")

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        return {
            "solved": self.solved,
            "env_steps": self.env_steps,
            "train_iter": self.train_iter,
            "seconds": round(self.seconds, 2),
            "best_return": _or_none(self.best_return),
            "last_return": _or_none(self.last_return),
            "evaluations": [
                {"env_steps": steps, "seconds": round(seconds, 2), **asdict(found)}
                for steps, seconds, found in self.evaluations
            ],
            "folder": None if self.folder is None else str(self.folder),
        }


class SerialRun:
    """Trains to the end of the budget, to `max_train_iter`, or until an evaluation reaches `stop_value`."""

    def __init__(self, cfg: SerialConfig, loop: SerialLoop, notes: Notes, max_train_iter: int | None) -> None:
        """Set up; nothing is written before `train`.

        Args:
            cfg: the settings, with the arguments of the pipeline in their places.
            loop: environments, learner and reward model.
            notes: the reward model's logger.
            max_train_iter: stop after so many updates of the policy.
        """
        self.cfg, self.loop, self.notes, self.max_train_iter = cfg, loop, notes, max_train_iter
        self.result = SerialResult(policy=loop.learner, reward_model=loop.model)
        self.interrupts = Interrupts()
        self._seconds_before = 0.0
        played = play_for(loop.model, loop.env, cfg.seed)
        loop.env_steps += played  # unless a run is resumed, which has counted them
        self._saved = self._load() if cfg.resume_dir is not None else None
        if cfg.output_dir is not None:
            self.result.folder = self._folder()

    def train(self) -> SerialResult:
        """Everything; returns what came of it."""
        folder = self.result.folder
        if folder is None:
            self._begin()
            self._train(None)
            return self.result
        with held(folder):
            return self._train_in(folder)

    def _train_in(self, folder: Path) -> SerialResult:
        """The run with all that it leaves in its folder."""
        cfg, loop, budget = self.cfg, self.loop, self.cfg.learner.total_steps
        write_config(folder, cfg)
        resume_step = None if self._saved is None else loop.env_steps
        with (
            self.interrupts,
            MetricLog(folder, resume_step=resume_step) as logs,
            progress_bar("training", total=budget, unit="step") as bar,
        ):
            self.notes.board = logs.board
            bar.update(loop.env_steps)
            self._begin()
            try:
                self._train(logs, bar)
            except KeyboardInterrupt:
                if self.interrupts.count > 1 or not loop.env_steps:
                    raise
                self._save(LAST)
                place = display_path(folder / CHECKPOINTS / LAST)
                raise RunInterrupted(loop.env_steps, place, "resume_dir") from None
        self._save(LAST)
        write_summary(folder, {**self._about(), **self.result.summary()})
        return self.result

    def _begin(self) -> None:
        """The first episodes, and what the reward model learns before the policy does."""
        if self._saved is not None:
            self.loop.reset(episode_seed(self.cfg.seed, self.loop.env_steps))
            return
        self.loop.reset(self.cfg.seed)
        if self.cfg.pretrain_reward:
            self.loop.pretrain()

    def _train(self, logs: MetricLog | None, bar: Any = None) -> None:
        cfg, loop, budget = self.cfg.learner, self.loop, self.cfg.learner.total_steps
        begin, measuring = time.perf_counter() - self._seconds_before, 0.0
        while loop.env_steps < budget and not self._enough():
            before = loop.env_steps
            with self.interrupts.deferred():
                metrics = loop.advance(before / budget)
            metrics |= self.notes.pop()
            check_finite(metrics, loop.env_steps)
            last = loop.env_steps >= budget or self._enough()
            stopping = self.interrupts.requested
            try:
                if (is_due(before, loop.env_steps, cfg.eval_interval) and not stopping) or last:
                    start = time.perf_counter()
                    found = self._evaluate()
                    measuring += time.perf_counter() - start
                    metrics |= found.metrics()
                    self._keep(found, time.perf_counter() - begin - measuring)
            finally:  # also after Ctrl-C, which does not wait for an evaluation
                if logs is not None:
                    logs.write(loop.env_steps, metrics)
            if bar is not None:
                bar.update(loop.env_steps - before)
                bar.set_postfix_str(_postfix(self.result, metrics), refresh=False)
            self._note(begin)
            if self.result.solved:
                break
            if is_due(before, loop.env_steps, cfg.save_interval) and not last:
                self._save(LAST)
                loop.reset(episode_seed(self.cfg.seed, loop.env_steps))
            self.interrupts.check()

    def _enough(self) -> bool:
        return self.max_train_iter is not None and self.loop.train_iter >= self.max_train_iter

    def _note(self, begin: float) -> None:
        self.result.env_steps, self.result.train_iter = self.loop.env_steps, self.loop.train_iter
        self.result.seconds = time.perf_counter() - begin

    def _keep(self, found: Evaluation, seconds: float) -> None:
        """Note an evaluation; the best one so far is saved."""
        better = found.env_return > self.result.best_return
        self.result.evaluations.append((self.loop.env_steps, seconds, found))
        stop = self.cfg.stop_value
        self.result.solved = stop is not None and found.env_return >= stop
        if better:
            self._save(BEST)

    def _evaluate(self) -> Evaluation:
        cfg = self.cfg
        return evaluate(
            lambda obs: self.loop.learner.act(obs, deterministic=True),
            cfg.env.eval,
            episodes=cfg.learner.eval_episodes,
            seed=cfg.seed + 10_000,
        )[0]

    # Files

    def _folder(self) -> Path:
        """A new folder, or that of the run that is resumed."""
        if self._saved is not None and self._saved.folder.parent.name == CHECKPOINTS:
            return self._saved.folder.parent.parent
        return new_run_folder(Path(str(self.cfg.output_dir)) / self.cfg.exp_name)

    def _save(self, name: str) -> None:
        """Policy, reward model and everything that going on needs, in `checkpoints/<name>`."""
        if self.result.folder is None:
            return
        folder = self.result.folder / CHECKPOINTS / name
        if name == LAST and (folder / STATE).is_file():  # kept, in case that the new one gets damaged
            before = folder.with_name(PREVIOUS)
            with storage_errors(before):
                shutil.rmtree(before, ignore_errors=True)
                folder.rename(before)
        make_directory(folder)
        self.loop.model.save(folder / REWARD_MODEL_FILE)
        evaluations = [
            {"env_steps": steps, "seconds": seconds, "result": asdict(found)}
            for steps, seconds, found in self.result.evaluations
        ]
        state = {  # in one file with the policy, so that an interruption never pairs two moments
            "loop": self.loop.state_dict(),
            "reward_model": self.loop.model.state_dict(),
            "evaluations": evaluations,
            "seconds": self.result.seconds,
            **self._about(),
        }
        env = self.loop.env
        spaces = env.single_observation_space, env.single_action_space
        save_policy(
            folder, self.loop.learner, self.cfg.learner, self.cfg.env.eval, spaces, self.loop.env_steps, state
        )

    def _about(self) -> dict[str, Any]:
        return {
            "env": self.cfg.env.train.id,
            "algorithm": self.cfg.learner.algorithm,
            "reward_model_type": str(self.cfg.reward_model.get("type", type(self.loop.model).__name__)),
            "seed": self.cfg.seed,
        }

    def _load(self) -> SavedPolicy:
        """Go on from a checkpoint; what does not fit the settings is refused."""
        place = Path(str(self.cfg.resume_dir))
        saved = load_policy(find_sound_policy(place, "resume_dir"), self.cfg.seed)
        if "reward_model" not in saved.state:
            raise DataError(f"{display_path(place)} holds a policy, but not of a serial pipeline")
        check_same_agent(saved, self.loop.learner, place)
        if saved.state["seed"] != self.cfg.seed:
            raise ConfigError(
                f"{display_path(place)} was trained with seed {saved.state['seed']}, not {self.cfg.seed}"
            )
        self.loop.learner.load_state_dict(saved.learner.state_dict())
        with readable_state(saved.folder):
            self.loop.load_state_dict(saved.state["loop"])
            self.loop.model.load_state_dict(saved.state["reward_model"])
            self.result.evaluations = [
                (int(each["env_steps"]), float(each["seconds"]), Evaluation(**each["result"]))
                for each in saved.state["evaluations"]
            ]
            self._seconds_before = float(saved.state["seconds"])
        log.info("resumed from %s at step %d", display_path(place), saved.step)
        return saved


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _postfix(result: SerialResult, metrics: dict[str, float]) -> str:
    shown = {"learned": metrics.get("rollout/learned_rewards")}
    if result.evaluations:
        shown["return"] = result.last_return
    return " ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
