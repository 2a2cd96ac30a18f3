"""Config files within limits: whatever is in them, an answer comes soon, and names the file."""

import tracemalloc
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from guerdon.config import GuerdonConfig, load_config, load_tree, to_plain
from guerdon.config.load import load_serial
from guerdon.config.yaml_files import MAX_BYTES, check_file, check_references, to_yaml
from guerdon.core.errors import ConfigError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
LONG_TEXT = f"text: &t '{'x' * 1000}'\nlist: [{', '.join(['*t'] * 5000)}]\n"
REFERENCES = "a: xxxxxxxxxx\n" + "".join(
    f"{name}: {'${' + before + '}'}{'${' + before + '}'}{'${' + before + '}'}{'${' + before + '}'}\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)
HOSTILE = {
    "alias bomb": (BOMB, "entries, with those that aliases repeat"),
    "merge bomb": (MERGES, "entries, with those that aliases repeat"),
    "repeated text": (LONG_TEXT, "entries, with those that aliases repeat"),
    "self-reference": ("runner: &r {logger: *r}\n", r"line 1: \*r stands inside of what it repeats"),
    "deep": ("seed: " + "[" * 5000 + "]" * 5000, "nested more than 32 deep"),
    "deep sections": ("".join(f"{' ' * n}a:\n" for n in range(300)), "nested more than 32 deep"),
    "many": ("seed: [" + "1," * 12_000 + "]", "more than 10000 entries"),
    "huge number": ("seed: " + "9" * 5000, "a value of 5000 characters"),
    "bad number": ("seed: !!int x", "is no config: invalid literal"),
    "no int": ("seed: !!int", "line 1: '' with the tag !!int is no number"),
    "no int in quotes": ('seed: !!int ""', "line 1: '' with the tag !!int is no number"),
    "sign alone": ("seed: !!int '-'", "line 1: '-' with the tag !!int is no number"),
    "no digits": (
        "seed: 1\nfit: {optim: {lr: !!float __}}",
        "line 2: '__' with the tag !!float is no number",
    ),
    "no float": ("seed: !!float", "line 1: '' with the tag !!float is no number"),
    "bad float": ("seed: !!float 1e", "is no config: could not convert"),
    "bad bool": ("seed: !!bool maybe", "is no config: 'maybe'"),
    "base 60": ("seed: !!int '1:'", "is no config: invalid literal"),
    "large base 60": (f"seed: !!float '1{':0' * 5000}'", "a value of 10001 characters"),
    "binary": ("seed: !!binary x", "the tag .* is not known"),
    "list as a number": ("seed: !!int [1]", "line 1: not valid YAML: expected a scalar node"),
    "python object": ("seed: !!python/object/apply:os.getcwd []", "the tag .* is not known"),
    "timestamp": ("seed: !!timestamp 2001-99-99", "the tag .* is not known"),
    "syntax": ("seed: [1", "not valid YAML"),
    "large": ("#" * (MAX_BYTES + 1), "larger than 128 KiB"),
    "circle of references": ("runner: {output_dir: '${runner.output_dir}'}", "output_dir refers to itself"),
    "circle of sections": ("runner: {logger: '${runner}'}", "runner refers to itself"),
    "reference bomb": (REFERENCES, "too large when its references"),
    "long reference": ("seed: '" + "${" * 400 + "}" * 400 + "'", "at most 300 characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path, name):
    text, reason = HOSTILE[name]
    (tmp_path / "input.yaml").write_text(text)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config("input", (), str(tmp_path))
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    if "reference" not in reason and "refers" not in reason:
        assert "input.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        "seed: 1\n".encode("utf-16"),
        "seed: 1 # Größe\n".encode("latin-1"),
        b"\x00\xff\x80",
        b"seed: \xed\xa0\x80",
    ],
    ids=["utf-16", "latin-1", "binary", "surrogate"],
)
def test_other_encodings_are_refused_by_name(tmp_path, data):
    (tmp_path / "input.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=r"input\.yaml(, line 1)?( is not text in UTF-8|: not valid YAML)"):
        load_config("input", (), str(tmp_path))


def test_files_that_others_name_are_checked_too(tmp_path):
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner/mine.yaml").write_text(BOMB)
    (tmp_path / "input.yaml").write_text("defaults: [learner: mine, _self_]\n")
    with pytest.raises(ConfigError, match=r"learner/mine\.yaml, line \d+: more than 10000 entries"):
        load_config("input", (), str(tmp_path))
    (tmp_path / "zoo.yaml").write_text(BOMB)
    with pytest.raises(ConfigError, match=r"zoo\.yaml"):
        load_serial(str(tmp_path / "zoo.yaml"))


def test_what_people_write_is_read(tmp_path):
    (tmp_path / "input.yaml").write_text(
        "# Größe\nenv:\n  train: &e {num_envs: 3, init_params: {image_size: [24, 24]}}\n"
        "  eval: {<<: *e, num_envs: 2}\n"
        "runner: {experiment_name: demo, output_dir: 'runs/${runner.experiment_name}/${seed}'}\n"
        "fit: {save_dir: '${oc.env:NOT_SET_ANYWHERE,${runner.output_dir}}'}\n"
    )
    config = load_config("input", ["seed=7"], str(tmp_path))
    assert config.env.eval.num_envs == 2 and config.env.eval.init_params == {"image_size": [24, 24]}
    assert config.runner.output_dir == config.fit.save_dir == "runs/demo/7"
    for file in Path(__file__).parent.glob("documents/*.yaml"):
        check_file(file)


def test_references_that_are_put_together_are_counted():
    tree = {"which": "a", "a": {"x": 1}, "b": "${a.${which}}", "c": ["${.1}", "y"]}
    assert check_references(tree) == 2 and check_references({"a": "$ {b}", "b": 1}) == 0
    with pytest.raises(ConfigError, match="refers to itself"):
        check_references({"a": {"x": "${a.${which}}"}, "which": "x"})
    with pytest.raises(ConfigError, match="refers to itself"):
        check_references({"a": {"x": "${..a}"}})


def test_settings_from_python_that_contain_themselves_are_refused():
    tree: dict = {"runner": {}}
    tree["runner"]["logger"] = tree
    with pytest.raises(ConfigError, match="contain themselves"):
        load_tree(tree)


def test_settings_are_written_as_omegaconf_writes_and_reads_them():
    texts = ["1e-3", "1", "1_000", "nan", "yes", "null", "~", "", "a: b", "# x", "- y", "Größe", "1:30"]
    texts += ["${seed}", "'q'", "two\nlines", "x" * 200 + " " + "y" * 200, "2026-11-18", "0x1F", "*a"]
    same = [1, 2]
    values = [1e-3, 1e22, float("inf"), 0, -1, True, None, [], {}, same, same]
    tree = {**to_plain(GuerdonConfig()), "texts": texts, "values": values, "1": {2: "x"}}
    written = to_yaml(tree)
    assert written == OmegaConf.to_yaml(OmegaConf.create(tree))
    assert OmegaConf.to_container(OmegaConf.create(written)) == tree


def test_what_an_override_gave_may_be_changed():
    """Overrides are parsed once; what one config does with a list is not seen by the next."""
    override = "+env.train.init_params.image_size=[24,24]"
    first = load_config(None, [override]).env.train.init_params["image_size"]
    first.append(1)
    assert load_config(None, [override]).env.train.init_params["image_size"] == [24, 24]
