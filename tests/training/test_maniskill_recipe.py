"""The recipe for PickCube without a GPU, shortened: the real simulator, few episodes, a tiny model."""

import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from guerdon.cli.main import main
from guerdon.data.store import EpisodeStore
from guerdon.fit.score import score_path
from guerdon.monitoring.assess import load_manager
from tests.training.short_runs import lines

pytestmark = pytest.mark.sim

PAGE = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "maniskill.md"
RECIPE = "maniskill_rlpd_learned_reward"
QUIET = ["runner.logger.backends=[]"]
SHORTER = {
    "collect": QUIET,
    "train-reward": [*QUIET, "reward.model.width=8", "fit.epochs=6", "fit.data.val_fraction=0.3"],
    "train": [
        *QUIET,
        "reward.model.width=8",
        "learner.eval_episodes=1",
        "learner.total_steps=400",
        "learner.sac.learning_starts=200",
        "learner.sac.num_critic_only_updates=5",
    ],
}
"""Verb -> what is added to the page's commands."""


def recipe():
    """The commands of the page, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    script = "".join(text for text in blocks if RECIPE in text).replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in script.splitlines() if line.startswith("guerdon ")]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folders that the commands leave, after all of them."""
    root, here = tmp_path_factory.mktemp("recipe"), Path.cwd()
    commands = recipe()
    verbs = [command[0] for command in commands]
    assert verbs == ["collect", "collect", "data", "train-reward", "train", "evaluate"]
    os.chdir(root)
    try:
        for verb, *rest in commands:
            assert main([verb, *rest, *SHORTER.get(verb, [])]) == 0, (verb, rest)
    finally:
        os.chdir(here)
    return root


def test_the_model_tells_success_from_failure(places):
    scored = score_path(load_manager(places / "fitted/checkpoints/best_model"), places / "seen", places)
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
        assert entry["rollout/learned_rewards"] <= entry["reward/frames_scored"] / 512 + 1e-6
    assert any(np.isfinite(entry.get("train/critic_loss", np.nan)) for entry in entries)


def test_the_policy_is_saved_and_filmed(places):
    summary = json.loads((places / "trained/summary.json").read_text())
    assert summary["env_steps"] >= 400
    assert list((places / "trained/videos").glob("*.gif"))
