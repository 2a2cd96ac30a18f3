"""`EmbodiedRunner`: train a policy on the learned reward, measure it by the environment's own success."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from guerdon.config import GuerdonConfig
from guerdon.config.unused import log_without_effect
from guerdon.core.errors import ConfigError, GuerdonError, RunInterrupted
from guerdon.core.interrupts import Interrupts
from guerdon.core.progress import progress_bar
from guerdon.core.types import display_path
from guerdon.distributed import Engine, make_engine
from guerdon.envs.observations import camera_behind
from guerdon.fit.logs import MetricLog
from guerdon.monitoring.monitor import RewardMonitor
from guerdon.rewards.image.scorer import ImageScorer, RewardManager
from guerdon.rewards.model import BaseRewardModel
from guerdon.training.checkpoints import find_sound_policy, load_policy, readable_state
from guerdon.training.env_worker import EnvWorker
from guerdon.training.evaluation import Evaluation, FilmedEpisode, evaluate
from guerdon.training.folders import write_config
from guerdon.training.loop import Callback, Iteration, TrainingStep
from guerdon.training.on_policy import OnPolicyLoop
from guerdon.training.refits import Refits
from guerdon.training.reward_workers import RewardWorkers
from guerdon.training.run_parts import HURRY_SECONDS, RunParts
from guerdon.training.runs import (
    all_finite,
    check_finite,
    check_same_agent,
    check_settings,
    episode_seed,
    finish_run,
    is_due,
    log_alarms,
    progress_text,
    save_run,
    settled,
    take_up,
    warm_start,
    with_note,
)
from guerdon.training.trackers import Trackers

log = logging.getLogger("guerdon")

NUM_FILMS = 4


class EmbodiedRunner:
    """Calls the workers in order: rollout, reward model, update; evaluates, saves, watches and reports."""

    resume_setting = "runner.resume_dir"
    """What a user sets to go on with the run."""

    def __init__(
        self,
        config: GuerdonConfig,
        folder: Path | str,
        *,
        env: Any = None,
        eval_env: Any = None,
        reward_model: BaseRewardModel | ImageScorer | None = None,
        max_updates: int | None = None,
    ) -> None:
        """Make environments, learner and reward model; what does not fit together is refused here.

        Args:
            config: the whole tree; each part gets its own section.
            folder: the run's folder.
            env: vector environments to train in, in this process; None makes those of `config.env.train`.
            eval_env: vector environments to evaluate in, which stay open; they may be those of `env`. None
                makes those of `config.env.eval`.
            reward_model: of the zoo, instead of the one of `config.reward_model`; or a loaded image model,
                instead of the one of `config.reward.model`, with `reward.use_reward_model`.
            max_updates: stop after so many updates; 0 only measures and saves the start; None: no limit.
        """
        if not isinstance(config, GuerdonConfig):
            raise ConfigError(f"EmbodiedRunner takes a GuerdonConfig (see load_config), not {config!r:.80}")
        log_without_effect(config)
        self.config, self.folder = config, Path(folder)
        check_settings(config)
        config = self.config = settled(config)
        if config.learner.num_threads is not None:
            torch.set_num_threads(config.learner.num_threads)
        self.alarms: list[str] = []
        self.evaluations: list[tuple[int, float, Evaluation]] = []
        """(environment steps, seconds of training, result)."""
        self._max_updates, self.seconds = max_updates, 0.0  # of training
        self.stopped: str | None = None
        """Why the run is to end before its last step: an alarm, or a return that was reached."""
        self._eval_env, self._shares_env = eval_env, eval_env is not None and eval_env is env
        self._resumed: bool | None = None  # None: the run has not begun
        self.trackers = Trackers(config, self.folder)
        self.interrupts = Interrupts()
        threads = config.asynchronous.enabled
        self.engine: Engine = make_engine(config.engine, config.cluster, threads=threads)
        try:
            parts = RunParts(config, self.engine, env, reward_model)
        except BaseException:
            self.engine.close()
            raise
        self.config = config = parts.config
        self.rewards, self.envs, self.spaces = parts.rewards, parts.envs, parts.spaces
        self.learner, self.online, self.loop = parts.learner, parts.online, parts.loop
        try:
            self.monitor = self._make_monitor()
            self.loop.watches = self.monitor is not None
            self.refits = self._make_refits()
        except BaseException:
            self.envs.close(HURRY_SECONDS)
            self.engine.close()
            raise

    @property
    def env_worker(self) -> EnvWorker:
        """The env worker, where it is in this process."""
        return self.envs.local

    @property
    def reward_worker(self) -> ImageScorer | None:
        """Who scores frames, where that is in this process."""
        return self.rewards.local if isinstance(self.rewards, RewardWorkers) else self.rewards

    def _make_monitor(self) -> RewardMonitor | None:
        facts = None if self.rewards is None else self.rewards.facts
        if (facts is None and self.online is None) or self.config.monitor.action == "off":
            return None
        if self.config.reward.control != "none":
            return None  # the policy of a control has no reason to do what the model rewards
        judges = None if facts is None or facts.gives_rewards else facts  # others give rewards
        return RewardMonitor(
            self.config.monitor,
            None if judges is None else judges.contract,
            None if judges is None else judges.threshold,
            self.folder,
            knows_success=self.loop.knows_success(),
        )

    def _make_refits(self) -> Refits | None:
        section = self.config.reward
        if self.rewards is None or not section.refit_interval or not section.looks_at_frames:
            return None
        assert isinstance(self.rewards, RewardManager | RewardWorkers)
        return Refits(self.config, self.rewards, self.folder, knows_success=self.loop.knows_success())

    # A run

    def run(self) -> dict[str, Any]:
        """Train to the end; returns what `summary.json` holds."""
        started = time.perf_counter()
        try:
            with self._logged() as (logs, bar):
                stopped = self._train(logs, bar)
                if self.config.env.train.env_type == "robot":
                    self.envs.close()  # an arm and its cameras can be held by one at a time
                result, films = self._last_evaluation()
                logs.write(self.loop.env_steps, result.metrics())
            self.envs.close()
            self.engine.log_notices()
            return finish_run(self, result, films, stopped, time.perf_counter() - started)
        except BaseException:
            self.envs.close(HURRY_SECONDS)  # what was collected so far is written
            raise
        finally:
            self.trackers.close()
            self.engine.close()

    def init_workers(self) -> None:
        """Warm start or resume, as `run` does by itself. The workers and their models are loaded already."""
        self.start_or_resume()

    def _apply_reward_model(self) -> None:
        """From the scores of the latest rollout to its training rewards, as in each iteration of PPO."""
        if not isinstance(self.loop, OnPolicyLoop):
            algorithm = self.config.learner.algorithm
            raise ConfigError(f"{algorithm} has no rollout: it relabels every batch that it samples")
        if not hasattr(self.loop, "rollout"):
            raise ConfigError("there is no rollout to give rewards to yet")
        self.loop.apply_reward_model()

    def learn(self, num_steps: int, callbacks: Sequence[Callback] = (), *, save: bool = True) -> str | None:
        """Train for at least so many more environment steps; the environments stay open, until `close`.

        Args:
            num_steps: of all environments together.
            callbacks: called after each iteration with its `TrainingStep`; one that returns False ends this.
            save: whether to leave checkpoints in the run's folder.

        Returns:
            Why training ended earlier, if it did.
        """
        self.stopped = None  # whoever asks for more steps wants them
        total = self.loop.env_steps + num_steps
        self.config = replace(self.config, learner=replace(self.config.learner, total_steps=total))
        with self._logged() as (logs, bar):
            return self._train(logs, bar, callbacks, save=save)

    def close(self) -> None:
        """Finish writing; end environments and workers."""
        self.envs.close()
        self.trackers.close()
        self.engine.close()

    @contextmanager
    def _logged(self) -> Iterator[tuple[MetricLog, Any]]:
        """Begin or resume if that has not been done; log and show progress while the block runs."""
        write_config(self.folder, self.config)
        self.trackers.begin(self.config)
        goes_on = self.start_or_resume() or self.loop.num_updates > 0
        cfg = self.config
        boards, step = "tensorboard" in cfg.runner.logger.backends, self.loop.env_steps
        with (
            self.interrupts,
            MetricLog(self.folder, tensorboard=boards, resume_step=step if goes_on else None) as logs,
            progress_bar("training", total=cfg.learner.total_steps, unit="step") as bar,
        ):
            bar.update(step)
            if self.online is not None:
                self.online.notes.board = logs.board
            try:
                yield logs, bar
            except KeyboardInterrupt as interrupt:
                self._keep_interrupted(interrupt)

    def _train(
        self, logs: MetricLog, bar: Any, callbacks: Sequence[Callback] = (), *, save: bool = True
    ) -> str | None:
        """Iterations to the end; returns why they ended earlier, if they did."""
        cfg, stopped = self.config.learner, self.stopped
        if self._max_updates == 0:
            self._write_checkpoint(self.loop.env_steps)
            return "before the first update"
        waits = self.config.env.train.env_type != "robot"  # an arm is stopped at once
        while self.loop.env_steps < cfg.total_steps and stopped is None:
            before, began = self.loop.env_steps, time.perf_counter()
            with self.interrupts.deferred(waits):
                iteration = self._advance(before / cfg.total_steps)
                step = self.loop.env_steps
                stopped = self.stopped = self._watch(step, iteration)
            metrics = dict(iteration.metrics)
            self.seconds += time.perf_counter() - began
            if self._max_updates is not None and self.loop.num_updates >= self._max_updates:
                stopped = stopped or f"after {self.loop.num_updates} updates"
            try:
                metrics |= self._refit(before, step, iteration)
                metrics |= self.monitor.metrics() if self.monitor else {}
                if is_due(before, step, cfg.eval_interval) and step < cfg.total_steps:
                    self.interrupts.check()
                    result = self.evaluate(cfg.eval_episodes)[0]
                    metrics |= result.metrics()
                    if cfg.stop_return is not None and result.env_return >= cfg.stop_return:
                        self.stopped = self.stopped or f"an evaluation reached {cfg.stop_return:g}"
                        stopped = stopped or self.stopped
            finally:  # also after Ctrl-C, which does not wait for a refit or an evaluation
                logs.write(step, metrics)
            bar.update(step - before)
            bar.set_postfix_str(progress_text(metrics), refresh=False)
            if save and (is_due(before, step, cfg.save_interval) or step >= cfg.total_steps or stopped):
                self._save(step)
            training_step = TrainingStep(env_steps=step, metrics=metrics, alarms=tuple(self.alarms))
            for callback in callbacks:
                if callback(training_step) is False:
                    stopped = stopped or "a callback ended it"
            self.interrupts.check()
        return stopped

    def _keep_interrupted(self, interrupt: KeyboardInterrupt) -> NoReturn:
        """Save what there is after the first Ctrl-C; a second one does not wait for that."""
        step = self.loop.env_steps
        if self.interrupts.count > 1 or not step:
            raise interrupt
        if self.config.env.train.env_type == "robot":
            self.envs.close(HURRY_SECONDS)  # the arm comes first
        kept = display_path(self._write_checkpoint(step))
        raise RunInterrupted(step, kept, self.resume_setting) from None

    def start_or_resume(self) -> bool:
        """Warm start or resume, unless that has been done; returns whether a run is resumed."""
        if self._resumed is not None:
            return self._resumed
        place = self.config.runner.resume_dir
        self._resumed = place is not None
        if place is not None:
            saved = load_policy(find_sound_policy(Path(place), self.resume_setting))
            check_same_agent(saved, self.learner, place)
            saved.check_fits(self.spaces, self.envs.facts.control_mode)
            self.learner.load_state_dict(saved.learner.state_dict())
            with readable_state(saved.folder):
                take_up(self, saved)
            log.info("resumed from %s at step %d", display_path(place), saved.step)
        else:
            if self.config.learner.warm_start.data is not None:
                warm_start(self.learner, self.config, self.spaces, self.envs.facts.control_mode)
        self.learner.check_reference()
        self.loop.reset(episode_seed(self.config.seed, self.loop.env_steps))
        if place is None and self.online is not None:
            self.online.pretrain(self.loop.collect_steps)
        return self._resumed

    def _advance(self, progress: float) -> Iteration:
        """One iteration; if it fails, the last good state is saved first."""
        try:
            iteration = self.loop.advance(progress)
        except GuerdonError as error:
            if not all_finite(self.learner.state_dict()):
                raise
            step = self.loop.env_steps
            try:
                kept = display_path(self._write_checkpoint(step))
            except Exception as other:  # it must not hide what went wrong first
                log.warning("the last good state cannot be saved: %s: %s", type(other).__name__, other)
                raise error from None
            raise with_note(error, f"(step {step}; the last good state is {kept})") from error
        self.engine.log_notices(wait=not self.config.asynchronous.enabled)  # busy workers are not waited for
        check_finite(iteration.metrics, self.loop.env_steps)
        return iteration

    def _watch(self, step: int, iteration: Iteration) -> str | None:
        """Look for signs of reward hacking; returns why to stop, if that is what the config wants."""
        if self.monitor is None or iteration.for_monitor is None:
            return None
        alarms = self.monitor.observe(step, iteration.for_monitor)
        self.alarms += log_alarms(alarms, step)
        if alarms and self.config.monitor.action == "stop":
            return f"alarm: {alarms[0].name}"
        return None

    def _refit(self, before: int, step: int, iteration: Iteration) -> dict[str, float]:
        """Keep frames for refits and refit when it is time; returns what is to be logged."""
        if self.refits is None:
            return {}
        self.refits.add(step, iteration)
        due = is_due(before, step, self.config.reward.refit_interval) and not self.interrupts.requested
        if due and self.refits.refit(step):
            self.renew_monitor()
            if self.config.reward.cache_verdicts:  # those of the model before hold no longer
                self.loop.reset(episode_seed(self.config.seed, step))
        return self.refits.metrics()

    def renew_monitor(self) -> None:
        """Watch for what the present model promises; counts start again, but that of alarms."""
        if self.monitor is not None and self.refits is not None and self.refits.count:
            raised = self.monitor.num_alarms
            self.monitor = self._make_monitor()
            self.loop.watches = self.monitor is not None
            assert self.monitor is not None
            self.monitor.num_alarms = raised

    def evaluate(
        self, episodes: int, num_films: int = 0, seed: int | None = None
    ) -> tuple[Evaluation, list[FilmedEpisode]]:
        """Measure the policy on fresh episodes; the result joins `evaluations`."""
        keys = () if self.rewards is None else self.rewards.facts.image_keys
        cameras = tuple(dict.fromkeys((*map(camera_behind, keys[:1]), *keys)))  # people see the whole picture
        result, films = evaluate(
            lambda obs: self.learner.act(obs, deterministic=True),
            self.config.env.eval,
            episodes=episodes,
            seed=self.config.seed + 1_000_003 if seed is None else seed,
            cameras=cameras,
            num_films=num_films if cameras else 0,
            env=self._eval_env,
        )
        if self._shares_env:  # their episodes were given up for the evaluation's
            self.loop.reset(episode_seed(self.config.seed, self.loop.env_steps))
        best = max((each.env_return for _, _, each in self.evaluations), default=-math.inf)
        self.evaluations.append((self.loop.env_steps, self.seconds, result))
        if self.config.learner.save_best and result.env_return > best:
            self._write_checkpoint(self.loop.env_steps, "best")
        return result, films

    def _last_evaluation(self) -> tuple[Evaluation, list[FilmedEpisode]]:
        """At the end of the run; one that has just been made is not made again, unless it is to be filmed."""
        if self.rewards is None and self.evaluations and self.evaluations[-1][0] == self.loop.env_steps:
            return self.evaluations[-1][2], []
        return self.evaluate(self.config.learner.eval_episodes, NUM_FILMS)

    def _save(self, step: int) -> Path:
        """Save everything, then begin new episodes, as a resumed run does."""
        folder = self._write_checkpoint(step)
        self.loop.reset(episode_seed(self.config.seed, step))
        return folder

    def _write_checkpoint(self, step: int, name: str | None = None) -> Path:
        return self.save(self.folder / "checkpoints" / (name or f"step_{step}"))

    def save(self, folder: Path) -> Path:
        """Save the policy and all that going on needs."""
        return save_run(self, folder)
