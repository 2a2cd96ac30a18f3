"""DI-engine's config files are read, not run."""

import time

import pytest

from guerdon.config.di_engine_files import read_di_engine
from guerdon.config.load import load_serial
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.errors import ConfigError

FILE = """
from easydict import EasyDict
import torch

n_bits = 3
sizes = [64] * 2
cartpole_config = dict(
    exp_name='cartpole_{}_seed0'.format(n_bits),
    env=dict(collector_env_num=2 * n_bits, evaluator_env_num=5, stop_value=195),
    policy=dict(
        cuda=False,
        model=dict(encoder_hidden_size_list=sizes),
        learn=dict(learning_rate=1e-3, batch_size=int(1e2) if n_bits > 2 or True else 64),
        collect=dict(n_sample=64),
        other=dict(replay_buffer=dict(replay_buffer_size=2 ** 10)),
    ),
    reward_model={'type': 'rnd', 'batch_size': 32, **{}},
)
"""
TAIL = """
cartpole_config = EasyDict(cartpole_config)
cartpole_config.policy.nstep = 1
cartpole_config['seed'] = -(-7)
main_config = cartpole_config
create_config = EasyDict(dict(env=dict(type='cartpole'), policy=dict(type='dqn')))

if __name__ == '__main__':
    from ding.entry import serial_pipeline_reward_model_offpolicy
    serial_pipeline_reward_model_offpolicy((main_config, create_config), seed=3, max_env_step=int(1e5))
"""
PLAIN = FILE.replace(" if n_bits > 2 or True else 64", "").replace(", **{}", "")


def written(tmp_path, text):
    path = tmp_path / "some_config.py"
    path.write_text(text)
    return path


def test_literals_names_and_arithmetic(tmp_path):
    main, create, arguments = read_di_engine(written(tmp_path, PLAIN + TAIL))
    assert main["exp_name"] == "cartpole_3_seed0" and main["env"]["collector_env_num"] == 6
    assert main["policy"]["model"]["encoder_hidden_size_list"] == [64, 64]
    assert main["policy"]["learn"]["batch_size"] == 100
    assert main["policy"]["other"]["replay_buffer"]["replay_buffer_size"] == 1024
    assert main["policy"]["nstep"] == 1 and main["seed"] == 7
    assert create == {"env": {"type": "cartpole"}, "policy": {"type": "dqn"}}
    assert arguments == {"seed": 3, "max_env_step": 100_000}


def test_the_settings_of_a_file(tmp_path):
    cfg = load_serial(written(tmp_path, PLAIN + TAIL), ["learner.dqn.gamma=0.9"])
    assert cfg.seed == 7 and cfg.learner.total_steps == 100_000  # its own seed wins over its pipeline's
    assert (cfg.env.train.id, cfg.env.train.num_envs) == ("CartPole-v1", 6)
    assert cfg.learner.dqn.gamma == 0.9 and cfg.reward_model["type"] == "rnd"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("n_bits = open('marker', 'w')", "a call of open"),
        ("n_bits = __import__('os').system('touch marker')", "a call of"),
        ("n_bits = (lambda: 3)()", "a call of"),
        ("n_bits = [each for each in range(3)][0]", "line 5"),
        ("n_bits = torch.cuda.device_count()", "a call of"),
        ("n_bits = 9 ** 9 ** 9", "OverflowError"),
        ("n_bits = 'x' * 10 ** 9", "too long"),
        ("n_bits = '{0.__class__}'.format(3)", "line"),
    ],
)
def test_code_is_refused_and_never_run(line, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, PLAIN.replace("n_bits = 3", line) + TAIL)
    with pytest.raises(ConfigError, match=r"main_config is computed by code .*--trust") as caught:
        read_di_engine(path)
    assert reason in str(caught.value)
    assert not (tmp_path / "marker").exists()


