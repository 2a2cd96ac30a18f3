"""Composition through real Hydra: search path, groups, overrides, references and errors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from guerdon.config import ConfigError, GuerdonConfig, load_config, load_tree, to_plain
from guerdon.config.compose import PACKAGE_CONF
from guerdon.config.tabletop import TabletopConfig

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "embodiment" / "config"

Writer = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Write a config file into a folder of its own; returns the folder."""

    def _write(text: str, name: str = "mine.yaml") -> str:
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(tmp_path / "conf")

    return _write


def error_of(*args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def unknown(key: str, nearest: str) -> str:
    return f"unknown setting {key!r}: did you mean {nearest!r}?"


# ---------------------------------------------------------------------------------- what comes with Guerdon


def test_without_a_config_everything_is_the_schemas_default() -> None:
    assert load_config(None) == GuerdonConfig()


def test_the_collect_config_runs_a_scripted_policy_on_the_embedded_environment() -> None:
    config = load_config("collect")
    assert config.env.train.id == "guerdon/Tabletop-v0"
    assert config.env.train.num_envs == 16
    assert config.collect.policy == "scripted"
    assert config.collect.save_dir == "runs/collect/data"


def test_the_demo_config_keeps_its_data_apart() -> None:
    config = load_config("demo", ["runner.output_dir=/tmp/r"])
    assert config.collect.policy == "scripted"
    assert config.collect.save_dir == "/tmp/r/demo/data"


@pytest.mark.parametrize("file", sorted([*PACKAGE_CONF.glob("*.yaml"), *EXAMPLES.glob("*.yaml")]), ids=str)
def test_every_config_that_ships_composes_in_todays_spelling(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="guerdon")
    folder = None if file.parent == PACKAGE_CONF else str(file.parent)
    config = load_config(file.stem, config_path=folder)
    assert caplog.records == []
    on_tabletop = load_config(file.stem, ["env=tabletop"], config_path=folder)
    assert on_tabletop.env.train.id == on_tabletop.env.eval.id == "guerdon/Tabletop-v0"
    known = {field.name for field in fields(TabletopConfig)}
    assert on_tabletop.env.train.init_params.keys() <= known  # none of the simulator's
    assert (on_tabletop.collect, on_tabletop.fit) == (config.collect, config.fit)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_ours_state_differences_from_the_schema_only(file: Path) -> None:
    default = OmegaConf.create(to_plain(GuerdonConfig()))
    stated = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(stated, dict)
    stated.pop("defaults", None)
    for path, value in _leaves(stated):
        assert OmegaConf.select(default, path) != value, f"{path} repeats the default"


def _leaves(node: object, path: str = "") -> list[tuple[str, object]]:
    if not isinstance(node, dict):
        return [(path, node)]
    return [leaf for key, value in node.items() for leaf in _leaves(value, f"{path}.{key}".lstrip("."))]


def test_the_examples_mean_what_rlinfs_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODIED_PATH", "/e")
    collect = load_config("maniskill_collect_reward_data", config_path=str(EXAMPLES))
    assert collect.env.train.id == "PickCube-v1"
    assert collect.env.train.reward_render_mode == "always"
    assert collect.env.train.init_params["render_mode"] == "rgb_array"
    assert (collect.collect.save_dir, collect.collect.format) == ("/e/data", "pkl-episode")
    assert (collect.collect.target_success, collect.collect.target_failure) == (5000, 5000)

    classifier = load_config("train_reward_model", config_path=str(EXAMPLES))
    assert (classifier.reward.model.model_type, classifier.reward.model.arch) == (
        "binary_classifier",
        "resnet10",
    )
    assert classifier.reward.model.freeze_encoder == "auto"
    assert classifier.fit.save_dir == "runs/reward-model-training/checkpoints"

    resnet = load_config("maniskill_train_resnet_reward", config_path=str(EXAMPLES))
    assert resnet.reward.model.model_type == "resnet_reward"
    assert (resnet.fit.only, resnet.fit.global_batch_size, resnet.fit.data.path) == (True, 64, "/e/data")
    same = load_config(
        "maniskill_train_reward_model", ["runner.experiment_name=x"], config_path=str(EXAMPLES)
    )
    assert same.fit == resnet.fit


# -------------------------------------------------------------------------------------------- search path


def test_own_configs_use_the_packages_groups(write: Writer) -> None:
    folder = write("defaults:\n  - env: maniskill_pickcube\nenv:\n  train:\n    num_envs: 8\n")
    train = load_config("mine", config_path=folder).env.train
    assert (train.id, train.num_envs) == ("PickCube-v1", 8)
    train = load_config("mine", ["env=tabletop"], config_path=folder).env.train
    assert (train.id, train.num_envs, train.init_params) == ("guerdon/Tabletop-v0", 8, {})


def test_own_groups_and_configs_come_before_the_packages(write: Writer) -> None:
    write("train:\n  id: Mine-v0\n", "env/tabletop.yaml")
    folder = write("collect:\n  policy: random\n", "collect.yaml")
    assert load_config("collect", ["env=tabletop"], config_path=folder).env.train.id == "Mine-v0"
    assert load_config("collect", config_path=folder).collect.policy == "random"
    assert load_config("demo", config_path=folder).env.train.id == "guerdon/Tabletop-v0"


def test_a_config_can_be_named_by_its_file(write: Writer) -> None:
    folder = write("seed: 9\n")
    assert load_config(f"{folder}/mine.yaml").seed == 9
    assert load_config("mine.yaml", config_path=folder).seed == 9


def test_relative_config_paths_start_at_the_working_directory(
    write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(write("seed: 9\n"))
    monkeypatch.chdir(folder.parent)
    assert load_config("mine", config_path="conf").seed == 9
    assert load_config("mine", config_path="conf/").seed == 9


def test_a_folder_with_spaces_and_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine, (a=1)"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults:\n  - env: tabletop\nseed: 9\n")
    assert load_config("mine", config_path=str(folder)).seed == 9


def test_search_paths_of_the_user_are_kept(write: Writer, tmp_path: Path) -> None:
    (tmp_path / "more" / "env").mkdir(parents=True)
    (tmp_path / "more" / "env" / "other.yaml").write_text("train:\n  id: Other-v0\n")
    more = f"file://{tmp_path}/more"
    folder = write(f"hydra:\n  searchpath:\n    - {more}\ndefaults:\n  - env: other\n  - _self_\nseed: 1\n")
    assert load_config("mine", config_path=folder).env.train.id == "Other-v0"
    folder = write("defaults:\n  - env: tabletop\n  - _self_\nseed: 1\n", "plain.yaml")
    chosen = [f"hydra.searchpath=[{more}]", "env=other"]
    # The group exists in the package too, so the choice is Hydra's; the option is the user's.
    assert load_config("plain", chosen, config_path=folder).env.train.id == "Other-v0"


# ------------------------------------------------------------------------------------------------- groups


def test_a_group_that_no_defaults_list_names_is_laid_on_top(write: Writer) -> None:
    folder = write("env:\n  train:\n    id: PickCube-v1\n    num_envs: 8\nseed: 4\n")
    for choice in ("env=tabletop", "+env=tabletop", "++env=tabletop"):
        config = load_config("mine", [choice], config_path=folder)
        assert (config.env.train.id, config.env.train.num_envs, config.seed) == ("guerdon/Tabletop-v0", 8, 4)


def test_a_defaults_list_of_overrides_alone_loses_nothing_to_a_group(write: Writer) -> None:
    folder = write("defaults:\n  - override hydra/job_logging: stdout\nseed: 4\n")
    for overrides in ([], ["env=tabletop"], ["+env=tabletop"]):
        assert load_config("mine", overrides, config_path=folder).seed == 4


def test_an_experiment_group_of_the_user(write: Writer) -> None:
    write("# @package _global_\nfit:\n  epochs: 3\nreward:\n  mode: add\n", "experiment/short.yaml")
    folder = write("fit:\n  epochs: 50\n")
    config = load_config("mine", ["+experiment=short", "reward.combine_mode=weighted"], config_path=folder)
    assert config.fit.epochs == 3
    assert config.reward.combine_mode == "weighted"


def test_a_files_own_values_come_after_its_defaults_list_without_a_warning(
    write: Writer, recwarn: pytest.WarningsRecorder
) -> None:
    folder = write("defaults:\n  - collect\ncollect:\n  policy: random\n")
    assert load_config("mine", config_path=folder).collect.policy == "random"
    assert [str(warning.message) for warning in recwarn] == []


# ---------------------------------------------------------------------------------------------- overrides


def test_overrides_of_every_form(write: Writer) -> None:
    folder = write("collect:\n  policy: scripted\n  target_success: 5\n")
    config = load_config(
        "mine",
        [
            "collect.target_success=7",
            "+collect.cameras=[base_camera,wrist_camera]",
            "++fit.optim.lr=1e-3",
            "~collect.policy",
            "env.train.init_params={obs_mode:rgb,image_size:[32,32]}",
            "+env.train.init_params.decoy=true",
            "reward.model.checkpoint_path=./checkpoints/reward_model.pt",
            "runner.experiment_name='a b=c'",
            "collect.max_episodes=null",
        ],
        config_path=folder,
    )
    assert config.collect.target_success == 7
    assert config.collect.cameras == ("base_camera", "wrist_camera")
    assert config.fit.optim.lr == 1e-3
    assert config.collect.policy == "random"
    assert config.env.train.init_params == {"obs_mode": "rgb", "image_size": [32, 32], "decoy": True}
    assert config.reward.model.checkpoint_path == "./checkpoints/reward_model.pt"
    assert config.runner.experiment_name == "a b=c"
    assert config.collect.max_episodes is None


def test_an_override_in_an_older_spelling_beats_the_file_in_todays(write: Writer) -> None:
    folder = write("fit:\n  epochs: 50\n  optim:\n    lr: 1.0\n")
    config = load_config("mine", ["runner.max_epochs=3", "reward_training.lr=0.5"], config_path=folder)
    assert (config.fit.epochs, config.fit.optim.lr) == (3, 0.5)


def test_overrides_of_hydras_own_settings_change_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("demo", ["hydra.run.dir=out", "hydra/job_logging=disabled"]) == load_config("demo")
    assert list(tmp_path.iterdir()) == []


def test_the_values_of_hydra_overrides_reach_references(write: Writer) -> None:
    folder = write("reward:\n  save_dir: ${runner.output_dir}/${runner.experiment_name}/c\n")
    config = load_config("mine", ["runner.output_dir=/o"], config_path=folder)
    assert config.fit.save_dir == "/o/default/c"


# ---------------------------------------------------------------------------------------------- references


def test_references_to_defaults_environment_and_each_other(
    write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_EPISODES", "12")
    folder = write(
        "collect:\n"
        "  save_dir: ${oc.env:NOT_SET,/fallback}/data\n"
        "  target_success: ${oc.env:MY_EPISODES}\n"
        "fit:\n"
        "  data:\n"
        "    path: ${collect.save_dir}\n"
        "    image_keys: ${reward.model.image_keys}\n"
    )
    config = load_config("mine", config_path=folder)
    assert config.collect.save_dir == config.fit.data.path == "/fallback/data"
    assert config.collect.target_success == 12
    assert config.fit.data.image_keys == ("base_camera",)


def test_a_missing_environment_variable_is_named(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBODIED_PATH", raising=False)
    folder = write('reward_data_collection:\n  save_dir: "${oc.env:EMBODIED_PATH}/data"\n')
    assert error_of("mine", config_path=folder) == (
        "collect.save_dir needs the environment variable EMBODIED_PATH, which is not set: "
        "export EMBODIED_PATH=... or override collect.save_dir"
    )
    config = load_config("mine", ["collect.save_dir=/d"], config_path=folder)
    assert config.collect.save_dir == "/d"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "${runner.outputdir}",
            "collect.save_dir refers to ${runner.outputdir}, which does not exist: "
            "did you mean ${runner.output_dir}?",
        ),
        ("${nonsense:1}", "collect.save_dir: Unsupported interpolation type nonsense"),
        ("???", "collect.save_dir is mandatory: give it text"),
    ],
)
def test_references_that_lead_nowhere(write: Writer, value: str, message: str) -> None:
    assert error_of("mine", config_path=write(f"collect:\n  save_dir: {value}\n")) == message


