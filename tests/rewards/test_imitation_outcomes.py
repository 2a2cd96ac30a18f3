"""PWIL, RED, PDEIL, T-REX and D-REX: policies learn from them what noise does not teach."""

import pytest

from benchmarks.zoo_imitation import CASES
from guerdon.rewards.demonstrations import returns_of
from tests.rewards.zoo_tasks import run

TASKS = ("fixed_cartpole", "point_reach")
EXPERT_RETURN = {"fixed_cartpole": 200.0, "point_reach": 43.4}


@pytest.mark.parametrize("control", ["zero", "noise"])
@pytest.mark.parametrize("name", ["fixed_cartpole_pwil", "point_reach_pwil"])
def test_without_a_learned_reward_the_same_learner_stays_far_off(name, control):
    settings, task = CASES[name]["settings"], name.rpartition("_")[0]
    result = run(settings, control=control)
    assert result.env_steps >= settings["learner"]["total_steps"]
    assert result.best_return < 0.5 * EXPERT_RETURN[task]


@pytest.mark.parametrize("model", ["pwil", "red", "pdeil"])
@pytest.mark.parametrize("task", TASKS)
def test_ten_demonstrations_are_imitated(task, model):
    case = CASES[f"{task}_{model}"]
    experts = case["demonstrations"]()
    assert len(experts) == 10
    assert float(returns_of(experts).mean()) == pytest.approx(EXPERT_RETURN[task], rel=0.02)
    assert_learns(case, task, model, experts)
    assert case["target"] >= 0.949 * float(returns_of(experts).mean())


@pytest.mark.parametrize(
    ("task", "model", "ahead"),
    [("fixed_cartpole", "trex", 1.15), ("point_reach", "trex", 1.05), ("point_reach", "drex", 1.05)],
)
def test_policies_end_above_the_best_of_poor_demonstrations(task, model, ahead):
    case = CASES[f"{task}_{model}"]
    poor = case["demonstrations"]()
    best = float(returns_of(poor).max())
    assert best < 0.85 * EXPERT_RETURN[task]
    assert case["target"] >= ahead * best
    assert_learns(case, task, model, poor)


def assert_learns(case, task, model, demonstrations):
    control = CASES[f"{task}_pwil"]["settings"]
    for part in ("env", "learner", "mix"):  # the controls had the same
        assert case["settings"][part] == control[part]
    result = run(
        case["settings"],
        demonstrations=demonstrations,
        pretrain_reward=case["pretrain"],
        cooptrain_reward=case["cooptrain"],
    )
    assert result.last_return >= case["target"]


@pytest.mark.parametrize("model", ["pwil", "red", "pdeil", "trex", "drex"])
def test_the_off_policy_pipeline_takes_models_that_were_fitted_before(model):
    case = CASES[f"cartpole_{model}"]
    dqn = {"learning_starts": 100, "batch_size": 32}
    learner = {
        "algorithm": "dqn",
        "total_steps": 400,
        "eval_interval": 10_000,
        "eval_episodes": 1,
        "dqn": dqn,
    }
    result = run(
        {**case["settings"], "learner": learner},
        demonstrations=case["demonstrations"](),
        pretrain_reward=True,
        cooptrain_reward=False,
        max_env_step=20_000 if model == "drex" else None,
        max_train_iter=50,
    )
    fitted = {"pwil": 0, "pdeil": 1, "red": 500, "trex": 150, "drex": 150}
    assert result.train_iter >= 50 and result.reward_model.train_iter == fitted[model]
