"""No setting is ignored in silence: each is read somewhere, or a run says that it has no effect, and why."""

import ast
import importlib
import logging
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import guerdon
from guerdon.config import GuerdonConfig, flatten_keys, load_config, load_tree
from guerdon.config.load import load_serial
from guerdon.config.schema_zoo import SerialConfig
from guerdon.config.unused import RULES, SERIAL_RULES, log_without_effect, value_at, without_effect
from guerdon.monitoring.alarms import ALARMS

ROOT = Path(guerdon.__file__).parent


def read_names():
    """Every attribute that is read in the package."""
    trees = (ast.parse(file.read_text()) for file in ROOT.rglob("*.py"))
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_setting_is_read_or_named_as_unused():
    noticed = {key.rpartition(".")[2] for rule in RULES for key in rule.keys if rule.holds(GuerdonConfig())}
    known = read_names() | noticed | {alarm.setting for alarm in ALARMS}
    unread = []
    for file in [
        *(ROOT / "config").glob("schema*.py"),
        ROOT / "config/tabletop.py",
        ROOT / "config/maniskill.py",
    ]:
        module = importlib.import_module(f"guerdon.config.{file.stem}")
        for cls in vars(module).values():
            if is_dataclass(cls) and cls.__module__ == module.__name__:
                unread += [f"{cls.__name__}.{item.name}" for item in fields(cls) if item.name not in known]
    assert unread == []


@pytest.mark.parametrize(("rules", "cls"), [(RULES, GuerdonConfig), (SERIAL_RULES, SerialConfig)])
def test_rules_name_settings_that_exist(rules, cls):
    known = flatten_keys(cls, sections=True)
    for rule in rules:
        assert rule.reason and set(rule.keys) <= set(known)
        assert all(value_at(cls(), key) is not ... for key in rule.keys)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.component_placement={env: 0-1}"], "component_placement has no effect: .*engine: local"),
        (["cluster.num_nodes=2"], "cluster.num_nodes has no effect"),
        (["reward.group_name=Judges"], "reward.group_name has no effect"),
        (["runner.logger.project_name=arms"], "project_name has no effect: it is for the trackers"),
        (
            ["reward.reward_weight=0.1", "reward.combine_mode=add"],
            "reward_weight has no effect: weights",
        ),
        (["reward.success_reward=2", "reward.reward_type=continuous"], "success_reward has no effect"),
        (["learner.sac.gamma=0.9"], "learner.sac has no effect: learner.algorithm is not sac"),
        (["env.train.operator=keyboard"], "env.train.operator has no effect"),
        (["fit.lr_sched.min_lr=1e-5", "fit.lr_sched.name=constant"], "min_lr has no effect"),
        (["runner.num_data_episodes=3"], "num_data_episodes has no effect: it is for robots"),
    ],
)
def test_what_has_no_effect_is_said_with_the_reason(overrides, said, caplog):
    config = load_config("train", overrides)
    with caplog.at_level(logging.WARNING, "guerdon"):
        log_without_effect(config)
    assert len(caplog.messages) == 1
    assert re.search(said, caplog.messages[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=ray", "cluster.component_placement={env: 0-1}"],
        ["reward.reward_weight=0.1", "reward.combine_mode=weighted"],
        ["learner.sac.gamma=0.9", "learner.algorithm=sac"],
        ["reward.group_name=RewardGroup"],
        ["runner.logger.backends=[tensorboard,wandb]", "runner.logger.project_name=arms"],
    ],
)
def test_what_has_an_effect_is_not_named(overrides):
    assert list(without_effect(load_tree({}, overrides))) == []


def test_defaults_and_shipped_configs_have_nothing_to_say():
    assert list(without_effect(GuerdonConfig())) == list(without_effect(SerialConfig())) == []
    for file in (ROOT / "conf").glob("*.yaml"):
        assert list(without_effect(load_config(file.stem))) == [], file.stem
    for file in (ROOT / "conf/zoo").glob("*.yaml"):
        assert list(without_effect(load_serial(file.stem))) == [], file.stem


def test_a_run_says_it(tmp_path, caplog):
    from guerdon.cli.train import train
    from guerdon.core.errors import GuerdonError

    runner = {"task_type": "text", "output_dir": str(tmp_path)}
    config = load_tree({"reward": {"group_name": "Judges"}, "runner": runner, "fit": {"enabled": True}})
    with caplog.at_level(logging.WARNING, "guerdon"), pytest.raises(GuerdonError, match="text"):
        train(config)
    assert sum("reward.group_name has no effect" in line for line in caplog.messages) == 1
    assert sum("fit.enabled has no effect" in line for line in caplog.messages) == 1
