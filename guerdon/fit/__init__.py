"""Stage 2: fit reward models, calibrate them, measure their errors."""

from guerdon.fit.distributed import FSDPRewardWorker
from guerdon.fit.fit import FitJob, FitResult, fit_reward_model

__all__ = ["FSDPRewardWorker", "FitJob", "FitResult", "fit_reward_model"]
