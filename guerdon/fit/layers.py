"""Layers that look at a whole batch or draw random numbers, made independent of the number of processes.

Everything random in a step belongs to a frame's position in the global batch, not to a process or a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guerdon.data.datasets.sampling import Share


@dataclass
class BatchRandom:
    """What the random numbers of an optimiser step follow from; the trainer advances it."""

    seed: int
    step: int = 0
    share: Share = field(default_factory=lambda: Share.of(np.zeros(0, np.int64)))

    def generator(self, *purpose: int) -> torch.Generator:
        """Random numbers for the step's whole global batch, the same on every rank."""
        sequence = np.random.SeedSequence([self.seed, self.step, *purpose])
        return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))


class FrameDropout(nn.Module):
    """Dropout whose mask is drawn for the whole global batch, of which this pass takes its rows."""

    def __init__(self, p: float, random: BatchRandom, number: int) -> None:
        super().__init__()
        self.p, self._random, self._number = p, random, number

    def forward(self, x: Tensor) -> Tensor:
        """[n, D] -> [n, D]."""
        if not self.training:
            return x
        share = self._random.share
        generator = self._random.generator(1, self._number)
        mask = torch.empty(share.total, *x.shape[1:]).bernoulli_(1 - self.p, generator=generator)
        return x * (mask[torch.from_numpy(share.positions)] / (1 - self.p)).to(x)


class SyncedBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the frames of all ranks. torch's own (`SyncBatchNorm`) refuses to run on a CPU."""

    group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[n, C, H, W] -> the same; n may be 0 on a rank that has no frame of the last batch."""
        if not self.training:
            return super().forward(x)
        y, mean, var, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self.group)  # type: ignore[no-untyped-call]
        if self.running_mean is not None and self.running_var is not None:
            momentum = self.momentum
            assert momentum is not None  # no encoder asks for a plain average over time
            with torch.no_grad():
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(var * (count / (count - 1).clamp(min=1)), momentum)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
        result: Tensor = y
        return result


class _Normalise(torch.autograd.Function):
    """Normalisation by the mean and variance of all ranks' values, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        values, channels = x.to(dtype), x.shape[1]
        own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        own[-1] = number = values.numel() // channels
        if number:
            shift = values.mean((0, 2, 3))
            centred = values - shift[:, None, None]
            first, second = _sums(centred, centred)
            own[:channels] = shift + first / number
            own[channels:-1] = second / number - (first / number).square()
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, own, group=group)
        means, variances, counts = torch.split(torch.stack(everyone), [channels, channels, 1], dim=1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        var = ((variances + (means - mean).square()) * counts).sum(0) / count
        scale = torch.rsqrt(var + eps).to(dtype)
        normal = (values - mean.to(dtype)[:, None, None]) * scale[:, None, None]
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.group, ctx.dtype = group, x.dtype
        y = torch.addcmul(bias.to(dtype)[:, None, None], normal, weight.to(dtype)[:, None, None])
        statistics = mean.to(dtype), var.to(dtype), count.to(dtype)
        ctx.mark_non_differentiable(*statistics)
        return y.to(x.dtype), *statistics

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        grad = gradients[0].to(normal.dtype)
        own = _sums(grad, normal)
        sums = own.clone()
        dist.all_reduce(sums, group=ctx.group)
        shared = (sums / count).to(normal.dtype)
        inner = grad - shared[0][:, None, None] - normal * shared[1][:, None, None]
        of_x = inner * (weight.to(normal.dtype) * scale)[:, None, None]
        of_bias, of_weight = own.to(weight.dtype)
        return of_x.to(ctx.dtype), of_weight, of_bias, None, None


def _sums(x: Tensor, y: Tensor) -> Tensor:
    """Sums of `x` and of `x * y` ([n, C, H, W]) over all but the channels, in double precision -> [2, C].

    As torch's own BatchNorm has them on a CPU: where a channel hardly varies, the last digits decide.
    """
    axes = (0, 2, 3)
    return torch.stack([x.sum(axes, dtype=torch.float64), (x * y).sum(axes, dtype=torch.float64)])


def use_frame_dropout(model: nn.Module, random: BatchRandom) -> None:
    """Let every dropout of `model` draw for the global batch."""
    number = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout) and child.p > 0:
                setattr(parent, name, FrameDropout(child.p, random, number).train(child.training))
                number += 1


def use_synced_batch_norm(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Let every BatchNorm of `model` that is trained see the frames of all ranks; returns how many do."""
    count = 0
    for module in model.modules():
        if type(module) is nn.BatchNorm2d and trains_batch_norm(module):
            module.__class__ = SyncedBatchNorm  # the same weights, statistics and names; another forward
            vars(module)["group"] = group
            count += 1
    return count


def trains_batch_norm(model: nn.Module) -> bool:
    """Whether any BatchNorm takes its statistics from the training batches."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.affine
        and bool(module.weight.requires_grad)
        for module in model.modules()
    )
