"""The recipe for PickCube without a GPU, shortened: the real simulator, few episodes, a tiny model."""

import json

import numpy as np
import pytest

from guerdon.cli import main
from guerdon.run.judge import ScoredData
from guerdon.store import EpisodeStore
from tests.run.short_runs import lines

RECIPE = ["--config-name", "maniskill_rlpd_learned_reward", "--json", "runner.logger.backends=[]"]
FEW = ["env.train.num_envs=4", "env.eval.num_envs=1"]
MODEL = ["reward.model.width=8", "fit.epochs=6", "fit.data.val_fraction=0.3"]
SHORT = ["learner.total_steps=400", "learner.eval_episodes=1", "learner.save_interval=1000"]
LEARN = ["learner.sac.learning_starts=200", "learner.sac.num_critic_only_updates=5"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folders that the commands leave, after all of them."""
    root = tmp_path_factory.mktemp("recipe")
    seen, fitted, trained = (str(root / name) for name in ("seen", "fitted", "trained"))
    counts = ["collect.target_success=6", "collect.target_failure=6", "collect.policy_noise=0.8"]
    assert main(["collect", *RECIPE, *FEW, *counts, f"collect.save_dir={seen}"]) == 0
    log = "runner.logger.log_path="
    assert main(["train-reward", *RECIPE, *MODEL, f"fit.data.path={seen}", log + fitted]) == 0
    model = [*MODEL, f"reward.model.checkpoint_path={fitted}/checkpoints/best_model"]
    data = [f"learner.warm_start.data={seen}", f"learner.sac.prior_data={seen}"]
    assert main(["train", *RECIPE, *FEW, *SHORT, *LEARN, *model, *data, log + trained]) == 0
    return root


def test_the_model_tells_success_from_failure(places):
    scored = ScoredData(
        places / "seen", places / "fitted/checkpoints/best_model", precision="fp32", copy=places
    )
    labels, rest = EpisodeStore(places / "seen").labels >= 0.5, EpisodeStore(places / "seen").at_rest()
    assert rest is not None and (rest & ~labels).any()
    success, failure = scored.prob_success[labels], scored.prob_success[rest & ~labels]
    assert success.mean() > failure.mean() + 0.2
    assert (scored.prob_success[~rest] == 0.0).all()


def test_the_policy_is_trained_on_the_learned_reward_alone(places):
    entries = [entry for entry in lines(places / "trained") if "rollout/rewards" in entry]
    assert entries and all(entry["rollout/rewards"] == entry["rollout/learned_rewards"] for entry in entries)
    for entry in entries:  # only robots at rest were rendered
        assert 0 < entry["reward/frames_rendered"] < 512
        assert entry["rollout/learned_rewards"] <= entry["reward/frames_judged"] / 512 + 1e-6
    assert any(np.isfinite(entry.get("train/critic_loss", np.nan)) for entry in entries)


def test_the_policy_is_saved_and_filmed(places):
    summary = json.loads((places / "trained/summary.json").read_text())
    assert summary["env_steps"] >= 400
    assert list((places / "trained/videos").glob("*.gif"))
