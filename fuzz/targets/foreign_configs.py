"""Config files of DI-engine, which are Python, and of RLinf, which are YAML in a shape of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fuzz.engine import Target
from fuzz.mutations import mutate_bytes
from fuzz.targets import config
from guerdon.config.load import load_rlinf, load_serial
from guerdon.core.errors import GuerdonError

_DI_ENGINE = b"""from easydict import EasyDict
n_bits = 3
sizes = [64] * 2
main = dict(
    exp_name='bits_{}'.format(n_bits),
    env=dict(collector_env_num=2 * n_bits, evaluator_env_num=5, stop_value=195),
    policy=dict(
        cuda=False,
        nstep=1,
        model=dict(encoder_hidden_size_list=sizes),
        learn=dict(learning_rate=1e-3, batch_size=int(1e2), update_per_collect=4),
        collect=dict(n_sample=64),
        eval=dict(evaluator=dict(eval_freq=50)),
        other=dict(eps=dict(type='exp', start=0.9, end=0.1, decay=2 ** 10)),
    ),
    reward_model={'type': 'rnd', 'batch_size': 32, 'hidden_size_list': [64, 1], 'exp_name': f'a{n_bits}'},
)
main_config = EasyDict(main)
main_config['seed'] = -(-7)
create_config = EasyDict(dict(env=dict(type='cartpole'), policy=dict(type='dqn')))
if __name__ == '__main__':
    serial_pipeline((main_config, create_config), seed=3, max_env_step=int(1e5))
"""
_RANKED = b"""main_config = dict(
    exp_name='t',
    env=dict(env_id='LunarLander-v2', collector_env_num=8, evaluator_env_num=8),
    reward_model=dict(type='trex', expert_model_path='experts', checkpoint_min=10, checkpoint_max=30,
        checkpoint_step=10, num_snippets=30, num_trajs=6, update_per_collect=1),
    policy=dict(action_space='discrete', learn=dict(batch_size=64), collect=dict(n_sample=800)),
)
create_config = dict(env=dict(type='lunarlander'), policy=dict(type='ppo'))
"""
_PYTHON = (
    b"n_bits = n_bits * n_bits\n", b"sizes = sizes + sizes\n", b"main = dict(a=main, b=main)\n", b"None",
    b"{}", b"'x' * 10 ** 9", b"b'x' * 10 ** 9", b"1e999", b"float('nan')", b"9 ** 9 ** 9",
    b"',' .join(sizes)", b"[]", b"'{}{}'.format(sizes, sizes)", b"main_config.policy = main_config\n",
    b"[sizes, sizes]", b"dict()", b"-", b"(", b")", b"...", b"'text'", b"lambda: 3", b"n_bits = 7 << 9\n",
    b"**main", b"*sizes", b"int(", b"str(", b"main_config.policy.learn.batch_size += 1\n", b"\xff",
    b"# coding: utf-7\n", b"f'{n_bits:>99999999}'", b"list(", b"'\xc2\xb2'", b"\0", b"True", b"3j",
)  # fmt: skip
_YAML = (
    *config.TOKENS,
    b"defaults: [group, input]\n",
    b"- group@env.train\n",
    b"null",
    b"-1",
    b"[1]",
    b"{}",
    b"text",
)
_RLINF = b"""defaults: [group@env.train, group@env.eval, absent/group@actor.fsdp_config, _self_]
cluster: {num_nodes: 1, component_placement: {actor: 0-0, env: 0-0}, node_groups: [{label: a, node_ranks: 0}]}
runner:
  task_type: embodied
  logger: {log_path: results, experiment_name: a, logger_backends: [tensorboard]}
  max_epochs: 100
  max_steps: -1
  val_check_interval: 20
  save_interval: -1
env:
  train: {total_num_envs: 8, init_params: {obs_mode: rgb, sensor_configs: {width: 96, height: 64}}}
  eval: {total_num_envs: 4, data_collection: {enabled: true, save_dir: a, export_format: pickle}}
rollout: {model: {precision: "${actor.model.precision}"}}
reward:
  use_reward_model: true
  reward_mode: terminal
  reward_weight: 1.0
  model: {model_path: a, model_type: resnet, arch: resnet18, image_size: [3, 64, 64]}
algorithm: {update_epoch: 8, adv_type: gae, gamma: 0.8, gae_lambda: 0.9, clip_ratio_high: 0.3}
actor: {seed: 7, global_batch_size: 64, model: {hidden_dim: 32, precision: fp32}, optim: {lr: 3.0e-4}}
"""
_RLINF_FIT = b"""
runner: {task_type: sft, max_epochs: 5, val_check_interval: 10, early_stop: {enabled: true, patience: 3}}
data: {train_data_paths: data, val_data_paths: other, num_workers: 0}
actor: {micro_batch_size: 8, global_batch_size: 16, seed: 1, optim: {lr: 1.0e-4},
  model: {model_type: resnet, arch: resnet18, pretrained: false, image_size: [3, 64, 64]}}
"""
_GROUP = b"env_type: maniskill\nmax_episode_steps: 50\ninit_params: {id: PickCube-v1, obs_mode: state}\n"


def _one_line(error: GuerdonError) -> None:
    assert len(str(error).splitlines()) <= 2, f"more than two lines: {error}"
    assert len(str(error)) < 2000, f"a message of {len(str(error))} characters"


def read_di_engine(data: bytes, folder: Path) -> None:
    """As `guerdon zoo --di-engine FILE.py`."""
    file = folder / "input.py"
    file.write_bytes(data)
    try:
        load_serial(file)
    except GuerdonError as error:
        _one_line(error)
        raise


def read_rlinf(data: bytes, folder: Path) -> None:
    """As `guerdon train --rlinf FILE.yaml`, with a file of a group beside it."""
    (folder / "group.yaml").write_bytes(_GROUP)
    file = folder / "input.yaml"
    file.write_bytes(data)
    try:
        load_rlinf(file)
    except GuerdonError as error:
        _one_line(error)
        raise


def mutate(tokens: Sequence[bytes], data: bytes, rng: random.Random) -> bytes:
    """Put values, names and whole lines in the place of others, or repeat lines; else change bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(4)
        if kind == 0:  # in the place of a value
            starts = [place for place in range(len(data)) if data[place : place + 1] in b"=:([,"]
            at = (rng.choice(starts) if starts else 0) + 1
            end = next(
                (place for place in range(at, len(data)) if data[place : place + 1] in b",)]}\n"), len(data)
            )
            data = data[:at] + b" " + rng.choice(tokens) + data[end:]
            continue
        lines = data.splitlines(keepends=True) or [b"\n"]
        place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        if kind == 1:
            lines[place] = rng.choice(tokens) * rng.choice((1, 1, 60, 2000)) + lines[place]
        elif kind == 2:
            lines[place] = lines[place] * rng.choice((0, 2, 100))
        else:
            lines[place], lines[other] = lines[other], lines[place]
        data = b"".join(lines)
    return data


TARGETS = {
    "di-engine-py": Target(lambda _: [_DI_ENGINE, _RANKED], read_di_engine, partial(mutate, _PYTHON)),
    "rlinf-yaml": Target(lambda _: [_RLINF, _RLINF_FIT], read_rlinf, partial(mutate, _YAML)),
}
