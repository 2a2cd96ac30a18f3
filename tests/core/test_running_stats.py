"""Running statistics are those of all numbers together, wherever they are kept."""

import numpy as np
import torch

from guerdon.core.running_stats import Moments, Statistics


def moments(values: np.ndarray) -> Moments:
    mean = values.mean(0)
    return Moments(len(values), mean, ((values - mean) ** 2).sum(0))


def test_merged_moments_are_those_of_both_sets():
    rng = np.random.default_rng(0)
    parts = [rng.normal(5.0 * number, 1.0 + number, (3 + 4 * number, 2)) for number in range(4)]
    merged = Moments(0.0, np.zeros(2), np.zeros(2))
    for part in parts:
        merged = merged.merged(moments(part))
    for mine, expected in zip(merged, moments(np.concatenate(parts)), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12)


def test_statistics_centre_and_scale_by_all_they_have_seen():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(50, 3, generator=generator) * 4.0 + shift for shift in (0.0, 10.0, -3.0)]
    norm = Statistics((3,))
    for part in parts:
        norm.update(part)
    seen = torch.cat(parts).double()
    expected = (parts[0] - seen.mean(0)) / seen.std(0, correction=0)
    torch.testing.assert_close(norm.normalized(parts[0]), expected.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.normalized(torch.full((1, 3), 1e9)), torch.full((1, 3), 10.0))
