"""A fit as a run: here, under `torchrun` or on Ray, with everything about it in the run's folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from guerdon.config import GuerdonConfig
from guerdon.config.unused import log_without_effect
from guerdon.core.errors import RunInterrupted
from guerdon.core.interrupts import Interrupts, also_ask
from guerdon.fit import FitResult
from guerdon.fit.distributed import run_job, torchrun_group
from guerdon.fit.fit import FitJob
from guerdon.rewards.image.hf_files import absolute_encoder
from guerdon.training.folders import run_folder, write_config, write_summary
from guerdon.training.trackers import Trackers, require_trackers

STOP = ".stop"
"""A file in a run's folder that asks the actors of a fit to save and stop."""


def train_reward(config: GuerdonConfig) -> tuple[Path, FitResult]:
    """Fit as the config says; leaves config, metrics, checkpoints and `summary.json` in the run's folder."""
    log_without_effect(config)
    require_trackers(config.runner.logger.backends)
    if config.engine == "ray":
        with ExitStack() as stack:
            folder, trackers = _begin(config, stack)
            result = _fit_on_ray(config, _job(config, folder.resolve()))
            _end(folder, result, trackers)
            return folder, result
    with torchrun_group(config.fit) as group, ExitStack() as stack:
        begun: list[Trackers] = []  # on rank 0

        def begin() -> Path:
            place, trackers = _begin(config, stack)
            begun.append(trackers)
            return place

        folder = group.on_main(begin)
        result = run_job(_job(config, folder), group)
        for trackers in begun:
            _end(folder, result, trackers)
    return folder, result


def _begin(config: GuerdonConfig, stack: ExitStack) -> tuple[Path, Trackers]:
    """The run's folder with `config.yaml`, and the trackers that follow it, until `stack` closes."""
    folder = stack.enter_context(run_folder(config))
    write_config(folder, config)
    return folder, stack.enter_context(Trackers(config, folder))


def _end(folder: Path, result: FitResult, trackers: Trackers) -> None:
    """Leave `summary.json`, and let the trackers have everything."""
    write_summary(folder, result.to_dict())
    trackers.finish()


def _job(config: GuerdonConfig, folder: Path) -> FitJob:
    resume = config.runner.resume_dir
    return FitJob(
        model=config.reward.model,
        cfg=config.fit,
        folder=folder,
        seed=config.seed,
        resume_dir=None if resume is None else Path(resume),
        tensorboard="tensorboard" in config.runner.logger.backends,
    )


def _fit_on_ray(config: GuerdonConfig, job: FitJob) -> FitResult:
    """Every process of the fit in an actor of its own; folder and data must be readable by all."""
    from guerdon.distributed.launch import launch_ranks  # Ray is an extra

    count = config.fit.distributed.num_processes
    threads = max(1, torch.get_num_threads() // count)
    stop = job.folder / STOP
    stop.unlink(missing_ok=True)
    try:
        with Interrupts(tell=stop.touch) as interrupts, interrupts.deferred():
            results = launch_ranks(_rank, count, _placeable(job), cluster=config.cluster, threads=threads)
    finally:
        stop.unlink(missing_ok=True)
    first: FitResult | RunInterrupted = results[0]
    if isinstance(first, RunInterrupted):
        raise first
    return first


def _rank(job: FitJob) -> FitResult | RunInterrupted:
    """One process of a fit on Ray; Ctrl-C reaches it through a file in the run's folder."""
    also_ask((job.folder / STOP).exists)
    try:
        return run_job(job)
    except RunInterrupted as stopped:  # a result like any other: Ray would end the actor
        return stopped


def _placeable(job: FitJob) -> FitJob:
    """The same job with paths that mean the same in a process that was started elsewhere."""

    def absolute(section: Any, *names: str) -> dict[str, Any]:
        paths = {name: getattr(section, name) for name in names}
        return {name: str(Path(path).resolve()) for name, path in paths.items() if path is not None}

    folders = absolute(job.cfg.data, "path", "positive_dir", "negative_dir", "debug_save_dir")
    cfg = replace(
        job.cfg, data=replace(job.cfg.data, **folders), **absolute(job.cfg, "save_dir", "export_path")
    )
    encoder = absolute_encoder(job.model.encoder)
    model = replace(job.model, encoder=encoder, **absolute(job.model, "pretrained_encoder_path"))
    resume = None if job.resume_dir is None else job.resume_dir.resolve()
    return replace(job, cfg=cfg, resume_dir=resume, model=model)
