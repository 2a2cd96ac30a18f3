"""Advantages against a slow loop that follows each environment by itself."""

import pytest
import torch

from guerdon.agents.ppo import gae
from guerdon.core.errors import DataError


def rollout(steps: int = 40, envs: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    return {
        "training_rewards": normal(steps, envs),
        "values": normal(steps, envs),
        "terminated": torch.rand(steps, envs, generator=draw) < 0.1,
        "truncated": torch.rand(steps, envs, generator=draw) < 0.1,
        "final_values": normal(steps, envs),
        "last_values": normal(envs),
    }


def slow(parts: dict[str, torch.Tensor], gamma: float, lam: float) -> torch.Tensor:
    """Each advantage as the weighted sum of the errors from its step to the end of its episode."""
    rewards, values = parts["training_rewards"], parts["values"]
    steps, envs = rewards.shape
    advantages = torch.zeros(steps, envs, dtype=rewards.dtype)
    for env in range(envs):
        for start in range(steps):
            weight = 1.0
            for t in range(start, steps):
                if parts["terminated"][t, env]:
                    future = 0.0
                elif parts["truncated"][t, env]:
                    future = float(parts["final_values"][t, env])
                else:
                    after = parts["last_values"][env] if t + 1 == steps else values[t + 1, env]
                    future = float(after)
                error = float(rewards[t, env]) + gamma * future - float(values[t, env])
                advantages[start, env] += weight * error
                if parts["terminated"][t, env] or parts["truncated"][t, env]:
                    break
                weight *= gamma * lam
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_slow_loop(gamma: float, lam: float, seed: int):
    parts = rollout(seed=seed)
    assert (parts["terminated"] & parts["truncated"]).any()  # both at once is among the cases
    advantages, returns = gae(**parts, gamma=gamma, lam=lam)
    expected = slow(parts, gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=0.0, atol=1e-10)
    torch.testing.assert_close(returns, expected + parts["values"], rtol=0.0, atol=1e-10)


def test_a_constant_reward_is_worth_its_geometric_series():
    """With the true values given, nothing is an advantage: 1 + gamma + gamma^2 + ... = 1 / (1 - gamma)."""
    shape, gamma = (30, 3), 0.9
    worth = torch.full(shape, 1.0 / (1.0 - gamma), dtype=torch.float64)
    truncated = torch.zeros(shape, dtype=torch.bool)
    truncated[9, 1] = truncated[29, 2] = True
    advantages, returns = gae(
        torch.ones(shape, dtype=torch.float64),
        worth,
        torch.zeros(shape, dtype=torch.bool),
        truncated,
        worth,
        worth[0],
        gamma,
        0.95,
    )
    assert advantages.abs().max() < 1e-12
    assert (returns - worth).abs().max() < 1e-12


@pytest.mark.parametrize("ended", ["terminated", "truncated"])
def test_nothing_leaks_over_the_end_of_an_episode(ended: str):
    parts = rollout(steps=20, envs=2)
    for name in ("terminated", "truncated"):
        parts[name] = torch.zeros(20, 2, dtype=torch.bool)
    parts[ended][9, 0] = True
    before, _ = gae(**parts, gamma=0.99, lam=0.95)
    parts["training_rewards"][10:] += 100.0
    parts["values"][10:] -= 50.0
    parts["last_values"] += 100.0
    after, _ = gae(**parts, gamma=0.99, lam=0.95)
    assert torch.equal(before[:10, 0], after[:10, 0])
    assert (before[:10, 1] - after[:10, 1]).abs().min() > 1.0  # the other environment's episode goes on


def test_only_truncation_asks_for_the_final_value():
    parts = rollout()
    before, _ = gae(**parts, gamma=0.99, lam=0.95)
    unused = ~parts["truncated"] | parts["terminated"]
    parts["final_values"] = parts["final_values"].masked_fill(unused, float("nan"))
    after, _ = gae(**parts, gamma=0.99, lam=0.95)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("training_rewards", torch.zeros(40), "training_rewards must be"),
        ("values", torch.zeros(39, 7), "values must have shape"),
        ("last_values", torch.zeros(6), "last_values must have shape"),
        ("terminated", torch.zeros(40, 7), "terminated must be bool"),
    ],
)
def test_wrong_shapes_are_refused(name: str, value: torch.Tensor, complaint: str):
    with pytest.raises(DataError, match=complaint):
        gae(**{**rollout(), name: value}, gamma=0.99, lam=0.95)