# -------------------------------------------------------------------------------------------------- errors


def test_a_missing_config_lists_what_there_is(write: Writer) -> None:
    place = "guerdon/conf" if Path.cwd() == REPOSITORY else PACKAGE_CONF
    names = "available: collect, demo, demo_fit, demo_train, "
    names += "maniskill_rlpd_learned_reward, teleop, train, train_from_images, train_reward, "
    names += "train_rgb, train_without_demonstrations"
    assert error_of("colect") == f"no config 'colect' in {place}: did you mean 'collect'? {names}"
    message = error_of("minne", config_path=write("seed: 1\n"))
    names = "collect, demo, demo_fit, demo_train, "
    names += "maniskill_rlpd_learned_reward, mine, teleop, train, train_from_images, train_reward, "
    names += "train_rgb, train_without_demonstrations"
    assert f"did you mean 'mine'? available: {names}" in message


def test_an_unknown_option_of_a_group_lists_the_options() -> None:
    expected = (
        "env has no option 'tabeltop': did you mean 'tabletop'? available: maniskill_pickcube, "
        "maniskill_pickcube_sparse, tabletop"
    )
    assert error_of("demo", ["env=tabeltop"]) == expected
    assert error_of(None, ["env=tabeltop"]) == expected


def test_a_defaults_list_that_names_a_missing_config(write: Writer) -> None:
    folder = write("defaults:\n  - colect\n")
    assert error_of("mine", config_path=folder).startswith("no config 'colect': did you mean 'collect'?")


