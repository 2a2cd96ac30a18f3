"""SAC's options for learning from demonstrations: a pull to the cloned policy, a mean policy, slow starts."""

import math

import numpy as np
import pytest
import torch

from guerdon.agents.policies import draw
from guerdon.agents.sac import SAC
from guerdon.config import SACConfig
from guerdon.core.errors import ConfigError, DataError
from tests.agents.test_sac import SMALL, SPACE, SPEC, make_batch, plain_forward

PULLED = SACConfig(
    bc_towards="cloned_policy",
    bc_coef=8.0,
    bc_coef_end=2.0,
    bc_decay_updates=100,
    bc_scaled=True,
    num_critic_only_updates=2,
    actor_every=2,
    actor_ema=0.9,
    initial_log_std=-1.0,
    initial_alpha=0.3,
)


def moved(sac: SAC, seed: int) -> SAC:
    """Its policy somewhere else, as if it had learned."""
    sac.actor.flat.add_(
        0.3 * torch.randn(sac.actor.flat.shape, generator=torch.Generator().manual_seed(seed))
    )
    return sac


def cloned(cfg: SACConfig = PULLED, seed: int = 0) -> SAC:
    """With a policy that has moved on from the cloned one."""
    sac = moved(SAC(SPEC, SPACE, cfg, SMALL, seed=seed), 1)
    sac.keep_reference()
    return moved(sac, 2)


def test_the_pull_to_the_cloned_policy_is_part_of_the_loss():
    sac, batch = cloned(), make_batch()
    sac.num_updates = 52  # half of the way after the critics' own start
    state = batch.obs["state"]
    reference = torch.tanh(plain_forward(sac.actor, sac.reference[1].flat, state, SMALL)[0][:, :2])
    flat, start = sac.actor.flat.clone().requires_grad_(True), sac._noise.get_state()
    goal = sac._goal(batch, state, torch.zeros(32, 2), prior_rows=5)
    assert goal.shape == (32, 2)  # in all rows, whatever was demonstrated
    metrics = sac._update_actor(state, draw(sac.actor(state)[0], sac._noise), goal)

    noise = torch.randn((32, 2), generator=sac._noise.set_state(start))
    mean, log_std = plain_forward(sac.actor, flat, state, SMALL)[0].chunk(2, -1)
    before = mean + noise * log_std.exp()
    squeezed = 2.0 * (math.log(2.0) - before - torch.nn.functional.softplus(-2.0 * before))
    log_density = torch.distributions.Normal(mean, log_std.exp()).log_prob(before) - squeezed
    inputs = torch.cat([state, torch.tanh(before)], 1)
    values = plain_forward(sac.critics, sac.critics.flat, inputs, SMALL)[..., 0].amin(0)
    loss = (0.3 * log_density.sum(-1) - values).mean()
    pull = (torch.tanh(mean) - reference).square().mean()
    weight = 5.0 * values.abs().mean().detach()
    (loss + weight * pull).backward()
    torch.testing.assert_close(sac.actor.gradient, flat.grad, rtol=1e-3, atol=1e-5)
    assert metrics["bc_loss"] == pytest.approx(pull.item(), rel=1e-3)
    assert metrics["bc_coef"] == pytest.approx(weight.item(), rel=1e-3)


def test_the_weight_of_the_pull_changes_in_a_straight_line_and_stays():
    sac = cloned()
    weights = []
    for updates in (0, 2, 27, 102, 5_000):
        sac.num_updates = updates
        weights.append(sac._bc_coef())
    assert weights == pytest.approx([8.0, 8.0, 6.5, 2.0, 2.0])
    steady = SAC(SPEC, SPACE, SACConfig(bc_coef=3.0), SMALL, seed=0)
    steady.num_updates = 5_000
    assert steady._bc_coef() == 3.0


def test_a_strong_pull_brings_the_policy_back_and_none_does_not():
    batch, obs = make_batch(), make_batch().obs["state"].numpy()
    distances = {}
    for coef in (0.0, 1_000.0):
        cfg = SACConfig(bc_towards="cloned_policy", bc_coef=coef, actor_lr=1e-2)
        sac = SAC(SPEC, SPACE, cfg, SMALL, seed=0)
        sac.keep_reference()
        wanted = sac.act(obs, deterministic=True)
        moved(sac, 2)
        for _ in range(150):
            sac.update(batch)
        distances[coef] = np.abs(sac.act(obs, deterministic=True) - wanted).mean()
    assert distances[1_000.0] < 0.1 and distances[0.0] > 5 * distances[1_000.0]


