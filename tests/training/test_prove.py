"""`prove`: a run beside its controls, on tiny runs."""

import pytest

from guerdon.training.prove import prove

BRIEFLY = [
    "learner.total_steps=400",
    "learner.save_interval=200",
    "learner.eval_interval=200",
    "+env.train.init_params.reward=none",
]


@pytest.fixture(scope="module")
def proof(checkpoint, tmp_path_factory):
    """A proof of two seeds with all arms, one after another; tests read it and do not change it."""
    from tests.training.conftest import short_settings

    folder = tmp_path_factory.mktemp("prove") / "proof"
    settings = [*short_settings(checkpoint, folder), *BRIEFLY]
    return settings, prove("train", settings, seeds=2, workers=1)


def test_all_arms_of_all_seeds(proof):
    _, outcome = proof
    assert list(outcome["arms"]) == ["start", "learned", "off", "shuffled", "true"]
    for name, arm in outcome["arms"].items():
        assert [result["seed"] for result in arm["seeds"]] == [0, 1]
        assert arm["episodes"] == 10 and arm["env_steps"] == (0 if name == "start" else 400)
        assert 0 <= arm["low"] <= arm["mean"] <= arm["high"] <= 1
    assert set(outcome["differences"]) == {"start", "off", "shuffled", "true"}
    assert "2 seed(s)" in " ".join(text for _, text in outcome["reasons"])
