"""Stage 2: fit reward models, calibrate them, measure their errors."""

from guerdon.fit.fit import FitResult, fit_reward_model

__all__ = ["FitResult", "fit_reward_model"]
