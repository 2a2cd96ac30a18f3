"""Interventions: what a person does goes to the demonstrations, as it was done, and survives a stop."""

import numpy as np
import pytest

from guerdon.config import load_config
from guerdon.training.trainer import EmbodiedRunner
from tests.training.counting import LENGTH, PERSON
from tests.training.test_asynchronous import ASYNC, SHORT, steps_of


@pytest.fixture
def make():
    runners = []

    def one(folder, *more):
        folder.mkdir(exist_ok=True)
        names = [item.replace("Counting-v0", "Helped-v0") for item in SHORT]
        settings = [*names, f"runner.logger.log_path={folder}", *more]
        runners.append(EmbodiedRunner(load_config("train", settings), folder))
        return runners[-1]

    yield one
    for runner in runners:
        runner.engine.close()


@pytest.mark.parametrize("more", [(ASYNC,), ()], ids=["asynchronous", "synchronous"])
def test_what_a_person_did_is_replayed_and_shown(tmp_path, make, more):
    runner = make(tmp_path / "run", *more)
    runner.loop.reset(0)
    for _ in range(2):
        iteration = runner.loop.advance(0.0)
    part = runner.loop.replay.parts[0]
    held = steps_of(part)
    total = held["env_rewards"]  # the count after the step
    helped = (total % 5 == 0) | (total % LENGTH == 0)
    np.testing.assert_array_equal(held["actions"][..., 0] == PERSON, helped)
    assert np.abs(held["actions"]).max() <= 1.0  # where nobody stepped in, the action is the policy's own
    shown = runner.loop.interventions
    assert len(shown) == helped.sum() > 100
    batch = shown.sample(2000, gamma=0.9)
    assert (batch.actions == PERSON).all()
    counts = batch.env_rewards[:, 0].numpy()
    assert set(counts.tolist()) == set(total[helped].tolist())
    np.testing.assert_array_equal(batch.obs["state"][:, 2].numpy(), counts - 1)
    np.testing.assert_array_equal(batch.next_obs["state"][:, 2].numpy(), counts)
    inside = batch.next_obs["state"][:, 1].numpy()  # a new episode begins at 0
    np.testing.assert_array_equal(inside, batch.obs["state"][:, 1].numpy() + 1)
    odd = (counts // LENGTH) % 2 == 0
    np.testing.assert_array_equal(batch.terminated.numpy(), (counts % LENGTH == 0) & odd)
    if more:
        assert iteration.metrics["env/intervened"] == pytest.approx(helped.mean(), abs=0.05)
        assert iteration.metrics["env/interventions_kept"] == len(shown)


def test_half_of_a_batch_is_what_people_did(tmp_path, make, monkeypatch):
    runner = make(tmp_path / "run", ASYNC)
    runner.loop.reset(0)
    rows = []
    update = runner.learner.update

    def noted(batch, prior_rows):
        rows.append((prior_rows, int((batch.actions[:prior_rows] == PERSON).sum()), len(batch)))
        return update(batch, prior_rows)

    monkeypatch.setattr(runner.learner, "update", noted)
    runner.loop.advance(0.0)
    assert rows
    assert set(rows) == {(8, 8, 16)}


def test_interventions_survive_a_stop(tmp_path, make):
    first = make(tmp_path / "run", ASYNC)
    first.run()
    (place,) = (tmp_path / "run" / "checkpoints").glob("step_15*")
    second = make(tmp_path / "again", ASYNC, f"runner.resume_dir={place}", "learner.total_steps=3000")
    second.start_or_resume()
    assert len(second.loop.interventions) == len(first.loop.interventions) > 100
    np.testing.assert_array_equal(
        steps_of(second.loop.interventions)["actions"], steps_of(first.loop.interventions)["actions"]
    )
    assert second.loop.env_steps == first.loop.env_steps
