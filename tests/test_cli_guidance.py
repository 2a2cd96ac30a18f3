"""What the command tells its user: help by stage, the next command, where settings come from, completion."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

import guerdon
from guerdon.cli.completion import words_of
from guerdon.cli.main import GROUPS, VERBS, main
from guerdon.cli.parser import STAGES, parse
from guerdon.cli.verb import next_command, setting
from guerdon.config import load_config, to_plain
from guerdon.config.load import load_serial
from guerdon.config.origins import explain_config
from guerdon.data.formats import FORMATS
from tests.fit.synthetic import write_store


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_every_verb_once_under_its_stage(capsys):
    text = help_of(capsys)
    start = text.partition(f"\n{STAGES['start']}:\n")[0]
    assert guerdon.__doc__.splitlines()[0] in start and "__all__" not in start  # no notes for developers
    headings = [text.index(f"\n{heading}:\n") for heading in STAGES.values()]
    assert headings == sorted(headings)
    sections = dict(
        zip(STAGES, re.split("|".join(f"{h}:\n" for h in STAGES.values()), text)[1:], strict=True)
    )
    for verb in VERBS:
        places = [stage for stage, part in sections.items() if f"\n  {verb.name} " in f"\n{part}"]
        assert places == [verb.stage]
        assert f"$ {verb.example}\n" in sections[verb.stage]
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_example_of_a_verb_is_a_command_that_the_parser_takes(verb, capsys):
    words = shlex.split(verb.example.removeprefix('eval "$(').removesuffix(')"'))
    assert words[0] == "guerdon"
    parsed = parse(words[1:], VERBS, GROUPS)
    assert parsed.verb is verb
    if verb.name.startswith("data "):
        assert getattr(parsed, "to", "native") in FORMATS  # a format that there is
    assert f"example: {verb.example}" in help_of(capsys, *verb.name.split())


def test_a_group_lists_its_actions(capsys):
    text = help_of(capsys, "data")
    assert "usage: guerdon data [-h] ACTION ..." in text
    assert "$ guerdon data audit DATA" in text and "train-reward" not in text


def test_the_next_command_goes_to_stderr_and_not_beside_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "my data")
    code, out, err = run(capsys, "data", "convert", "my data", "copy", "--to", "native")
    assert (code, err) == (0, "next: guerdon data audit copy\n")
    assert "next:" not in out
    code, out, err = run(capsys, "data", "convert", "my data", "copy2", "--to", "native", "--json")
    assert (code, err) == (0, "") and json.loads(out)["num_episodes"] > 0


def test_the_next_command_after_collecting_fits_what_was_collected(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["env.train.num_envs=4", "env.train.init_params.image_size=[16,16]", "collect.target_success=1"]
    code, _, err = run(capsys, "collect", *options, "collect.target_failure=1", 'collect.save_dir="a b"')
    assert code == 0
    (line,) = [line for line in err.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: "))
    assert words[:2] == ["guerdon", "train-reward"]
    assert load_config("train_reward", words[2:]).fit.data.path == "a b"


@pytest.mark.parametrize(
    "path", ["data", "runs/x-1/data", "with space", 'quo"te', "a,b=c", "back\\slash", "end\\", 'q\\"', "$x"]
)
def test_a_path_in_a_command_arrives_as_it_is(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = next_command("train-reward", setting("fit.data.path", tmp_path / path))
    given = shlex.split(line)[2]
    assert load_config("train_reward", [given]).fit.data.path == path


def test_check_ends_with_what_to_do_next(capsys, monkeypatch):
    from guerdon.cli import check

    monkeypatch.setattr(check, "check_installation", lambda: [check.Part("torch", True, False, "2")])
    code, _, err = run(capsys, "check")
    assert (code, err.startswith("next: guerdon demo")) == (0, True)
    monkeypatch.setattr(check, "check_installation", lambda: [check.Part("torch", False, False, "broken")])
    code, out, err = run(capsys, "check")
    assert (code, "FAILED" in out) == (1, True)
    assert "pip install" in err and "torch" in err and "demo" not in err


def test_check_names_the_command_for_every_extra_that_is_missing(monkeypatch):
    from guerdon.cli import check

    def version(distribution):
        if distribution in check.CORE:
            return "1.0"
        raise check.PackageNotFoundError(distribution)

    monkeypatch.setattr(check, "version", version)
    parts = {part.name: part for part in check.check_installation()}
    for extra in check.EXTRAS:
        assert not parts[extra].ok and parts[extra].optional
        assert parts[extra].detail.endswith(f"pip install 'guerdon[{extra}]'")


def origins(*arguments, **options):
    return {".".join(map(str, one.path)): one.origin for one in explain_config(*arguments, **options)}


def test_config_show_says_where_each_value_comes_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nlearner: {total_steps: 7}\nseed: 3\n")
    reported = origins("mine", ["seed=4", "+env.train.init_params.reward=none"], tmp_path)
    assert reported["seed"] == reported["env.train.init_params.reward"] == "command line"
    assert reported["learner.total_steps"] == "mine.yaml"
    assert reported["learner.ppo.num_steps"] == "guerdon/conf/train.yaml"
    assert reported["env.eval.id"] == "guerdon/conf/env/tabletop.yaml"
    assert reported["engine"] == "default"


def test_config_show_follows_groups_references_and_older_spellings(tmp_path):
    assert origins("train", ["learner=rlpd"])["learner.algorithm"] == "guerdon/conf/learner/rlpd.yaml"
    reference = origins("demo")["collect.save_dir"]
    assert reference == "guerdon/conf/demo.yaml: ${runner.output_dir}/${runner.experiment_name}/data"
    old = tmp_path / "old.yaml"
    old.write_text("reward:\n  reward_model: {hidden_dim: 8}\n  num_epochs: 3\n")
    reported = origins(str(old), ["reward.mode=add", "fit.data.image_keys=[a,b]", "fit.data.image_keys.0=c"])
    assert reported["reward.model.hidden_dim"] == reported["fit.epochs"] == str(old)
    assert (
        reported["reward.model.width"] == "implied by other settings"
    )  # RLinf's classifier is wider than ours
    assert reported["reward.combine_mode"] == reported["fit.data.image_keys"] == "command line"
    assert origins(str(old), ["~reward.model.hidden_dim"])["reward.model.hidden_dim"] == "default"


@pytest.mark.parametrize(
    ("name", "load"), [("maniskill_rlpd_learned_reward", load_config), ("point_reach_gail", load_serial)]
)
def test_what_config_show_prints_is_that_config(name, load, capsys, tmp_path):
    code, out, err = run(capsys, "config", "show", name, "seed=5")
    assert (code, err) == (0, "")
    assert yaml.safe_load(out)["seed"] == 5
    (tmp_path / f"{name}.yaml").write_text(out)
    assert to_plain(load(str(tmp_path / f"{name}.yaml"))) == to_plain(load(name, ["seed=5"]))
    code, out, _ = run(capsys, "config", "show", name, "seed=5", "--changed", "--json")
    reported = json.loads(out)
    assert (code, reported["config"]) == (0, name)
    assert reported["settings"]["seed"] == {"value": 5, "from": "command line"}
    assert "default" not in {one["from"] for one in reported["settings"].values()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "learner.pp.lr=1"], "learner.ppo"),
        (["train", "learner.ppo.lr=fast"], "learner.ppo.lr"),
        (["cartpole_gail", "stop_valu=1"], "stop_value"),
    ],
)
def test_config_show_refuses_what_a_run_would_refuse(arguments, message, capsys):
    code, out, err = run(capsys, "config", "show", *arguments)
    assert (code, out, message in err) == (2, "", True)


def test_bash_completes(capsys, tmp_path):
    _, script, _ = run(capsys, "completion", "bash")
    (tmp_path / "guerdon.bash").write_text(script)
    (tmp_path / "try.sh").write_text(
        "source guerdon.bash\n"
        'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); $call 2>/dev/null\n'
        'echo "${COMPREPLY[*]}"; }\n'
        "call=$(complete -p guerdon | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        "try guerdon train-\n"
        "try guerdon data in\n"
        "try guerdon data inspect --pre\n"
        "try guerdon --json reward score --precision ''\n"
        "try guerdon zoo --config-name point_reach_p\n"
        "try guerdon train --json learner.ppo.l\n"
        "try guerdon completion ''\n"
        "try guerdon fly x\n"
    )
    result = subprocess.run(["bash", "try.sh"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "train-reward",
        "inspect",
        "--preview",
        "fp32 bf16 int8",
        "point_reach_pdeil point_reach_pwil",
        "learner.ppo.lr=",
        "bash zsh fish --json --debug --help",
        "",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_flag_is_completed(shell, capsys):
    code, out, _ = run(capsys, "completion", shell, "--json")
    assert code == 0
    script = json.loads(out)["script"]
    for place, found in words_of(VERBS).after.items():
        for word in [*place.split(), *found]:
            assert word.removeprefix("--") in script


def test_completion_offers_only_what_the_parser_knows():
    for verb in VERBS:
        offered = words_of(VERBS).after[verb.name]
        flags = {name for names, _ in verb.arguments for name in names if name.startswith("-")}
        assert {word for word in offered if word.startswith("-")} == flags | {"--json", "--debug", "--help"}


def test_config_show_and_completion_do_without_torch():
    program = (
        "import sys\n"
        "from guerdon.cli.main import main\n"
        "codes = [main(['config', 'show', 'train']), main(['completion', 'bash'])]\n"
        "print(codes, sorted({'torch', 'gymnasium', 'pyarrow'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[0, 0] []"


def next_steps(err):
    """The commands that follow `next:`, as words."""
    lines = err[err.index("next: ") :].splitlines()
    return [shlex.split(line[len("next: ") :], comments=True) for line in lines]


def test_a_proof_ends_with_the_command_that_measures_its_policy(capsys, tmp_path, monkeypatch):
    from guerdon.cli import prove

    seed = {"seed": 4, "success": 0.5, "env_return": 1.0}
    arm = {"mean": 0.5, "low": 0.4, "high": 0.6, "seeds": [seed]}
    outcome = {"measure": "success", "arms": {"learned": arm}, "reasons": [], "verdict": "It did."}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prove, "prove", lambda *_, **__: {**outcome, "folder": str(tmp_path / "proof")})
    code, out, err = run(capsys, "prove")
    assert (code, next_steps(err)) == (0, [["guerdon", "evaluate", "--checkpoint", "proof/seed_4/learned"]])
    assert "proof/prove.html" in out


def test_training_ends_with_commands_that_measure_and_prove(capsys, tmp_path, monkeypatch):
    from guerdon.cli import train

    summary = dict.fromkeys(("success_once", "success_at_end", "stopped"))
    summary |= {"reward": "learned", "env_steps": 1, "seconds": 1.0, "alarms": [], "checkpoint": "c"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda config: (tmp_path / "run 1", summary))
    code, _, err = run(capsys, "train", "seed=2")
    assert (code, next_steps(err)) == (0, [["guerdon", "evaluate", "--checkpoint", "run 1"]])
    learned = ["reward.use_reward_model=true", 'reward.model.checkpoint_path="a b"']
    _, _, err = run(capsys, "train", "--config-name", "train_rgb", *learned)
    proof = next_steps(err)[1]
    assert proof == ["guerdon", "prove", "--config-name", "train_rgb", *learned]
    assert parse(proof[1:], VERBS, GROUPS).verb.name == "prove"


def test_a_fit_ends_with_the_commands_that_judge_and_use_it(capsys, tmp_path, monkeypatch):
    write_store(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    small = ["fit.epochs=1", "reward.model.width=8", "reward.model.image_size=[3,32,32]"]
    code, out, err = run(capsys, "train-reward", "fit.data.path=data", *small)
    assert code == 0
    checkpoint = re.search(r"^checkpoint +(\S+)$", out, re.M)[1]
    card, training = next_steps(err)
    assert parse(card[1:], VERBS, GROUPS).verb.name == "reward card"
    assert str(parse(card[1:], VERBS, GROUPS).checkpoint) == checkpoint
    assert load_config("train", training[2:]).reward.model.checkpoint_path == checkpoint
