"""Runs that learn from demonstrations: how they start, go on after a stop, and what they reach."""

import pytest
import torch

from guerdon.agents.cloning import imitate
from guerdon.cli.train import train
from guerdon.config import BCConfig, load_config
from guerdon.core.errors import ConfigError
from guerdon.training.checkpoints import load_policy
from guerdon.training.trainer import EmbodiedRunner
from tests.training.short_runs import SAC, demonstrate, lines, make_runner, without_times

START = "learner.sac.num_critic_only_updates=40"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A few episodes of the expert."""
    return demonstrate(tmp_path_factory.mktemp("shown") / "data", episodes=5)


def options(shown) -> list[str]:
    """Everything that a run can do with demonstrations."""
    return [
        *SAC,
        START,
        f"learner.warm_start.data={shown}",
        "learner.warm_start.epochs=2",
        f"learner.sac.prior_data={shown}",
        "learner.sac.bc_towards=cloned_policy",
        "learner.sac.bc_coef=8",
        "learner.sac.bc_coef_end=2",
        "learner.sac.bc_scaled=true",
        "learner.sac.actor_ema=0.99",
        "learner.sac.actor_every=2",
    ]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param([], id="in turn"),
        pytest.param(["asynchronous.enabled=true"], id="side by side", marks=pytest.mark.slow),
    ],
)
def test_the_critics_start_when_learning_does(settings, finished, tmp_path, mode):
    without = load_policy(finished("sac")[0]).learner.num_updates  # in either mode, see test_asynchronous.py
    runner = make_runner(settings, tmp_path, [*SAC, *mode, START])
    runner.run()
    assert runner.learner.num_updates == without + 40 and without > 40


@pytest.mark.slow
def test_a_resumed_run_with_all_options_gives_the_same_curve(settings, tmp_path, shown):
    more = [*settings, *options(shown)]
    folder, _ = train(load_config("train", more))
    first = min(int(item.name[5:]) for item in (folder / "checkpoints").iterdir())
    place = [f"runner.logger.log_path={tmp_path / 'resumed'}", "runner.resume_dir="]
    place[1] += str(folder / "checkpoints" / f"step_{first}")
    other, _ = train(load_config("train", [*more, *place]))
    expected = [without_times(entry) for entry in lines(folder) if entry["step"] > first]
    assert [without_times(entry) for entry in lines(other)] == expected and len(expected) >= 2
    assert any("train/bc_coef" in entry for entry in expected)  # the policy's metrics are not lost between


def test_a_pull_to_a_policy_that_nobody_cloned_is_refused_at_once(settings, tmp_path):
    more = ["learner.sac.bc_towards=cloned_policy", "learner.sac.bc_coef=1"]
    runner = make_runner(settings, tmp_path, [*SAC, *more])
    with pytest.raises(ConfigError, match=r"no policy was cloned.*learner\.warm_start\.data"):
        runner.run()
    assert runner.loop.env_steps == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_gets_further_than_cloning_on_a_sparse_reward(tmp_path):
    torch.set_num_threads(1)
    shown = demonstrate(tmp_path / "shown", episodes=20)
    settings = [
        "+learner=rlpd",
        f"learner.warm_start.data={shown}",
        "learner.warm_start.batch_size=128",
        "learner.warm_start.epochs=60",
        f"learner.sac.prior_data={shown}",
        "learner.network.hidden=[128,128]",
        "learner.sac.bc_coef=16",
        "learner.sac.bc_coef_end=4",
        "learner.sac.bc_decay_updates=12_000",
        "learner.sac.actor_ema=0.995",
        "learner.sac.num_critic_only_updates=2_000",
        "learner.sac.learning_starts=2_000",
        "learner.total_steps=16_384",
        "learner.eval_interval=1_536",
        "learner.stop_return=33",  # with 83% of successes; cloning alone has 26
        "learner.eval_episodes=200",
        "env.train.num_envs=8",
        "env.train.init_params.reward=sparse",
        "env.eval.num_envs=100",
        "runner.logger.backends=[]",
    ]
    (tmp_path / "run").mkdir()
    summary = EmbodiedRunner(load_config("train", settings), tmp_path / "run").run()
    evaluations = [entry for entry in lines(tmp_path / "run") if "eval/success_once" in entry]
    assert evaluations[0]["step"] == 1_536  # nothing has been learned yet
    cloned = evaluations[0]["eval/success_at_end"]
    assert 0.3 < cloned < 0.7
    assert summary["success_rate"] >= max(0.75, cloned + 0.15)
    assert evaluations[-1]["eval/success_at_end"] >= max(0.75, cloned + 0.15)


@pytest.mark.parametrize("anneal", [False, True])
def test_the_rate_of_cloning_may_fall_to_zero(anneal):
    class Learner:
        def __init__(self):
            self.rates = []

        def imitate(self, obs, actions, lr):
            self.rates.append(lr)
            return 0.0

    learner, cfg = Learner(), BCConfig(epochs=5, batch_size=4, lr=1.0, anneal_lr=anneal)
    data = {"state": torch.zeros(8, 3)}, torch.zeros(8, 2)
    imitate(learner.imitate, data, cfg, seed=0)
    assert learner.rates == pytest.approx([1.0 - 0.1 * step if anneal else 1.0 for step in range(10)])
