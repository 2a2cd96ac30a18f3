"""Runs that learn from demonstrations: how they start, go on after a stop, and what they reach."""

import pytest

from guerdon.config import load_config
from guerdon.errors import ConfigError
from guerdon.run.train import train
from tests.run.short_runs import SAC, demonstrate, lines, make_runner, without_times

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


@pytest.mark.parametrize("mode", [[], ["asynchronous.enabled=true"]], ids=["in turn", "side by side"])
def test_the_critics_start_when_learning_does(settings, tmp_path, mode):
    done = {}
    for name, more in (("with", [START]), ("without", [])):
        (tmp_path / name).mkdir()
        runner = make_runner(settings, tmp_path / name, [*SAC, *mode, *more])
        runner.run()
        done[name] = runner.learner.num_updates
    assert done["with"] == done["without"] + 40 and done["without"] > 40


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
    with pytest.raises(ConfigError, match=r"give learner.warm_start.data"):
        runner.run()
    assert runner.loop.env_steps == 0
