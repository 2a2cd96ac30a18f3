"""One step of Adam (Kingma and Ba, 2015) by torch's fused kernel, for weights that no module holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam

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
    adam(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(steps),
        fused=True,
        lr=lr,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
