"""Whole runs with gradients written out by hand, against autograd: is it worth having?

    python -m benchmarks.bench_manual_gradients [--rounds 3]

RND and ICM are the models of the zoo whose networks are small enough for autograd's bookkeeping to show. The
manual gradients below put it aside and reuse memory. They stay out of the package as long as no whole run
gains `TARGET` times. Both versions take turns; seconds are those of the process on one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from benchmarks.report import Result, report
from guerdon.config.load import load_serial
from guerdon.rewards.zoo.icm import Curiosity
from guerdon.rewards.zoo.networks import Distillation, RewardNetwork
from guerdon.training.serial import serial_pipeline_reward_model

RUNS = {"cartpole_rnd": 16_384, "cartpole_icm": 16_384, "deep_sea_rnd": 4_000, "deep_sea_icm": 4_000}
"""Config -> environment steps."""
TARGET = 1.3


class Pass:
    """One use of a ReLU perceptron in a loss: forward, then backward, in arrays that are kept."""

    def __init__(self, perceptron: nn.Sequential) -> None:
        self._layers = [each for each in perceptron if isinstance(each, nn.Linear)]
        self._values: list[Tensor] = []
        self._before: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, in] -> [N, out], valid until the next call."""
        if not self._values or len(self._values[0]) != len(inputs):
            widths = [each.out_features for each in self._layers]
            self._values = [inputs, *(inputs.new_empty(len(inputs), width) for width in widths)]
            self._before = [inputs.new_empty(len(inputs), width) for width in widths[:-1]]
        self._values[0] = inputs
        for number, (values, made) in enumerate(pairwise(self._values)):
            layer = self._layers[number]
            torch.addmm(layer.bias.detach(), values, layer.weight.detach().T, out=made)
            if number < len(self._before):
                made.relu_()
        return self._values[-1]

    def backward(self, gradient: Tensor, *, add: bool = False, inputs: Tensor | None = None) -> None:
        """Write the weights' gradients, or add to them; `inputs` takes the gradient of its columns."""
        for number in reversed(range(len(self._layers))):
            values, layer = self._values[number], self._layers[number]
            for weight in (layer.weight, layer.bias):
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            assert layer.weight.grad is not None and layer.bias.grad is not None
            if add:
                layer.weight.grad.addmm_(gradient.T, values)
                layer.bias.grad.add_(gradient.sum(0))
            else:
                torch.mm(gradient.T, values, out=layer.weight.grad)
                torch.sum(gradient, 0, out=layer.bias.grad)
            if number:
                gradient = torch.mm(gradient, layer.weight.detach(), out=self._before[number - 1])
                torch.ops.aten.threshold_backward.grad_input(gradient, values, 0.0, grad_input=gradient)
        if inputs is not None:
            inputs.addmm_(gradient, self._layers[0].weight.detach()[:, : inputs.shape[1]])


_PASSES: WeakKeyDictionary[nn.Module, tuple[Pass, ...]] = WeakKeyDictionary()


def passes(network: nn.Module, *perceptrons: nn.Sequential) -> tuple[Pass, ...]:
    """Those of a network, made once."""
    if network not in _PASSES:
        _PASSES[network] = tuple(map(Pass, perceptrons))
    return _PASSES[network]


@torch.no_grad()
def distillation_gradients(network: Any, features: Tensor) -> Tensor:
    """Of `Distillation.learn`."""
    predictor, target = passes(network, network.predictor, network.target)
    errors = predictor.forward(features).sub_(target.forward(features))
    loss = torch.dot(errors.view(-1), errors.view(-1)) / errors.numel()
    predictor.backward(errors.mul_(2.0 / errors.numel()))
    return loss


@torch.no_grad()
def curiosity_gradients(network: Any, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
    """Of `Curiosity.learn`, discrete actions one-hot."""
    count, share = len(obs), network.forward_share
    first, second, inverse, ahead = passes(
        network, network.encoder, network.encoder, network.inverse, network.ahead
    )
    phi, next_phi = first.forward(obs), second.forward(next_obs)
    missed = ahead.forward(torch.cat([phi, actions], 1)).sub_(next_phi)
    ahead_loss = torch.dot(missed.view(-1), missed.view(-1)) * (0.5 / count)
    missed.mul_(share / count)
    of_both = torch.cat([torch.zeros_like(phi), -missed], 1)
    of_phi, of_next_phi = of_both.chunk(2, 1)
    ahead.backward(missed, inputs=of_phi)
    logs = torch.log_softmax(inverse.forward(torch.cat([phi, next_phi], 1)), 1)
    inverse_loss = (logs * actions).sum() / -count
    inverse.backward(logs.exp_().sub_(actions).mul_((1.0 - share) / count), inputs=of_both)
    first.backward(of_phi)
    second.backward(of_next_phi, add=True)
    network.losses = {"inverse_loss": inverse_loss, "forward_loss": ahead_loss}
    loss: Tensor = (1.0 - share) * inverse_loss + share * ahead_loss
    return loss


def seconds_of(name: str, steps: int, manual: bool) -> float:
    """Processor time of a run."""
    with (
        mock.patch.object(
            Distillation, "gradients", distillation_gradients if manual else RewardNetwork.gradients
        ),
        mock.patch.object(Curiosity, "gradients", curiosity_gradients if manual else RewardNetwork.gradients),
    ):
        begin = time.process_time()
        cfg = load_serial(name, ["output_dir=null", "stop_value=null"])
        serial_pipeline_reward_model(cfg, seed=0, max_env_step=steps)
        return time.process_time() - begin


def main() -> int:
    """Measure all runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    for name, steps in RUNS.items():
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * given.rounds):
            taken[number % 2 == 0].append(seconds_of(name, steps, number % 2 == 0))
        manual, autograd = (statistics.median(taken[each]) for each in (True, False))
        print(f"   {name}: {autograd:.2f} s with autograd, {manual:.2f} s by hand", flush=True)
        results.append(
            Result(
                what=f"{name}: autograd's seconds over manual",
                value=autograd / manual,
                target=TARGET,
                at_least=False,
            )
        )
    return report("bench_manual_gradients", {"rounds": given.rounds, **RUNS}, results)


if __name__ == "__main__":
    sys.exit(main())