def test_a_trusted_file_is_run(tmp_path):
    text = PLAIN.replace("n_bits = 3", "n_bits = sum([1, 2])").replace("from easydict import EasyDict", "")
    text = (
        "class EasyDict(dict):\n    __getattr__ = dict.__getitem__\n    __setattr__ = dict.__setitem__\n"
        + text
    )
    text = text.replace("import torch", "") + TAIL.replace("cartpole_config.policy.nstep = 1\n", "")
    with pytest.raises(ConfigError, match="--trust"):
        read_di_engine(written(tmp_path, text))
    main, create, _ = read_di_engine(written(tmp_path, text), trust=True)
    assert main["env"]["collector_env_num"] == 6 and create["policy"]["type"] == "dqn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 3", "it has no dict main_config"),
        ("main_config = 3\ncreate_config = {}", "it has no dict main_config"),
        ("main_config = {", "is no Python file"),
        ("main_config = dict()", "it has no dict create_config"),
        ("main_config = " + "[" * 150 + "]" * 150, "no dict main_config"),
        ("main_config = " + "-" * 50000 + "1", "nested too deeply"),
        ("#" * 300_000, "bytes"),
    ],
)
def test_what_is_no_config(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_di_engine(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.py"):
        load_serial(tmp_path / "absent.py")


def test_a_failing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"running .* failed: ZeroDivisionError"):
        read_di_engine(written(tmp_path, "main_config = {}\nx = 1 / 0"), trust=True)


DOUBLING = {
    "text": "a = 'x'\n" + "a = a + a\n" * 64,
    "formatted text": "a = 'x'\n" + "a = '{}{}'.format(a, a)\n" * 64,
    "text in braces": "a = 'x'\n" + "a = f'{a}{a}'\n" * 64,
    "joined text": "a = ['x' * 100] * 100\n" + "a = [('-' * 9000).join(a)]\n" * 64,
    "numbers": "a = 3\n" + "a = a * a\n" * 64,
    "shared lists": "a = [1]\n" + "a = [a, a]\n" * 64,
    "bytes": "a = b'x' * 10 ** 9",
    "wide format": "a = f'{1:>999999999}'",
    "work": "a = 'x' * 19000\n" + "b = a\n" * 2000,
}


@pytest.mark.parametrize("name", DOUBLING)
def test_a_few_lines_neither_fill_the_memory_nor_take_long(name, tmp_path):
    path = written(tmp_path, DOUBLING[name] + "\nmain_config = dict(a=a)\ncreate_config = dict()\n")
    began = time.process_time()
    with pytest.raises(ConfigError, match="main_config is computed by code") as caught:
        read_di_engine(path)
    assert len(str(caught.value)) < 400
    assert time.process_time() - began < 5.0


def test_a_config_inside_itself_is_refused(tmp_path):
    text = "main_config = dict(a=1)\nmain_config['b'] = main_config\ncreate_config = dict()\n"
    with pytest.raises(ConfigError, match="main_config is no config: too long"):
        read_di_engine(written(tmp_path, text))


@pytest.mark.parametrize(
    "line",
    [
        "cartpole_config.policy.nstep += 1",
        "cartpole_config.update(dict(seed=1))",
        "for key in ('a', 'b'):\n    cartpole_config[key] = 3",
        "if n_bits > 2:\n    cartpole_config.seed = 8",
        "del cartpole_config['seed']",
        "from elsewhere import cartpole_config",
    ],
)
def test_a_statement_that_is_not_run_is_not_passed_over(line, tmp_path):
    text = PLAIN + TAIL.replace("main_config = cartpole_config", f"{line}\nmain_config = cartpole_config")
    with pytest.raises(ConfigError, match=r"main_config is computed by code \(line"):
        read_di_engine(written(tmp_path, text))


def test_copies_share_nothing(tmp_path):
    text = "a = dict(b=dict(c=1))\nmain_config = EasyDict(a)\ncreate_config = copy.deepcopy(a)\na.b.c = 2\n"
    main, create, _ = read_di_engine(written(tmp_path, text.replace("copy.deepcopy", "deepcopy")))
    assert main == create == {"b": {"c": 1}}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_sample=64", "n_sample='many'", "policy.collect.n_sample must be a number of at least 1"),
        ("n_sample=64", "n_sample=0", "policy.collect.n_sample must be a number of at least 1, not 0"),
        ("collector_env_num=2 * n_bits", "collector_env_num=0", "env.train.num_envs must be"),
        ("n_sample=64", "n_sample=float('inf')", "policy.collect.n_sample must be a number"),
        (
            "env=dict(collector_env_num=2 * n_bits, evaluator_env_num=5, stop_value=195)",
            "env=3",
            "env must be",
        ),
        ("'type': 'rnd'", "'type': 'rnd', 'hidden_size_list': 64", "hidden_size_list must be a list"),
        (
            "'type': 'rnd'",
            "'type': 'trex', 'expert_model_path': 'a', 'checkpoint_step': 1, 'checkpoint_max': 10 ** 9",
            "1000000001 checkpoints",
        ),
        ("max_env_step=int(1e5)", "max_env_step=1e999, other=1", None),
    ],
)
def test_wrong_values_are_named(old, new, message, tmp_path):
    text = PLAIN + TAIL
    assert old in text
    path = written(tmp_path, text.replace(old, new))
    if message is None:  # without an end: as long as our settings say
        assert load_serial(path).learner.total_steps == SerialConfig().learner.total_steps
        return
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_serial(path)
