"""Older spellings: the table itself, precedence, references and the rules that are no renames."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from guerdon.config import ConfigError, GuerdonConfig, flatten_keys
from guerdon.config.compat import (
    IMPLIED,
    REFUSED,
    RENAMES,
    VALUES,
    Override,
    notice_line,
    translate,
    translate_override,
)

KNOWN = set(flatten_keys(GuerdonConfig, sections=True))


def translated(tree: dict[str, Any], *overrides: Override) -> dict[Any, Any]:
    return translate(tree, overrides)[0]


def test_every_target_of_the_table_is_a_setting_or_section_of_today() -> None:
    assert [new for new in RENAMES.values() if new not in KNOWN] == []
    assert [key for rule in IMPLIED for key in (rule.unless, *rule.settings) if key not in KNOWN] == []


def test_no_older_spelling_is_in_use_today() -> None:
    assert [old for old in (*RENAMES, *REFUSED) if old in KNOWN] == []
    assert [old for old in VALUES if old not in RENAMES] == []


def test_todays_spellings_stay_as_they_are() -> None:
    assert [key for key in KNOWN if translate_override(key) != key] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reward.reward_model.image_keys", "reward.model.image_keys"),
        ("reward.reward_model.reward_type", "reward.reward_type"),
        ("reward.resnet.checkpoint_path", "reward.model.checkpoint_path"),
        ("reward.checkpoint_path", "reward.model.checkpoint_path"),
        ("reward.mode", "reward.combine_mode"),
        ("model.debug_save_dir", "reward.model.debug_save_dir"),
        ("reward.num_epochs", "fit.epochs"),
        ("reward.optim.lr", "fit.optim.lr"),
        ("reward.data.positive_dir", "fit.data.positive_dir"),
        ("reward_training.lr", "fit.optim.lr"),
        ("reward_training.data_path", "fit.data.path"),
        ("reward_training.only", "fit.only"),
        ("reward_data_collection.target_success", "collect.target_success"),
        ("data.fail_success_ratio", "fit.data.fail_success_ratio"),
        ("actor.micro_batch_size", "fit.micro_batch_size"),
        ("runner.early_stop.patience", "fit.early_stop.patience"),
        ("runner.max_epochs", "fit.epochs"),
        ("reward.data_collection.positive_dir", "reward.data_collection.positive_dir"),
        ("actor.model.hidden_dim", "actor.model.hidden_dim"),
        ("modelling.x", "modelling.x"),
    ],
)
def test_a_key_is_translated_by_the_longest_entry_that_fits(old: str, new: str) -> None:
    assert translate_override(old) == new


def test_a_tree_is_translated_and_left_untouched() -> None:
    tree = {"reward": {"mode": "add", "resnet": {"checkpoint_path": "x"}, "fail_reward": -1.0}, "seed": 3}
    before = copy.deepcopy(tree)
    result, notices = translate(tree)
    assert result == {
        "reward": {"fail_reward": -1.0, "combine_mode": "add", "model": {"checkpoint_path": "x"}},
        "seed": 3,
    }
    assert tree == before
    assert notice_line(notices) == (
        "config: older spellings translated: "
        "reward.mode -> reward.combine_mode, reward.resnet.* -> reward.model.*"
    )


def test_todays_spelling_gives_no_notice() -> None:
    assert translate({"reward": {"combine_mode": "add", "model": {"arch": "resnet34"}}})[1] == []


def test_the_older_spelling_wins_within_a_file_and_a_difference_is_noticed() -> None:
    tree = {"fit": {"epochs": 5, "optim": {"lr": 0.1}}, "reward_training": {"epochs": 7, "lr": 0.1}}
    result, notices = translate(tree)
    assert result["fit"] == {"epochs": 7, "optim": {"lr": 0.1}}
    assert "reward_training.epochs=7 replaces fit.epochs=5" in notices
    assert not any("lr" in notice and "replaces" in notice for notice in notices)


def test_the_older_spelling_wins_whatever_the_order_in_the_file() -> None:
    assert (
        translated({"reward": {"mode": "add", "combine_mode": "replace"}})["reward"]["combine_mode"] == "add"
    )
    assert (
        translated({"reward": {"combine_mode": "replace", "mode": "add"}})["reward"]["combine_mode"] == "add"
    )


def test_an_override_beats_the_file_in_whatever_spelling() -> None:
    tree = {"reward": {"mode": "add"}, "fit": {"epochs": 5}}
    result = translated(
        tree,
        Override(key="reward.combine_mode", value="weighted"),
        Override(key="runner.max_epochs", value=9),
    )
    assert result["reward"]["combine_mode"] == "weighted"
    assert result["fit"]["epochs"] == 9


def test_overrides_are_applied_in_their_order() -> None:
    result = translated({}, Override(key="fit.epochs", value=1), Override(key="reward.num_epochs", value=2))
    assert result == {"fit": {"epochs": 2}}


def test_an_override_with_a_section_is_laid_over_what_is_there() -> None:
    result = translated(
        {"reward": {"model": {"model_type": "resnet_reward", "dropout": 0.1}}},
        Override(key="reward.reward_model", value={"hidden_dim": 64, "reward_type": "continuous"}),
    )
    assert result["reward"] == {
        "model": {"model_type": "resnet_reward", "dropout": 0.1, "hidden_dim": 64},
        "reward_type": "continuous",
    }


def test_an_override_reaches_into_lists_without_changing_the_argument() -> None:
    tree = {"cluster": {"node_groups": [{"hardware": {"configs": [{"robot_ip": "ROBOT_IP"}]}}]}}
    override = Override(key="cluster.node_groups.0.hardware.configs.0.robot_ip", value="10.0.0.2")
    result = translated(tree, override)
    assert result["cluster"]["node_groups"][0]["hardware"]["configs"] == [{"robot_ip": "10.0.0.2"}]
    assert tree["cluster"]["node_groups"][0]["hardware"] == {"configs": [{"robot_ip": "ROBOT_IP"}]}
    with pytest.raises(ConfigError, match="a list of 1 entries stands where '4' is looked up"):
        translate(tree, [Override(key="cluster.node_groups.4.label", value="x")])


def test_deleting_uses_either_spelling_and_needs_something_to_delete() -> None:
    tree = {"reward": {"mode": "add", "fail_reward": -1.0}}
    assert translated(tree, Override(key="reward.mode", delete=True)) == {"reward": {"fail_reward": -1.0}}
    assert translated(tree, Override(key="reward.combine_mode", value="add", delete=True)) == {
        "reward": {"fail_reward": -1.0}
    }
    with pytest.raises(ConfigError, match="is 'add', not 'replace'"):
        translate(tree, [Override(key="reward.combine_mode", value="replace", delete=True)])
    with pytest.raises(ConfigError, match="there is nothing to remove"):
        translate(tree, [Override(key="fit.epochs", delete=True)])


def test_one_camera_becomes_a_list_of_one() -> None:
    assert translated({"reward": {"data": {"image_key": "wrist"}}}) == {
        "fit": {"data": {"image_keys": ["wrist"]}}
    }
    assert translated({}, Override(key="data.image_key", value="wrist")) == {
        "fit": {"data": {"image_keys": ["wrist"]}}
    }


def test_the_resnet_reward_model_under_its_short_name() -> None:
    tree = {"reward": {"reward_model_type": "resnet"}}
    assert translated(tree) == {"reward": {"model": {"model_type": "resnet_reward"}}}
    tree = {"reward": {"reward_model_type": "vlm"}}
    assert translated(tree) == {"reward": {"model": {"model_type": "vlm"}}}


@pytest.mark.parametrize(
    "tree",
    [
        {"reward": {"use_negative_reward": True}},
        {"reward": {"model": {"use_negative_reward": True}}},
        {"reward": {"reward_model": {"use_negative_reward": True}}},
    ],
)
def test_negative_rewards_are_refused_with_the_remedy(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"use_negative_reward is not supported.*set reward\.fail_reward"):
        translate(tree)


def test_negative_rewards_switched_off_say_nothing() -> None:
    assert translate({"reward": {"use_negative_reward": False, "mode": "add"}}) == (
        {"reward": {"combine_mode": "add"}},
        ["reward.mode -> reward.combine_mode"],
    )


CLASSIFIER = {"model_type": "binary_classifier", "arch": "resnet10"}


@pytest.mark.parametrize(
    ("tree", "model"),
    [
        ({"reward": {"reward_model": {"hidden_dim": 8}}}, {"hidden_dim": 8, **CLASSIFIER}),
        ({"reward": {"model": {"num_spatial_blocks": 4}}}, {"num_spatial_blocks": 4, **CLASSIFIER}),
        (
            {"reward": {"model": {"num_spatial_blocks": 4, "arch": "resnet18"}}},
            {"num_spatial_blocks": 4, "arch": "resnet18", "model_type": "binary_classifier"},
        ),
        (
            {"reward": {"model": {"num_spatial_blocks": 4, "model_type": "resnet_reward"}}},
            {"num_spatial_blocks": 4, "model_type": "resnet_reward"},
        ),
        ({"reward": {"model": {"use_pretrain": False}}}, {"use_pretrain": False}),
        ({"reward": {"reward_model": None}}, None),
        (
            {"reward": {"reward_model_type": "resnet", "reward_model": {"hidden_dim": 8}}},
            {"model_type": "resnet_reward", "hidden_dim": 8},
        ),
    ],
)
def test_the_classifiers_block_implies_its_model(tree: dict[str, Any], model: Any) -> None:
    assert translated(tree)["reward"]["model"] == model


def test_overrides_decide_before_anything_is_implied() -> None:
    tree = {"reward": {"reward_model": {"hidden_dim": 8}}}
    override = Override(key="reward.model.model_type", value="resnet_reward")
    assert translated(tree, override)["reward"]["model"] == {"hidden_dim": 8, "model_type": "resnet_reward"}
    override = Override(key="reward.model.arch", value="resnet34")
    assert translated(tree, override)["reward"]["model"] == {
        "hidden_dim": 8,
        "arch": "resnet34",
        "model_type": "binary_classifier",
    }


def test_an_override_alone_does_not_change_the_kind_of_model() -> None:
    override = Override(key="reward.reward_model.checkpoint_path", value="x")
    assert translated({}, override) == {"reward": {"model": {"checkpoint_path": "x"}}}


def test_the_wrappers_section_writes_one_pickle_per_episode_unless_told_otherwise() -> None:
    assert translated({"reward_data_collection": {"enabled": True}})["collect"] == {
        "enabled": True,
        "format": "pkl-episode",
    }
    tree = {"reward_data_collection": {"enabled": True}, "collect": {"format": "native"}}
    assert translated(tree)["collect"] == {"enabled": True, "format": "native"}


def test_an_empty_older_section_does_not_wipe_todays() -> None:
    tree = {
        "reward": {"model": {"dropout": 0.2}, "resnet": None},
        "fit": {"epochs": 3},
        "reward_training": {},
    }
    result = translated(tree)
    assert result["reward"]["model"] == {"dropout": 0.2}
    assert result["fit"] == {"epochs": 3}


def test_references_follow_what_they_refer_to() -> None:
    tree = {
        "reward": {
            "save_dir": "${runner.output_dir}/c",
            "optim": {"lr": "${..num_epochs}"},
            "num_epochs": 3,
            "data": {"positive_dir": "${reward.save_dir}/p", "negative_dir": "${.positive_dir}/n"},
        },
        "collect": {"save_dir": "${oc.env:HOME}/${reward_training.data_path}"},
        "env": {"train": {"init_params": {"dirs": ["${reward.save_dir}", {"a": "${reward.mode}"}]}}},
    }
    result = translated(tree)
    assert result["fit"]["save_dir"] == "${runner.output_dir}/c"
    assert result["fit"]["optim"]["lr"] == "${fit.epochs}"
    assert result["fit"]["data"]["positive_dir"] == "${fit.save_dir}/p"
    assert result["fit"]["data"]["negative_dir"] == "${fit.data.positive_dir}/n"
    assert result["collect"]["save_dir"] == "${oc.env:HOME}/${fit.data.path}"
    dirs = result["env"]["train"]["init_params"]["dirs"]
    assert dirs == ["${fit.save_dir}", {"a": "${reward.combine_mode}"}]


def test_a_value_in_place_of_a_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"reward\.model\.dropout cannot be set: 'big' stands where"):
        translate({"reward": {"model": "big", "resnet": {"dropout": 0.1}}})
