"""A reward model written from the page on adding one trains through both pipelines."""

import json

import numpy as np
import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import REWARD_MODELS, BaseRewardModel, create_reward_model, register_reward_model
from guerdon.rewards.registry import PLUGIN_GROUP
from guerdon.run import serial_pipeline_reward_model_offpolicy, serial_pipeline_reward_model_onpolicy
from guerdon.training.online_reward import OnlineReward
from tests.rewards.page_plugin import SETTINGS, InPlaceRewardModel, PageRewardModel
from tests.training.serial_tools import small

PIPELINES = {"ppo": serial_pipeline_reward_model_onpolicy, "dqn": serial_pipeline_reward_model_offpolicy}


@pytest.fixture
def table(monkeypatch):
    for name in list(REWARD_MODELS):
        monkeypatch.setitem(REWARD_MODELS, name, REWARD_MODELS[name])
    yield
    for name in ("page", "page_in_place", "mine"):
        REWARD_MODELS.pop(name, None)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize("cls", [PageRewardModel, InPlaceRewardModel])
def test_it_trains_through_the_pipeline(table, tmp_path, monkeypatch, algorithm, cls):
    register_reward_model("page", cls)
    seen, errors = [], []
    score, train = OnlineReward.rewards, cls.train

    def error(model):
        obs, rewards = (torch.stack([item[name] for item in model.train_data]) for name in ("obs", "reward"))
        with torch.no_grad():
            return float(model.reward_model.learn(obs, rewards))

    def trained(self):
        before = error(self)
        train(self)
        errors.append((before, error(self)))

    def noted(self, batch):
        before = {name: part.clone() for name, part in batch.parts().items()}
        learned = score(self, batch)
        assert all(torch.equal(part, before[name]) for name, part in batch.parts().items())
        with torch.no_grad():
            assert np.allclose(learned, self.model.reward_model(batch.obs).squeeze(-1).numpy(), atol=1e-6)
        seen.append(learned.shape)
        return learned

    monkeypatch.setattr(OnlineReward, "rewards", noted)
    monkeypatch.setattr(cls, "train", trained)
    tree = small(algorithm, reward_model={"type": "page", **SETTINGS}, output_dir=str(tmp_path))
    result = PIPELINES[algorithm](tree)
    model = result.reward_model
    assert type(model) is cls and result.env_steps == 1024
    rounds = 8 if algorithm == "ppo" else 16
    assert model.train_iter == 5 * rounds and model.train_data == []
    assert set(seen) == ({(32, 4)} if algorithm == "ppo" else {(32,)})
    logged = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["reward_model/reward_loss"] for line in logged if "reward_model/reward_loss" in line]
    before, after = (sum(values) for values in zip(*errors, strict=True))
    assert len(losses) == rounds and after < 0.8 * before
    other = create_reward_model({"type": "page", **SETTINGS}, "cpu", None)
    other.load(result.folder / "checkpoints" / "step_1024" / "reward_model.pt")
    obs = torch.randn(3, 4)
    assert torch.equal(other.reward_model(obs), model.reward_model(obs)) and other.train_iter == 5 * rounds


def test_a_seed_is_the_plugins_too(table):
    """Its first weights come from torch's own generator, which the caller gets back as it was."""
    register_reward_model("page", PageRewardModel)
    runs = []
    for before in (1, 2):
        torch.manual_seed(before)
        left = torch.random.get_rng_state()
        tree = small(reward_model={"type": "page", **SETTINGS})
        runs.append(serial_pipeline_reward_model_onpolicy(tree, max_env_step=256).reward_model.reward_model)
        assert torch.equal(torch.random.get_rng_state(), left)
    assert all(torch.equal(*pair) for pair in zip(*(net.parameters() for net in runs), strict=True))


def test_the_interface_alone_is_enough(table):
    """Without cfg, network or logger: four methods."""

    class Mine(BaseRewardModel):
        def __init__(self, config, device, tb_logger):
            self.reported = 0

        def collect_data(self, data):
            self.reported += len(data)

        def clear_data(self, iter):
            pass

        def train(self):
            return None

        def estimate(self, data):
            return [{**item, "reward": item["obs"][2].abs().neg()} for item in data]

    register_reward_model("mine", Mine)
    register_reward_model("mine", Mine)  # the same once more
    result = serial_pipeline_reward_model_onpolicy(small(reward_model={"type": "mine"}), max_env_step=256)
    assert result.reward_model.reported == 256
    with pytest.raises(ConfigError, match="the name 'mine' is taken by Mine"):
        register_reward_model("mine", PageRewardModel)
    with pytest.raises(ConfigError, match="does not learn from demonstrations"):
        result.reward_model.load_expert_data([])


def run_with(answer, **changes):
    class Faulty(PageRewardModel):
        def estimate(self, data):
            return answer(super().estimate(data))

    tree = small("dqn", reward_model={"type": "gail"}, **changes)
    return serial_pipeline_reward_model_offpolicy(tree, model=Faulty(_Section(SETTINGS), "cpu", _Logger()))


class _Section(dict):
    __getattr__ = dict.__getitem__


class _Logger:
    def add_scalar(self, *args):
        pass


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda items: items[:-1], "must return a list of 32 transitions, it returned a list of 31"),
        (lambda items: None, "it returned a NoneType"),
        (lambda items: [{**items[0], "reward": float("nan")}] * len(items), "not finite"),
    ],
)
def test_wrong_answers_are_refused(answer, complaint):
    with pytest.raises(DataError, match=complaint):
        run_with(answer)


def test_what_is_no_reward_model_is_refused(table):
    with pytest.raises(ConfigError, match="no class that derives from"):
        register_reward_model("mine", dict)
    with pytest.raises(ConfigError, match="did you mean 'gail'"):
        create_reward_model({"type": "gial"})
    with pytest.raises(ConfigError, match=r"reward_model\.type is missing"):
        create_reward_model({})
    register_reward_model("mine", PageRewardModel)
    with pytest.raises(AttributeError, match=r"reward_model\.obs_size is not set"):
        create_reward_model({"type": "mine"})


# Installed plugins


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with three entry points, as pip would install it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "acme_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rewards\nVersion: 1.0\n")
    entries = ["acme = acme_rewards:Acme", "acme_broken = acme_rewards:Absent", "acme_dict = builtins:dict"]
    (info / "entry_points.txt").write_text("\n".join([f"[{PLUGIN_GROUP}]", *entries, ""]))
    (tmp_path / "acme_rewards.py").write_text(
        "from tests.rewards.page_plugin import PageRewardModel\n\n"
        'class Acme(PageRewardModel):\n    """Rewards what the page rewards."""\n'
    )


def test_an_installed_plugin_is_found_by_name(installed, tmp_path):
    tree = small("ppo", reward_model={"type": "acme", **SETTINGS}, output_dir=str(tmp_path))
    result = serial_pipeline_reward_model_onpolicy(tree, max_env_step=128)
    assert type(result.reward_model).__name__ == "Acme" and "acme" not in REWARD_MODELS
    with pytest.raises(
        ConfigError, match=r"'acme_broken' .*of acme-rewards cannot be loaded: AttributeError"
    ):
        create_reward_model({"type": "acme_broken"})
    with pytest.raises(ConfigError, match="no class that derives from"):
        create_reward_model({"type": "acme_dict"})
    with pytest.raises(ConfigError, match="did you mean 'acme'"):
        create_reward_model({"type": "acmee"})
