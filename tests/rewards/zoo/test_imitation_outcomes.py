"""Models that imitate: policies learn from each of them what the same learner without it does not.

The environment's rewards are hidden. A run ends at its target; the controls, made once for all models with
one learner, are updated as often. `benchmarks/bench_zoo` runs every model on every task.
"""

import numpy as np
import pytest

from benchmarks.zoo_adversarial import TARGETS
from benchmarks.zoo_imitation import CASES
from guerdon.config.load import ZOO_CONF, load_serial
from guerdon.envs.experts import swing_up
from guerdon.rewards.zoo.demonstrations import returns_of
from tests.rewards.zoo.zoo_tasks import (
    assert_taught,
    evaluated_every,
    experts,
    mean_return,
    play,
    run,
    zoo_config,
)

EXPERT_RETURN = {"fixed_cartpole": 200.0, "point_reach": 43.4}
EVERY = {"fixed_cartpole": 6_400, "point_reach": 4_800}
"""Steps between evaluations."""
CONTROLS = {"fixed_cartpole": ("zero", "noise"), "point_reach": ("noise",)}
"""What takes the place of the models."""


@pytest.mark.parametrize(
    ("task", "model"),
    [*(("fixed_cartpole", model) for model in ("gail", "airl", "gcl", "ensemble")), ("point_reach", "gail")],
)
@pytest.mark.outcome
@pytest.mark.slow
def test_models_that_learn_against_the_policy_imitate_ten_demonstrations(task, model):
    settings = evaluated_every(zoo_config(f"{task}_{model}"), EVERY[task])
    settings["stop_value"] = TARGETS[task]  # 95% of the expert's
    learned = run(settings, demonstrations=experts(settings["env"]["train"]["id"], 10))
    assert_taught(settings, learned, TARGETS[task], far=0.5 * EXPERT_RETURN[task], kinds=CONTROLS[task])


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("fixed_cartpole", "red"),
        ("fixed_cartpole", "pdeil"),
        ("point_reach", "pwil"),
        ("point_reach", "pdeil"),
    ],
)
@pytest.mark.outcome
@pytest.mark.slow
def test_ten_demonstrations_are_imitated(task, model):
    case = CASES[f"{task}_{model}"]
    shown = case["demonstrations"]()
    assert len(shown) == 10
    assert float(returns_of(shown).mean()) == pytest.approx(EXPERT_RETURN[task], rel=0.02)
    assert case["target"] >= 0.949 * float(returns_of(shown).mean())
    assert_learns(case, task, shown)


@pytest.mark.parametrize(
    ("task", "model", "ahead"),
    [("point_reach", "trex", 1.05), ("point_reach", "drex", 1.05)],
)
@pytest.mark.outcome
@pytest.mark.slow
def test_policies_end_above_the_best_of_poor_demonstrations(task, model, ahead):
    case = CASES[f"{task}_{model}"]
    poor = case["demonstrations"]()
    best = float(returns_of(poor).max())
    assert best < 0.85 * EXPERT_RETURN[task]
    assert case["target"] >= ahead * best
    assert_learns(case, task, poor)


def assert_learns(case, task, demonstrations):
    settings = {**evaluated_every(case["settings"], EVERY[task]), "stop_value": case["target"]}
    fitted = {"pretrain_reward": case["pretrain"], "cooptrain_reward": case["cooptrain"]}
    learned = run(settings, demonstrations=demonstrations, **fitted)
    assert_taught(settings, learned, case["target"], far=0.5 * EXPERT_RETURN[task], kinds=CONTROLS[task])


def test_the_target_on_pendulum_is_near_the_scripts_return():
    rng = np.random.default_rng(0)
    random = mean_return(play("Pendulum-v1", lambda obs: rng.uniform(-2.0, 2.0, (len(obs), 1)), 100))
    expert = mean_return(play("Pendulum-v1", swing_up, 100))
    assert TARGETS["pendulum"] == pytest.approx(random + 0.95 * (expert - random), abs=30.0)
    shipped = [load_serial(file.stem).stop_value for file in ZOO_CONF.glob("pendulum_*.yaml")]
    assert shipped and set(shipped) == {TARGETS["pendulum"]}


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