def test_an_unknown_group_is_an_unknown_setting() -> None:
    assert error_of("demo", ["evn=tabletop"]) == "unknown setting 'evn': did you mean 'env'?"


def test_a_folder_that_does_not_exist() -> None:
    assert error_of("demo", config_path="/no/such") == "config path /no/such is not a folder"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("seed: 1\nfit: [1\nrunner: 2\n", 3, "expected ',' or ']'"),
        ("seed: 1\nseed: 2\n", 2, "found duplicate key seed"),
        ("seed: 1\n\tfit: 2\n", 2, "found character '\\t'"),
    ],
)
def test_invalid_yaml_is_shown_with_file_and_line(write: Writer, text: str, line: int, problem: str) -> None:
    message = error_of("mine", config_path=write(text))
    assert f"mine.yaml, line {line}: not valid YAML: {problem}" in message
    assert "\n" not in message


def test_invalid_yaml_in_a_group(write: Writer) -> None:
    write("train: [1\n", "env/broken.yaml")
    message = error_of("mine", ["env=broken"], config_path=write("seed: 1\n"))
    assert "broken.yaml, line 2: not valid YAML" in message


def test_a_list_instead_of_a_config(write: Writer) -> None:
    message = error_of("mine", config_path=write("- 1\n- 2\n"))
    assert message.endswith("mine.yaml holds a list: a config is made of key: value lines")


