"""Plain containers to dataclasses: values that fit, and what the errors say about those that do not."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import pytest

from guerdon.config import ConfigError, GuerdonConfig, build, flatten_keys, to_plain
from guerdon.config.limits import Fraction, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Wheel:
    size: PositiveInt = 20
    spokes: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Bike:
    name: str
    gears: int = 1
    weight: float = 10.5
    folded: bool = False
    load: Fraction = 0.5
    kind: Literal["road", "city"] = "road"
    lock: bool | Literal["auto"] = "auto"
    owner: str | None = None
    front: Wheel = field(default_factory=Wheel)
    spare: Wheel | None = None
    frame: tuple[int, int, int] = (1, 2, 3)
    tags: tuple[str, ...] = ()
    parts: dict[str, str | int | Wheel] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def error_of(data: Any, cls: type = Bike, path: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        build(cls, data, path)
    return str(caught.value)


def test_absent_keys_keep_their_defaults() -> None:
    assert build(Bike, {"name": "a"}) == Bike(name="a")


def test_every_kind_of_field_is_built_with_its_type() -> None:
    bike = build(
        Bike,
        {
            "name": "a",
            "gears": 7,
            "weight": 9,
            "folded": True,
            "load": "1e-2",
            "kind": "city",
            "lock": False,
            "owner": "me",
            "front": {"size": 28, "spokes": [1, 2]},
            "spare": {"size": 26},
            "frame": [4, 5, 6],
            "tags": ["x", "y"],
            "parts": {"bell": "brass", "pump": 2, "back": {"size": 27}},
            "notes": {"any": {"thing": [1, None, "z"]}},
        },
    )
    assert (bike.gears, bike.weight, bike.folded, bike.load, bike.kind, bike.lock) == (
        7,
        9.0,
        True,
        0.01,
        "city",
        False,
    )
    assert isinstance(bike.weight, float)
    assert bike.front == Wheel(size=28, spokes=[1, 2])
    assert bike.spare == Wheel(size=26)
    assert (bike.frame, bike.tags) == ((4, 5, 6), ("x", "y"))
    assert bike.parts == {"bell": "brass", "pump": 2, "back": Wheel(size=27)}
    assert bike.notes == {"any": {"thing": [1, None, "z"]}}


def test_null_is_an_empty_section_but_not_a_value() -> None:
    assert build(Bike, {"name": "a", "front": None, "spare": None, "notes": None}) == Bike(name="a")
    assert error_of({"name": "a", "gears": None}) == "gears must be a whole number, not null"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"gears": True}, "gears must be a whole number, not true (bool)"),
        ({"gears": 3.5}, "gears must be a whole number, not 3.5 (float)"),
        ({"gears": "many"}, "gears must be a whole number, not 'many'"),
        ({"weight": True}, "weight must be a number, not true (bool)"),
        ({"weight": "heavy"}, "weight must be a number, not 'heavy'"),
        ({"weight": float("nan")}, "weight must be a number, not nan (float)"),
        ({"weight": [1.0]}, "weight must be a number, not [1.0] (list)"),
        ({"folded": 1}, "folded must be true or false, not 1 (int)"),
        ({"folded": "yes"}, "folded must be true or false, not 'yes'"),
        ({"name": 12}, "name must be text, not 12 (int) (put it in quotes)"),
        ({"load": 1.5}, "load must be a number from 0 to 1, not 1.5 (float)"),
        ({"front": {"size": 0}}, "front.size must be a whole number at least 1, not 0 (int)"),
        ({"front": "big"}, "front must be a section with keys, not 'big'"),
        ({"kind": "rood"}, "kind must be one of 'road', 'city', not 'rood' (did you mean 'road'?)"),
        ({"lock": "autos"}, "lock must be true or false or 'auto', not 'autos' (did you mean 'auto'?)"),
        ({"lock": 1}, "lock must be true or false or 'auto', not 1 (int)"),
        ({"owner": "None"}, None),
        ({"spare": "None"}, "spare must be a section with keys or null, not 'None' (write null)"),
        (
            {"frame": [1, 2]},
            "frame must be a list of 3 entries, each a whole number, not [1, 2] (list)",
        ),
        ({"frame": [1, 2, "x"]}, "frame[2] must be a whole number, not 'x'"),
        ({"tags": "x"}, "tags must be a list, not 'x' (write [x])"),
        ({"tags": ["x", 3]}, "tags[1] must be text, not 3 (int) (put it in quotes)"),
        ({"front": {"spokes": [1, "b"]}}, "front.spokes[1] must be a whole number, not 'b'"),
        (
            {"parts": {"bell": 1.5}},
            "parts.bell must be text or a whole number or a section with keys, not 1.5 (float)",
        ),
        (
            {"parts": {"back": {"size": -1}}},
            "parts.back.size must be a whole number at least 1, not -1 (int)",
        ),
        ({"gears": "???"}, "gears is mandatory: give it a whole number"),
    ],
)
def test_a_wrong_value_is_named_with_path_expected_type_and_value(data: Any, message: str | None) -> None:
    if message is None:  # text that only looks like null
        assert build(Bike, {"name": "a", **data}).owner == "None"
    else:
        assert error_of({"name": "a", **data}) == message


def test_whole_numbers_from_environment_variables_are_text_and_accepted() -> None:
    assert build(Bike, {"name": "a", "gears": "12"}).gears == 12
    assert error_of({"name": "a", "gears": "1.2"}) == "gears must be a whole number, not '1.2'"


def test_a_field_without_default_must_be_given() -> None:
    assert error_of({}) == "name is missing: give it text"
    assert error_of({}, path="garage.bike") == "garage.bike.name is missing: give it text"


def test_something_other_than_a_section_at_the_root() -> None:
    assert error_of([1]) == "the config must be a section with keys, not [1] (list)"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"gear": 3}, "unknown setting 'gear': did you mean 'gears'?"),
        ({"front": {"sise": 3}}, "unknown setting 'front.sise': did you mean 'front.size'?"),
        ({"size": 3}, "unknown setting 'size': did you mean 'front.size' or 'spare.size'?"),
        ({"front": {"gears": 3}}, "unknown setting 'front.gears': did you mean 'gears'?"),
        ({"front": {"qqq": 3}}, "unknown setting 'front.qqq'; known here: size, spokes"),
        ({"front": {True: 3}}, "unknown setting 'front.True'; known here: size, spokes"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(data: Any, message: str) -> None:
    assert error_of({"name": "a", **data}) == message


@pytest.mark.parametrize(
    ("data", "nearest"),
    [
        ({"reward": {"hidden_dim": 64}}, "'reward.model.hidden_dim'"),
        ({"fit": {"lr": 1.0}}, "'fit.optim.lr'"),
        ({"fit": {"data": {"image_size": [3, 4, 4]}}}, "'reward.model.image_size'"),
        ({"env": {"num_envs": 4}}, "'env.train.num_envs' or 'env.eval.num_envs'"),
        ({"reward": {"reward_treshold": 0.5}}, "'reward.reward_threshold'"),
        ({"runners": {}}, "'runner'"),
        ({"fit": {"image_keys": []}}, "'fit.data.image_keys'"),
    ],
)
def test_a_misplaced_key_is_found_elsewhere_in_the_real_tree(data: Any, nearest: str) -> None:
    assert f": did you mean {nearest}" in error_of(data, GuerdonConfig)


def test_the_path_argument_prefixes_errors_and_suggestions() -> None:
    assert (
        error_of({"name": "a", "sizes": 1}, path="env.bike")
        == "unknown setting 'env.bike.sizes': did you mean 'env.bike.front.size' or 'env.bike.spare.size'?"
    )


def test_to_plain_holds_plain_containers_only_and_builds_back() -> None:
    bike = Bike(name="a", spare=Wheel(size=3), tags=("x",), parts={"back": Wheel()}, notes={"k": (1, 2)})
    plain = to_plain(bike)
    assert plain["spare"] == {"size": 3, "spokes": []}
    assert plain["tags"] == ["x"]
    assert plain["parts"] == {"back": {"size": 20, "spokes": []}}
    assert plain["notes"] == {"k": [1, 2]}
    assert build(Bike, plain).spare == bike.spare
    assert build(GuerdonConfig, to_plain(GuerdonConfig())) == GuerdonConfig()


def test_free_sections_are_copied() -> None:
    notes = {"k": [1]}
    bike = build(Bike, {"name": "a", "notes": notes})
    notes["k"].append(2)
    assert bike.notes == {"k": [1]}


def test_flatten_keys_lists_settings_and_on_demand_sections() -> None:
    keys = flatten_keys(Bike)
    assert keys[:3] == ["name", "gears", "weight"]
    assert "front.size" in keys and "spare.size" in keys
    assert "front" not in keys
    assert "front" in flatten_keys(Bike, sections=True)


def test_every_setting_has_a_comment_under_it_and_a_default() -> None:
    import ast
    import inspect

    from guerdon.config import schema, schema_reward

    undocumented = []
    for module in (schema, schema_reward):
        for node in ast.parse(inspect.getsource(module)).body:
            if not isinstance(node, ast.ClassDef):
                continue
            cls = getattr(module, node.name)
            sections = {item.name for item in fields(cls) if is_dataclass(item.default_factory)}
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if not documented and statement.target.id not in sections:
                    undocumented.append(f"{node.name}.{statement.target.id}")
    assert undocumented == []
