"""What the API shows: progress that can be switched off, short texts, tables in notebooks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import guerdon as gd
from guerdon.api.prove import ProofResult
from guerdon.api.result import TrainingResult
from guerdon.core import progress as core_progress
from guerdon.training.evaluation import Evaluation
from tests.api.dot import Dot, frames

PPO = {"n_steps": 8, "batch_size": 8, "net_arch": (8,), "device": "cpu"}


@pytest.fixture
def bars(monkeypatch):
    """Names of the progress bars that a user would see."""
    seen, make = [], core_progress._make_bar

    def note(quiet, **settings):
        if not (quiet or core_progress._QUIET.get()):
            seen.append(settings["desc"])
        return make(True, **settings)

    monkeypatch.setattr(core_progress, "_make_bar", note)
    return seen


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    labels = np.arange(16) % 2
    return gd.Dataset.from_arrays(frames(16), labels, tmp_path_factory.mktemp("shown") / "data")


def test_scoring_and_recalibrating_show_progress_unless_switched_off(bars, checkpoint, data, tmp_path):
    reward = gd.load_reward(checkpoint, device="cpu")
    calls = {
        "card": lambda **given: reward.card(data, **given),
        "predict": lambda **given: reward.predict(data.path, **given),
        "recalibrate": lambda **given: reward.recalibrate(data, out=tmp_path / "again", **given),
    }
    for name, call in calls.items():
        call(progress=False)
        assert bars == [], name
        call()
        assert bars[0] == "scoring", name
        bars.clear()


def test_evaluations_show_progress_unless_switched_off(bars, tmp_path):
    with gd.PPO(Dot, **PPO) as agent:
        agent.save(tmp_path / "agent")
        loaded = gd.load_agent(tmp_path / "agent")
        for evaluate in (agent.evaluate, lambda n, **given: loaded.evaluate(n, env=Dot, **given)):
            evaluate(1, progress=False)
            assert bars == []
            evaluate(1)
            assert bars == ["evaluating"]
            bars.clear()


def test_a_result_of_a_long_training_fits_a_screen():
    one = Evaluation(episodes=50, success_once=0.5, success_at_end=0.5, env_return=1.0, length=8.0)
    result = TrainingResult(
        env_steps=10_000,
        seconds=3.21,
        stopped="an alarm",
        alarms=("first", "fires too often"),
        evaluations=(one,) * 300,
        folder=None,
    )
    assert str(result).splitlines() == [
        "10000 environment steps in 3.2 s",
        "stopped: an alarm",
        "2 alarms; the last: fires too often",
        f"300 evaluations; the last: {one}",
    ]
    assert len(repr(result)) < 200 and "evaluations=300" in repr(result)
    assert str(replace(result, folder=Path("run"))).endswith("-> run")
    assert len(result.to_dict()["evaluations"]) == 300


def test_a_proof_in_a_notebook_keeps_its_styles_in_a_frame(tmp_path):
    (tmp_path / "prove.html").write_text('<html><style>body {color: "red"}</style></html>')
    arms = {str(number): {"mean": 0.5, "low": 0.4, "high": 0.6} for number in range(50)}
    proof = ProofResult(
        verdict="It did.", level="good", reasons=(), arms=arms, differences={}, folder=tmp_path
    )
    shown = proof._repr_html_()
    assert shown.startswith("<iframe") and "<style>" not in shown and "&lt;style&gt;" in shown
    assert repr(proof).startswith("ProofResult('It did.', level=good") and len(repr(proof)) < 300


def test_models_of_the_zoo_have_a_table_for_notebooks():
    episode = {"obs": np.zeros((5, 1), np.float32), "acts": np.zeros((5, 1), np.float32)}
    model = gd.reward_model("gail", Dot, demos=[episode], device="cpu")
    assert repr(model) == (
        "GAIL(observations=1, actions=1 continuous, updates=0, demonstrations=1 episodes, device=cpu)"
    )
    assert "<th>demonstrations</th><td>1 episodes</td>" in model._repr_html_()
