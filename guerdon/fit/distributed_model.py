"""A model over the processes of a group: plain in one, a copy on every rank (DDP), or sharded (FSDP2).

What goes to disk and comes from it is always whole, so a checkpoint does not tell how many ranks wrote it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guerdon.config import FitConfig
from guerdon.core.errors import ConfigError
from guerdon.fit.process_group import ProcessGroup
from guerdon.rewards.image import RewardModel
from guerdon.rewards.image.encoders import BasicBlock, Bottleneck

Strategy: TypeAlias = Literal["simple", "ddp", "fsdp"]


def strategy_of(cfg: FitConfig, world_size: int) -> Strategy:
    """How a model is distributed over so many processes; refuses settings that contradict each other."""
    if world_size == 1:
        return "simple"  # there is nobody to share with
    if cfg.backend == "simple":
        raise ConfigError(
            f"fit.backend is simple, which is one process, but there are {world_size}: set it to ddp or fsdp"
        )
    if cfg.global_batch_size < world_size:
        raise ConfigError(
            f"fit.global_batch_size is {cfg.global_batch_size}: too few frames for {world_size} processes"
        )
    return "fsdp" if cfg.backend == "auto" else cfg.backend


class _Forward(nn.Module):
    """A model's way from its inputs to logits as one `forward`, which is what DDP and FSDP wrap."""

    def __init__(self, model: RewardModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, encoded: bool) -> Tensor:
        """Pixels of `preprocess`, or features if they are `encoded` already -> logits [n, M]."""
        return self.model.head(inputs if encoded else self.model.encode(inputs))


class DistributedModel:
    """The trainer's view of its model: forward passes, gradients of the global batch, whole state.

    After construction the model's weights are those of rank 0; its optimiser is made from its parameters
    only then, since FSDP replaces them by shards.
    """

    def __init__(
        self,
        model: RewardModel,
        strategy: Strategy,
        group: ProcessGroup,
        device: torch.device,
        precision: str,
    ) -> None:
        self.model, self._group, self._strategy = model, group, strategy
        self._device, self._precision = device, precision
        self._forward: nn.Module = _Forward(model)
        if strategy == "simple":
            return
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        use_synced_batch_norm(model, group.new_group())
        if strategy == "fsdp":
            self._shard()
        else:
            self._copy()

    def _copy(self) -> None:
        """Every rank has the whole model; buffers agree already, since BatchNorm sees all frames."""
        ddp: Any = nn.parallel.DistributedDataParallel
        is_new = "forward_sync_buffers" in inspect.signature(ddp).parameters
        option = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
        # About axes of length 1, whose strides mean nothing.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self._forward = ddp(self._forward, **option)

    def _shard(self) -> None:
        """Each residual block and each head is gathered on its own when it is needed."""
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError as error:
            raise ConfigError("fit.backend=fsdp needs torch 2.6 or newer; ddp works with this one") from error
        mesh = dist.device_mesh.init_device_mesh(self._device.type, (self._group.world_size,))
        for parameter in self.model.parameters():  # FSDP takes no other memory layout
            parameter.data = parameter.data.contiguous()
        parts = [m for m in self.model.modules() if isinstance(m, BasicBlock | Bottleneck)]
        for part in [*parts, *self.model.classifiers, self._forward]:
            fully_shard(part, mesh=mesh)

    def logits(self, inputs: Tensor, *, encoded: bool) -> Tensor:
        """Logits of all members, float32 [n, M]."""
        forward: Any = self._forward
        if self._strategy == "ddp" and not torch.is_grad_enabled():
            forward = forward.module  # the copy here is whole: no exchange is needed
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision != "fp32"):
            logits: Tensor = forward(inputs, encoded)
        return logits.float()

    @contextmanager
    def gradient_pass(self, last: bool) -> Iterator[None]:
        """One of the passes over a global batch; gradients are exchanged in the last one alone."""
        if self._strategy == "fsdp":
            self._forward.set_requires_gradient_sync(last)  # type: ignore[operator]
        with self._forward.no_sync() if self._strategy == "ddp" and not last else nullcontext():  # type: ignore[operator]
            yield

    def is_finite(self) -> bool:
        """Whether all weights are, on all ranks."""
        own = [each.to_local() if hasattr(each, "to_local") else each for each in self.model.parameters()]
        return all(self._group.all_gather(all(bool(torch.isfinite(each).all()) for each in own)))

    def weights(self) -> dict[str, Tensor]:
        """The whole weights on every rank; a collective call."""
        return {name: _whole(value) for name, value in self.model.state_dict().items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state as one process has it; a collective call."""
        state = optimizer.state_dict()
        whole = {
            number: {name: _whole(value) for name, value in entry.items()}
            for number, entry in state["state"].items()
        }
        return {**state, "state": whole}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take up what `optimizer_state` gave, here or in a group of another size."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = {
            number: {name: _like(value, parameters[number]) for name, value in entry.items()}
            for number, entry in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": entries})


def _whole(value: Any) -> Any:
    """A tensor put together from its shards; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _like(value: Any, parameter: Any) -> Any:
    """A whole tensor cut into shards as its parameter is; single numbers stay as they are."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if not hasattr(parameter, "device_mesh"):
        # In the parameter's memory layout too, which the fused optimiser takes for granted.
        return torch.empty_like(parameter).copy_(value)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


# BatchNorm over all ranks


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
