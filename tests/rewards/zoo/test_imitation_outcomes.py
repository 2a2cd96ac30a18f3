"""PWIL, RED, PDEIL, T-REX and D-REX: policies learn from them what noise does not teach."""

import numpy as np
import pytest

from benchmarks.zoo_adversarial import TARGETS
from benchmarks.zoo_imitation import CASES
from guerdon.config.load import ZOO_CONF, load_serial
from guerdon.envs.experts import swing_up
from guerdon.rewards.zoo.demonstrations import returns_of
from tests.rewards.zoo.zoo_tasks import mean_return, play, run

TASKS = ("fixed_cartpole", "point_reach")
EXPERT_RETURN = {"fixed_cartpole": 200.0, "point_reach": 43.4}
PENDULUM_STEPS = 96_000
"""Of the short runs on Pendulum; the benchmark's may take more."""


@pytest.mark.parametrize("control", ["zero", "noise"])
@pytest.mark.parametrize("name", ["fixed_cartpole_pwil", "point_reach_pwil"])
@pytest.mark.slow
def test_without_a_learned_reward_the_same_learner_stays_far_off(name, control):
    settings, task = CASES[name]["settings"], name.rpartition("_")[0]
    result = run(settings, control=control)
    assert result.env_steps >= settings["learner"]["total_steps"]
    assert result.best_return < 0.5 * EXPERT_RETURN[task]


@pytest.mark.parametrize("model", ["pwil", "red", "pdeil"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.slow
@pytest.mark.outcome
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
@pytest.mark.slow
@pytest.mark.outcome
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


def test_the_target_on_pendulum_is_near_the_scripts_return():
    rng = np.random.default_rng(0)
    random = mean_return(play("Pendulum-v1", lambda obs: rng.uniform(-2.0, 2.0, (len(obs), 1)), 100))
    expert = mean_return(play("Pendulum-v1", swing_up, 100))
    assert TARGETS["pendulum"] == pytest.approx(random + 0.95 * (expert - random), abs=30.0)
    shipped = [load_serial(file.stem).stop_value for file in ZOO_CONF.glob("pendulum_*.yaml")]
    assert shipped and set(shipped) == {TARGETS["pendulum"]}


@pytest.mark.slow
@pytest.mark.outcome
def test_a_ranking_of_poor_episodes_swings_a_pendulum_up():
    case = CASES["pendulum_trex"]
    poor = case["demonstrations"]()
    assert float(returns_of(poor).max()) < -500.0
    result = run(
        case["settings"],
        demonstrations=poor,
        pretrain_reward=True,
        cooptrain_reward=False,
        max_env_step=PENDULUM_STEPS,
    )
    assert result.last_return >= case["target"]


@pytest.mark.parametrize("control", ["zero", "noise"])
@pytest.mark.slow
def test_without_a_learned_reward_no_pendulum_is_swung_up(control):
    result = run(CASES["pendulum_trex"]["settings"], control=control, max_env_step=PENDULUM_STEPS)
    assert result.env_steps >= PENDULUM_STEPS
    assert result.last_return < -700.0  # less than half of the way from a random policy to the script


@pytest.mark.parametrize(
    "model",
    ["pwil", "pdeil", "trex", *(pytest.param(name, marks=pytest.mark.slow) for name in ("red", "drex"))],
)
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