@pytest.mark.parametrize(
    "override", ["fit.epochs=1,2", "fit.epochs=range(1,3)", "env=tabletop,maniskill_pickcube"]
)
def test_sweeps_are_refused(override: str) -> None:
    key = override.partition("=")[0]
    assert error_of("demo", [override]) == (
        f"override {override!r} is a sweep over several values, which is not supported: "
        f"start one run per value, or write {key}=[...] for a list"
    )


@pytest.mark.parametrize("override", ["fit.epochs", "=3", "a=b=c", "fit.epochs=[1", "--debug"])
def test_an_override_that_cannot_be_read(override: str) -> None:
    message = error_of("demo", [override])
    assert message.startswith(f"cannot read the override {override!r} (")
    assert "it must look like key=value" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("collect.targetsuccess=3", unknown("collect.targetsuccess", "collect.target_success")),
        ("reward.hidden_dim=3", unknown("reward.hidden_dim", "reward.model.hidden_dim")),
        ("reward.reward_model.hiden_dim=3", unknown("reward.model.hiden_dim", "reward.model.hidden_dim")),
        ("env=3", "env must be a section with keys, not 3 (int)"),
        ("fit.epochs=ten", "fit.epochs must be a whole number, not 'ten'"),
        ("engine=rya", "engine must be one of 'local', 'ray', not 'rya' (did you mean 'ray'?)"),
        ("env.train.num_envs=0", "env.train.num_envs must be a whole number at least 1, not 0 (int)"),
        ("collect=3", "collect must be a section with keys, not 3 (int)"),
        ("~collect.enabled", "~collect.enabled: there is nothing to remove, collect.enabled is not set"),
    ],
)
def test_a_wrong_override_is_answered_in_one_line(override: str, message: str) -> None:
    assert error_of("demo", [override]) == message


