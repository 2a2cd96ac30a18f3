"""Settings check themselves, however they are made: by `build`, from Python, by `dataclasses.replace`."""

import dataclasses
import importlib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import guerdon.config
from guerdon.config import FitConfig, GuerdonConfig, RewardConfig, RewardModelConfig, build
from guerdon.config.build import Checked, _members
from guerdon.config.limits import NameOrPlugin, Range
from guerdon.core.errors import ConfigError
from guerdon.rewards.zoo.gail import GAILSettings

FILES = [*Path(guerdon.config.__file__).parent.glob("schema*.py"), Path("tabletop.py"), Path("maniskill.py")]
NEEDED = {"HardwareConfig": {"type": "Franka"}, "RobotEnvConfig": {"robot_ip": "127.0.0.1"}}


def sections():
    for file in sorted(FILES):
        module = importlib.import_module(f"guerdon.config.{file.stem}")
        for name, cls in vars(module).items():
            if is_dataclass(cls) and cls.__module__ == module.__name__:
                yield pytest.param(cls, id=name)


def wrong_values(hint):
    """Values that a field of this type must refuse: another choice, and a number beyond a limit."""
    for member in _members(hint):
        if get_origin(member) is Literal:
            yield "nonsense"
        if get_origin(member) is Annotated:
            base, *limits = get_args(member)
            for limit in limits:
                if isinstance(limit, NameOrPlugin):
                    yield "nonsense"
                    continue
                assert isinstance(limit, Range)
                yield base(-1 if limit.high is None else limit.high + 1)


@pytest.mark.parametrize("cls", list(sections()))
def test_every_choice_and_limit_of_every_section_is_enforced(cls):
    assert issubclass(cls, Checked)
    needed = NEEDED.get(cls.__name__, {})
    valid = cls(**needed)
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        for value in wrong_values(hints[item.name]):
            for make in (
                lambda bad: cls(**{**needed, **bad}),
                lambda bad: replace(valid, **bad),
                lambda bad: build(cls, {**needed, **bad}),
            ):
                with pytest.raises(ConfigError, match=item.name):
                    make({item.name: value})


def test_the_mistakes_of_everyday_life():
    for settings, message in (
        ({"reward_type": "contnuous"}, r"RewardConfig\.reward_type .*did you mean 'continuous'\?"),
        ({"combine_mode": "replce"}, r"RewardConfig\.combine_mode .*did you mean 'replace'\?"),
        (
            {"reward_threshold": 5.0},
            r"reward_threshold must be .* from 0 to 1 or 'calibrated', not 5\.0",
        ),
        ({"reward_threshold": float("nan")}, "reward_threshold must be a number"),
        ({"success_reward": float("inf")}, "success_reward must be a number, not inf"),
        ({"reward_weight": "-inf"}, "reward_weight must be a number, not '-inf'"),
        ({"success_reward": 10**5000}, "success_reward must be a number, not a number with too many digits"),
        ({"model": {"image_keys": "x" * 9000}}, r"must be a list, not 'x{76}\.\.\.$"),
        ({"success_reward": "much"}, "success_reward must be a number, not 'much'"),
        ({"use_reward_model": "yes"}, "use_reward_model must be true or false"),
        ({"model": "runs/model"}, "RewardConfig.model must be a section with keys, not 'runs/model'"),
        ({"model": FitConfig()}, "RewardConfig.model must be a section"),
        ({"model": {"arch": "resnet19"}}, r"RewardConfig\.model\.arch .*did you mean 'resnet1[08]'"),
    ):
        with pytest.raises(ConfigError, match=message):
            RewardConfig(**settings)
        with pytest.raises(ConfigError, match=message):
            replace(RewardConfig(), **settings)
    with pytest.raises(ConfigError, match=r"GuerdonConfig\.reward must be a section"):
        GuerdonConfig(reward="on")
    with pytest.raises(ConfigError, match=r"GAILSettings\.lr must be a number at least"):
        GAILSettings(lr=-1.0)


def test_what_is_right_in_another_form_is_taken():
    model = RewardModelConfig(
        checkpoint_path=Path("a/b"), image_keys=["x"], width=np.int64(8), image_size=np.array([3, 8, 8]),
        dropout=np.float32(0.5), normalize=np.bool_(False),
    )  # fmt: skip
    expected = {"checkpoint_path": "a/b", "image_keys": ("x",), "width": 8, "image_size": (3, 8, 8)}
    assert {name: getattr(model, name) for name in expected} == expected
    assert type(model.width) is int and model.dropout == 0.5 and model.normalize is False
    hash(model)  # frozen, and made of what cannot change
    assert RewardConfig(model={"width": 16}).model == RewardModelConfig(width=16)
    assert RewardConfig(model=model).model is model


def test_all_sections_of_a_tree_are_its_own_checked_classes():
    def walk(section):
        assert isinstance(section, Checked)
        for item in fields(section):
            value = getattr(section, item.name)
            if dataclasses.is_dataclass(value):
                walk(value)

    walk(GuerdonConfig())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "reward.model.width=100000",
            r"model\.width must be a whole number from 1 to 256 \(weights grow",
        ),
        ("reward.model.image_size=[3,100000,8]", r"from 1 to 1024 \(larger frames are resized"),
        ("reward.model.hidden_dim=10000000", r"hidden_dim must be a whole number from 1 to 8192"),
        ("reward.model.num_members=100000", r"num_members must be a whole number from 1 to 256"),
        ("reward.model.num_frames=100000", r"num_frames must be a whole number from 1 to 256"),
        (
            "reward.model.num_spatial_blocks=100000",
            r"num_spatial_blocks must be a whole number from 1 to 256",
        ),
        ("learner.network.hidden=[256,10000000]", r"hidden\[1\] must be a whole number from 1 to 8192"),
        ("learner.network.image_features=10000000", r"image_features must be a whole number from 1 to 8192"),
    ],
)
def test_sizes_that_would_eat_the_machine_are_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        guerdon.config.load_config("train", [override])


def test_the_largest_published_sizes_are_taken():
    sizes = ["reward.model.width=64", "reward.model.arch=resnet152", "reward.model.image_size=[3,518,518]"]
    config = guerdon.config.load_config("train", [*sizes, "learner.network.hidden=[4096,4096]"])
    assert (config.reward.model.width, config.reward.model.image_size) == (64, (3, 518, 518))
    assert config.learner.network.hidden == (4096, 4096)
