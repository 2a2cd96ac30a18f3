"""One set of defaults: the tables of the docs, the command's YAML, and the dataclasses agree."""

import re
from pathlib import Path

import pytest
import yaml

import guerdon
from guerdon.config import FitConfig, GuerdonConfig, RewardModelConfig, load_config, load_tree
from guerdon.config.compat import RLINF_FIT
from guerdon.config.nested import dotted, leaves
from guerdon.fit.train_reward_model import parser

ROOT = Path(guerdon.__file__).parents[1]
CONF = Path(guerdon.__file__).parent / "conf"
ROW = re.compile(r"^\| `((?:reward|fit|asynchronous|learner)\.[\w.]+)` \| ([^|]*) \|", re.M)
PAGES = ("tutorials/fit.md", "tutorials/train.md", "howto/scaling-fit.md", "howto/asynchronous.md")
"""With tables of settings and their defaults."""


def setting(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def documented(page):
    """Setting -> default, but for those that the page has no value or a sentence for."""
    rows = ROW.findall((ROOT / "docs" / page).read_text())
    values = {key: yaml.safe_load(text.strip().strip("`")) for key, text in rows if text.strip()}
    return {key: v for key, v in values.items() if v not in ("all", "no limit") and "(" not in str(v)}


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_in_the_docs_are_what_python_does(page):
    default, table = GuerdonConfig(), documented(page)
    plain = {key: setting(default, key) for key in table}
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
    assert shown == table and len(table) >= 4


def test_the_table_of_fitting_has_the_settings_that_matter():
    table = documented("tutorials/fit.md")
    assert {"reward.model.arch", "reward.model.width", "fit.epochs", "fit.optim.lr"} <= table.keys()
    assert {"fit.global_batch_size", "fit.optim.optimizer", "fit.lr_sched.name"} <= table.keys()
    assert {"fit.augment.shift_pixels", "fit.augment.color"} <= table.keys()


def test_the_command_adds_only_where_data_and_runs_are():
    config, default = load_config("train_reward", []), GuerdonConfig()
    assert config.reward == default.reward
    assert config.fit.data.path == "runs/collect/data"
    changed = {dotted(path) for path, _ in leaves(yaml.safe_load((CONF / "train_reward.yaml").read_text()))}
    assert changed == {"runner.experiment_name", "fit.data.path"}


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("maniskill_train_resnet_reward", "embodiment"),
        ("maniskill_train_reward_model", "embodiment"),
        ("train_reward_model", "embodiment"),
        ("reward_training", "reward"),
    ],
)
def test_configs_named_after_rlinf_keep_its_values(name, folder):
    config = load_config(name, [], ROOT / "examples" / folder / "config")
    batch = {"maniskill_train_resnet_reward": 64, "maniskill_train_reward_model": 64}.get(name, 32)
    wanted = {**RLINF_FIT, "fit.global_batch_size": batch, "reward.model.width": 64}
    assert {key: setting(config, key) for key in wanted} == wanted
    assert config.reward.model.arch == ("resnet10" if name == "train_reward_model" else "resnet18")


def test_blocks_of_rlinf_mean_its_values_and_one_place_says_them():
    config = load_tree({"reward_training": {"data_path": "x", "lr": 3e-4}}, [])
    wanted = {**RLINF_FIT, "fit.optim.lr": 3e-4, "reward.model.arch": "resnet18", "reward.model.width": 64}
    assert {key: setting(config, key) for key in wanted} == wanted
    block = {
        dotted(path): value for path, value in leaves(yaml.safe_load((CONF / "rlinf/fit.yaml").read_text()))
    }
    block["fit.optim.lr"] = float(block["fit.optim.lr"])
    assert block == {
        "reward.model.width": 64,
        **{key: value for key, value in RLINF_FIT.items() if key != "fit.global_batch_size"},
    }


def test_the_script_of_flags_has_rlinfs_defaults():
    flags = parser().parse_args(["--positive-dir", "p", "--negative-dir", "n", "--output-checkpoint", "c.pt"])
    assert (flags.epochs, flags.batch_size, flags.lr) == (100, 32, 1e-4)


def test_defaults_in_python():
    fit, model = FitConfig(), RewardModelConfig()
    assert (model.arch, model.width, fit.epochs, fit.optim.optimizer) == ("resnet10", 16, 12, "adamw")