# ------------------------------------------------------------------------------------- Hydra's global state


def test_hydras_state_and_the_working_directory_are_as_before(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "theirs.yaml").write_text("x: 1\n")
    here = os.getcwd()  # noqa: PTH109
    with initialize_config_dir(str(tmp_path), version_base="1.2"):
        assert load_config("demo").runner.experiment_name == "demo"
        with pytest.raises(ConfigError):
            load_config("missing")
        assert compose("theirs") == {"x": 1}
    assert not GlobalHydra.instance().is_initialized()
    load_config("demo")
    assert not GlobalHydra.instance().is_initialized()
    assert os.getcwd() == here  # noqa: PTH109


def test_configs_can_be_loaded_from_several_threads() -> None:
    results: list[int] = []

    def load(seed: int) -> None:
        results.append(load_config("demo", [f"seed={seed}", "env=tabletop"]).seed)

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(6))


def test_importing_the_settings_does_not_import_hydra() -> None:
    code = "import guerdon.config, sys; print('hydra' in sys.modules, 'omegaconf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ----------------------------------------------------------------------------------- notices, trees, saving


def test_all_translations_are_logged_in_one_line(write: Writer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="guerdon")
    folder = write("reward:\n  mode: add\n  reward_model:\n    image_keys: [a]\n    hidden_dim: 8\n")
    load_config("mine", ["runner.max_epochs=2"], config_path=folder)
    assert [record.getMessage() for record in caplog.records] == [
        "config: older spellings translated: reward.mode -> reward.combine_mode, "
        "reward.reward_model.* -> reward.model.*, runner.max_epochs -> fit.epochs, "
        "reward.reward_model implies reward.model.model_type=binary_classifier, "
        "reward.reward_model implies reward.model.arch=resnet10"
    ]


def test_a_tree_is_loaded_without_files() -> None:
    config = load_tree({"reward": {"mode": "add"}, "hydra": {"x": 1}}, ["fit.epochs=3"])
    assert (config.reward.combine_mode, config.fit.epochs) == ("add", 3)
    assert load_tree({"defaults": ["_self_", {"override hydra/job_logging": "stdout"}], "seed": 2}).seed == 2
    with pytest.raises(ConfigError, match="the defaults list names another config"):
        load_tree({"defaults": [{"env": "tabletop"}]})
    with pytest.raises(ConfigError, match="'env=tabletop' chooses a config group"):
        load_tree({}, ["env=tabletop"])


def test_a_saved_config_loads_to_the_same_config_without_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_tree(
        {
            "reward": {
                "reward_model": {"num_spatial_blocks": 4, "use_pretrain": False},
                "reward_threshold": 0.6,
            },
            "cluster": {
                "component_placement": {
                    "actor": "0-0",
                    "env": 1,
                    "reward": {"node_group": "gpu", "placement": 0},
                },
                "node_groups": [{"label": "gpu", "node_ranks": "0-1"}],
            },
            "env": {"train": {"init_params": {"cameras": ["a", "b"], "nested": {"x": None}}}},
        }
    )
    caplog.set_level(logging.INFO, logger="guerdon")
    caplog.clear()  # what the older spellings above were translated to
    OmegaConf.save(OmegaConf.create(to_plain(config)), tmp_path / "config.yaml")
    assert load_config("config", config_path=str(tmp_path)) == config
    assert load_tree(to_plain(config)) == config
    assert caplog.records == []
