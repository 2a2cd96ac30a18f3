"""`guerdon train` in an environment of one's own: no images in its observation, pictures from `render()`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.config import EnvConfig, RewardModelConfig
from guerdon.core.errors import ConfigError
from guerdon.data.store import EpisodeStore
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.training.evaluation import evaluate
from guerdon.training.frames import RewardFrames
from tests.envs import own_env
from tests.envs.own_env import SIZE, STEPS, place_in
from tests.envs.test_own_env import check_episodes
from tests.training.short_runs import SAC, make_runner

ID = "tests.envs.own_env:Slider-v0"
ENVS = [f"env.{part}.{setting}" for part in ("train", "eval") for setting in (f"id={ID}", "num_envs=2")]
SHORT = ["learner.total_steps=96", "learner.eval_episodes=2", "learner.ppo.num_steps=24"]
SHORT += ["learner.ppo.minibatch_size=24", "learner.network.hidden=[8]", "runner.logger.backends=[]"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that fires on every frame."""
    torch.manual_seed(0)
    cfg = RewardModelConfig(width=8, image_size=(3, SIZE, SIZE), hidden_dim=8)
    model = build_model(cfg).eval()
    sizes = {"base_camera": (SIZE, SIZE, 3)}
    contract = replace(Contract.of(model, frame_sizes=sizes), threshold=0.0, data_hash="test")
    return save_checkpoint(tmp_path_factory.mktemp("model") / "model", model, contract)


@pytest.fixture
def seen(monkeypatch):
    """What the reward model is shown: rows (step, environment) and the place in each picture."""
    shown, original = [], RewardFrames.add

    def watch(self, t, next_obs, done, info):
        original(self, t, next_obs, done, info)
        true = np.where(done, info.get("final_info", info)["place"], info.get("place", 0.0))
        for rows in self._rows[-1:]:
            envs = rows[rows // self._shape[1] == t] % self._shape[1]
            if not len(envs):
                continue
            pictures = self._selector._source.frames(next_obs, done, envs)["base_camera"]
            found = [place_in(picture) for picture in pictures]
            shown.extend(zip(done[envs].tolist(), true[envs].tolist(), found, strict=True))

    monkeypatch.setattr(RewardFrames, "add", watch)
    return shown


@pytest.mark.parametrize("mode", ["per_step", "terminal"])
@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_the_reward_model_sees_the_frame_that_each_action_led_to(checkpoint, tmp_path, seen, mode, algorithm):
    more = [
        f"reward.reward_mode={mode}",
        *([] if algorithm == "ppo" else [*SAC, *SHORT, "learner.iteration_steps=48"]),
    ]
    more += ["reward.use_reward_model=true", f"reward.model.checkpoint_path={checkpoint}"]
    summary = make_runner([*ENVS, *SHORT], tmp_path, more).run()
    assert summary["env_steps"] == 96 and summary["success_once"] is not None
    assert len(seen) >= 96 // (STEPS if mode == "terminal" else 1)
    ended = [done for done, _, _ in seen]
    assert all(ended) if mode == "terminal" else 0 < sum(ended) < len(ended)
    assert all(abs(true - shown) < 0.04 for _, true, shown in seen)  # not the first frame of the next episode
    assert (tmp_path / "run" / "videos" / "eval_0.gif").is_file()


def test_a_run_that_looks_at_nothing_renders_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(own_env.Slider, "render", lambda self: pytest.fail("rendered"))
    summary = make_runner([*ENVS, *SHORT], tmp_path).run()
    assert summary["success_once"] is not None


def test_a_run_collects_what_it_plays(tmp_path):
    more = ["collect.enabled=true", f"collect.save_dir={tmp_path / 'data'}"]
    make_runner([*ENVS, *SHORT], tmp_path, more).run()
    episodes = [episode for episode in EpisodeStore(tmp_path / "data") if episode.complete]
    assert len(episodes) >= 6
    check_episodes(episodes)


def test_labels_by_a_setting_reach_training_and_evaluation(tmp_path):
    solved = [setting.replace("Slider", "SolvedSlider") for setting in ENVS]
    assert make_runner([*solved, *SHORT], tmp_path).run()["success_once"] is None  # nobody tells
    (tmp_path / "more").mkdir()
    keys = [f"env.{part}.success_key=solved" for part in ("train", "eval")]
    assert make_runner([*solved, *keys, *SHORT], tmp_path / "more").run()["success_once"] is not None
    with pytest.raises(ConfigError, match=r"does not tell success: .*it has: .*solved"):
        make_runner([*solved, *SHORT], tmp_path, ["collect.enabled=true"])


def test_frames_of_another_size_cost_the_film_its_curve_and_not_the_run_its_end(
    settings, checkpoint, tmp_path, caplog
):
    make_runner(settings, tmp_path, ["env.eval.init_params.image_size=[32,32]"]).run()
    assert "films have no curve: the frames of env.eval do not fit" in caplog.text
    assert (tmp_path / "run" / "videos" / "eval_0.gif").is_file()
    assert (tmp_path / "run" / "summary.json").is_file()


def test_films_show_final_frames():
    result, films = evaluate(
        lambda obs: np.ones((2, 1), np.float32),
        EnvConfig(id=ID, num_envs=2),
        episodes=2,
        seed=0,
        cameras=["base_camera"],
        num_films=2,
    )
    assert result.success_at_end == 1.0
    assert [len(film.frames["base_camera"]) for film in films] == [STEPS, STEPS]
    assert all(place_in(film.frames["base_camera"][-1]) > 0.9 for film in films)