def test_a_pull_to_a_policy_that_was_never_cloned_is_refused():
    sac = SAC(SPEC, SPACE, SACConfig(bc_towards="cloned_policy", bc_coef=1.0), SMALL, seed=0)
    for attempt in (sac.check_reference, lambda: sac.update(make_batch())):
        with pytest.raises(ConfigError, match=r"no policy was cloned.*learner\.warm_start\.data"):
            attempt()
    sac.keep_reference()
    sac.check_reference()
    assert sac.update(make_batch())["bc_loss"] == 0.0
    with pytest.raises(ConfigError, match="would never change"):
        SAC(SPEC, SPACE, SACConfig(actor_ema=1.0), SMALL, seed=0)


def test_the_mean_policy_follows_and_acts_when_no_noise_is_wanted():
    sac = SAC(SPEC, SPACE, SACConfig(actor_ema=0.9, actor_lr=1e-2), SMALL, seed=0)
    expected = sac.actor.flat.clone()
    for step in range(5):
        sac.update(make_batch(seed=step))
        expected = 0.9 * expected + 0.1 * sac.actor.flat
    torch.testing.assert_close(sac.mean_actor.flat, expected)
    obs = make_batch().obs["state"].numpy()
    steady = sac.act(obs, deterministic=True)
    sac._act_noise.manual_seed(0)
    noisy = sac.act(obs)
    copied = SAC(SPEC, SPACE, SACConfig(actor_ema=0.9), SMALL, seed=5)
    copied.load_policy(sac.policy_state())
    assert np.array_equal(copied.act(obs, deterministic=True), steady)
    sac.mean_actor.flat.copy_(sac.actor.flat)
    sac._act_noise.manual_seed(0)
    assert not np.array_equal(sac.act(obs, deterministic=True), steady)
    assert np.array_equal(sac.act(obs), noisy)


def test_the_mean_policy_is_the_cloned_one_after_cloning():
    sac, batch = SAC(SPEC, SPACE, SACConfig(actor_ema=0.999), SMALL, seed=0), make_batch()
    before = sac.actor.flat.clone()
    sac.imitate(batch.obs, batch.actions, lr=0.0)
    assert torch.equal(sac.actor.flat, before)
    for _ in range(3):
        sac.imitate(batch.obs, batch.actions, lr=0.1)
    assert (sac.actor.flat - before).abs().max() > 0.05
    assert torch.equal(sac.actor.flat, sac.mean_actor.flat)


def test_the_critics_learn_first():
    sac = SAC(SPEC, SPACE, SACConfig(num_critic_only_updates=3, actor_every=2), SMALL, seed=0)
    for step in range(8):
        actor, critics, alpha = sac.actor.flat.clone(), sac.critics.flat.clone(), sac.log_alpha.clone()
        sac.update(make_batch(seed=step))
        still = step not in (3, 5, 7)
        assert torch.equal(sac.actor.flat, actor) == torch.equal(sac.log_alpha, alpha) == still
        assert not torch.equal(sac.critics.flat, critics)


def test_the_deviation_to_start_with():
    obs = np.zeros((4_000, 5), np.float32)
    for wanted in (0.0, -2.0):
        sac = SAC(SPEC, SPACE, SACConfig(initial_log_std=wanted), SMALL, seed=0)
        unit = (sac.act(obs) - sac._middle.numpy()) / sac._half.numpy()
        assert np.log(np.arctanh(np.clip(unit, -0.9999, 0.9999)).std()) == pytest.approx(wanted, abs=0.1)


def test_exact_continuation_with_all_options():
    first, second = cloned(seed=0), SAC(SPEC, SPACE, PULLED, SMALL, seed=1)
    for step in range(5):
        first.update(make_batch(seed=step), prior_rows=8)
    second.load_state_dict(first.state_dict())
    obs = make_batch().obs["state"].numpy()
    for step in range(5, 9):
        batch = make_batch(seed=step)
        assert first.update(batch, prior_rows=8) == second.update(batch, prior_rows=8)
        assert np.array_equal(first.act(obs, deterministic=True), second.act(obs, deterministic=True))
    assert torch.equal(first.mean_actor.flat, second.mean_actor.flat)
    assert torch.equal(first.reference[1].flat, second.reference[1].flat)
    without = SAC(SPEC, SPACE, SACConfig(), SMALL, seed=1)
    with pytest.raises(DataError, match="a state of SAC has"):
        without.load_state_dict(first.state_dict())


def test_the_first_step_after_cloning_is_not_measured_by_the_small_gradients_of_cloning():
    cfg = SACConfig(bc_coef=16.0, bc_towards="cloned_policy", actor_lr=1e-3, critic_lr=1e-2)
    sac, batch = SAC(SPEC, SPACE, cfg, SMALL, seed=0), make_batch()
    for _ in range(500):
        sac.imitate(batch.obs, batch.actions)
    sac.keep_reference()
    before = sac.actor.flat.clone()
    for number in range(1, 4):  # a step of Adam's is about its rate, whatever the gradients
        sac.update(batch)
        assert (sac.actor.flat - before).abs().max() <= 1.1 * number * cfg.actor_lr
