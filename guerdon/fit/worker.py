"""`FSDPRewardWorker`: one process of a sharded fit, as the documents name it."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Self

from guerdon.core.errors import ConfigError
from guerdon.fit.fit import FitJob, FitResult, Fitting
from guerdon.fit.team import Team


class FSDPRewardWorker:
    """Fits a reward model together with workers of its kind. A plain class; engines decide where it lives.

    Every rank calls the same methods in the same order; rank 0 decides and writes. With `world_size` 1 it is
    the trainer in this process, and needs no address.
    """

    def __init__(
        self,
        job: FitJob,
        *,
        rank: int = 0,
        world_size: int = 1,
        address: str | None = None,
        port: int | None = None,
        hosted: bool = False,
    ) -> None:
        """Remember the settings; `init_worker` meets the others.

        Args:
            job: what to fit, the same on every rank.
            rank: of this worker, from 0.
            world_size: how many there are.
            address: of the machine where rank 0 is; None: as `torchrun` says.
            port: a free one on that machine.
            hosted: somebody else has opened that port as a `torch.distributed.TCPStore`; otherwise rank 0
                does.
        """
        self.job, self.rank, self.world_size = job, rank, world_size
        self._address, self._port, self._hosted = address, port, hosted
        self._team: Team | None = None
        self._fitting: Fitting | None = None

    def init_worker(self) -> None:
        """Meet the other workers, open the data, build the model and go to `resume_dir`'s step."""
        section = self.job.cfg.distributed
        self._team = Team.join(
            self.rank,
            self.world_size,
            address=self._address,
            port=self._port,
            hosted=self._hosted,
            communication=section.communication,
            timeout_seconds=section.timeout_seconds,
        )
        try:
            self._fitting = Fitting(self.job, self._team)
        except BaseException:  # Ctrl-C too: the others must not wait for this one
            self.close()
            raise

    def fit(self) -> FitResult:
        """Train, calibrate, save; the same result on every rank."""
        return self.fitting.run()

    def save_checkpoint(self, path: Path | str, step: int) -> Path:
        """Save the training state as `path/step_{step}/checkpoint.pt`, whole; returns that folder.

        Every rank must call it. Any number of workers, or one process, can go on from it.
        """
        target = Path(path) / f"step_{step}"
        self.fitting.trainer.start()
        self.fitting.trainer.save(target / "checkpoint.pt")
        return target

    def close(self) -> None:
        """Leave the others and remove temporary files."""
        if self._fitting is not None:
            self._fitting.__exit__()
            self._fitting = None
        if self._team is not None:
            self._team.leave()
            self._team = None

    def __enter__(self) -> Self:
        self.init_worker()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fitting(self) -> Fitting:
        """This worker's part in the fit."""
        if self._fitting is None:
            raise ConfigError("the reward worker is not in a fit yet: call init_worker() first")
        return self._fitting
