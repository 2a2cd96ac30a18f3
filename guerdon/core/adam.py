"""The one call of torch's fused kernel for Adam (Kingma and Ba, 2015), without the wrapping around it.

For networks of a few hundred thousand weights what an optimiser does around its kernel takes longer than it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.999)
"""Decay of the running means of gradients and of their squares."""
EPS = 1e-8


@torch.no_grad()
def fused_adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    eps: float = EPS,
) -> None:
    """One step along the gradients; weights, moments and `steps`, tensors without axes, are changed."""
    torch._foreach_add_(list(steps), 1)
    torch._fused_adam_(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(steps),
        lr=lr,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
