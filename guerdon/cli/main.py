"""The `guerdon` command.

Logs and progress go to stderr, results to stdout; `--json` prints the result as one JSON object. Exit codes:
0 on success, 1 on a failure explained in a line or two, 2 on wrong usage (an unknown verb, flag or setting).
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import guerdon
from guerdon.cli.common import add_config, print_result
from guerdon.cli.data import add_data
from guerdon.cli.reward import add_reward
from guerdon.cli.robot import add_robot
from guerdon.core.errors import ConfigError, DataError, GuerdonError, RunInterrupted
from guerdon.core.types import display_path

if TYPE_CHECKING:
    from guerdon.data.collect.run import CollectResult

log = logging.getLogger("guerdon")

Handler = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = _parse(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if arguments.debug else logging.INFO,
        format="%(message)s",
        force=True,
    )
    handler: Handler = arguments.handler
    try:
        return handler(arguments)
    except GuerdonError as error:
        if arguments.debug:
            raise
        print(f"guerdon: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except RunInterrupted as stopped:
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            print(f"guerdon: {stopped}:", file=sys.stderr)
            print(_command_to_go_on(sys.argv[1:] if argv is None else argv, stopped), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("guerdon: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; there is nobody to tell
        return 1


def _command_to_go_on(argv: Sequence[str], stopped: RunInterrupted) -> str:
    """The same command, from the checkpoint on."""
    kept = [item for item in argv if not item.lstrip("+").startswith(f"{stopped.setting}=")]
    return shlex.join(["guerdon", *kept, f"{stopped.setting}={stopped.checkpoint}"])


def command() -> NoReturn:
    """The program: `main`, then the end of the process."""
    code = main()
    if os.environ.get("RANK"):  # one of several processes: torch is loaded already
        from guerdon.fit.process_group import end_process, under_torchrun

        if under_torchrun():
            end_process(code)
    sys.exit(code)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse; settings (`key=value`) may stand before and after flags, which argparse alone does not allow."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    common.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    parser = argparse.ArgumentParser(prog="guerdon", description=guerdon.__doc__)
    parser.add_argument("--version", action="version", version=f"guerdon {guerdon.__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    demo = verbs.add_parser("demo", parents=[common], help="the workflow on the embedded environment")
    demo.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them")
    demo.set_defaults(handler=_demo)

    collect = verbs.add_parser("collect", parents=[common], help="run a policy, save labelled episodes")
    add_config(collect, default="collect")
    collect.add_argument("--resume", action="store_true", help="count what is there towards the targets")
    collect.set_defaults(handler=_collect)

    fit = verbs.add_parser("train-reward", parents=[common], help="fit, prove and save a reward model")
    add_config(fit, default="train_reward")
    fit.set_defaults(handler=_train_reward)

    train = verbs.add_parser("train", parents=[common], help="train a policy as the config says")
    add_config(train, default="train")
    train.set_defaults(handler=_train)

    evaluate = verbs.add_parser("evaluate", parents=[common], help="success of a saved policy")
    evaluate.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a run or a step of it"
    )
    evaluate.add_argument("--episodes", type=int, default=100, metavar="N", help="fresh episodes (100)")
    evaluate.add_argument("--seed", type=int, default=12345, metavar="S", help="of the environments")
    evaluate.add_argument("--env", metavar="ID", help="environment to play in (the policy's own)")
    evaluate.set_defaults(handler=_evaluate)

    zoo = verbs.add_parser("zoo", parents=[common], help="train on a reward model of the zoo")
    zoo.add_argument("--config-name", metavar="NAME", help="config, such as cartpole_gail")
    zoo.add_argument("--config-path", metavar="DIR", help="where to look for it first")
    zoo.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them; `list` lists models"
    )
    zoo.set_defaults(handler=_zoo)
    demos = verbs.add_parser("collect-demos", parents=[common], help="demonstrations of a policy for the zoo")
    demos.add_argument("--env", metavar="ID", help="environment; a saved policy knows its own")
    demos.add_argument("--policy", default="scripted", metavar="P", help="`scripted`, or a saved policy")
    demos.add_argument("--episodes", type=int, default=10, metavar="N", help="whole episodes (10)")
    demos.add_argument("--noise", type=float, default=0.0, metavar="X", help="share of random actions (0)")
    demos.add_argument("--seed", type=int, default=0, metavar="S")
    demos.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .safetensors file")
    demos.set_defaults(handler=_collect_demos)

    add_reward(verbs, common)
    add_data(verbs, common)
    add_robot(verbs, common)

    check = verbs.add_parser("check", parents=[common], help="is everything installed and working?")
    check.set_defaults(handler=_check)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from guerdon.cli.demo import run_demo

    summary, lines = run_demo(arguments.overrides)
    print_result(arguments, summary, lines)
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from guerdon.config import load_config
    from guerdon.config.unused import log_without_effect
    from guerdon.data.collect.collector import open_npy_archive
    from guerdon.data.collect.run import collect

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
    log_without_effect(config)
    section = replace(config.collect, resume=config.collect.resume or arguments.resume)
    if config.env.eval.env_type == "robot":  # the real-world document has its robot there
        from guerdon.data.collect.robot import collect_robot

        episodes = config.runner.num_data_episodes
        result = collect_robot(config.env.eval, section, num_episodes=episodes, seed=config.seed)
        return _report_collected(arguments, result)
    archive = None
    if config.reward.collect_data:  # the documents' first generation: two directories of .npy files
        place = config.reward.data_collection
        section = replace(section, format="npy-trajectory", cameras=place.image_keys, resume=True)
        section = replace(section, save_dir=str(Path(place.positive_dir).parent))
        archive = open_npy_archive(
            Path(place.positive_dir),
            Path(place.negative_dir),
            place.max_positive_trajectories,
            place.max_negative_trajectories,
        )
    policy = None
    if section.policy == "checkpoint":
        from guerdon.training.collect_policy import (
            saved_policy,  # and with it torch, which the others do without
        )

        policy = saved_policy(section, config.env.train, config.seed)
    result = collect(config.env.train, section, seed=config.seed, archive=archive, policy=policy)
    return _report_collected(arguments, result)


def _report_collected(arguments: argparse.Namespace, result: CollectResult) -> int:
    counts = f"success {result.num_success}{_limit(result.target_success)}"
    counts += f" fail {result.num_failure}{_limit(result.target_failure)}"
    rate = result.env_steps / max(result.seconds, 1e-9)
    line = f"{counts} in {result.seconds:.1f} s ({rate:,.0f} steps/s) -> {result.save_dir} ({result.format})"
    print_result(arguments, asdict(result), [line])
    if not result.complete:
        raise DataError(
            f"the targets were not met: {result.reason} with {counts}. What was collected is kept; "
            "go on with --resume, or try another collect.policy or collect.policy_noise"
        )
    return 0


def _limit(target: int | None) -> str:
    return "" if target is None else f"/{target}"


def _train_reward(arguments: argparse.Namespace) -> int:
    from guerdon.cli.train_reward import fit_lines, fit_summary, train_reward
    from guerdon.config import load_config
    from guerdon.fit.process_group import is_main_process

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
    folder, result = train_reward(config)
    if is_main_process():
        print_result(arguments, {**fit_summary(result), "folder": str(folder)}, fit_lines(result, folder))
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from guerdon.cli.train import train, train_lines
    from guerdon.config import load_config

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
    if config.fit.only:
        return _train_reward(arguments)
    folder, summary = train(config)
    print_result(arguments, {**summary, "folder": str(folder)}, train_lines(summary, folder))
    return 0


def _zoo(arguments: argparse.Namespace) -> int:
    from guerdon.cli.zoo import models, run_zoo, zoo_lines

    if arguments.overrides == ["list"]:
        known = models()
        lines = [
            f"{item['name']:<15}{item['rewards']}{' (demonstrations)' * item['needs_demonstrations']}"
            for item in known
        ]
        print_result(arguments, {"models": known}, lines)
        return 0
    if arguments.config_name is None:
        raise ConfigError("give --config-name, or `guerdon zoo list` to see the models")
    summary = run_zoo(arguments.config_name, arguments.overrides, arguments.config_path)
    print_result(arguments, summary, zoo_lines(summary))
    return 0


def _collect_demos(arguments: argparse.Namespace) -> int:
    from guerdon.cli.zoo import collect_demos

    result = collect_demos(
        arguments.out,
        env_id=arguments.env,
        policy=arguments.policy,
        episodes=arguments.episodes,
        noise=arguments.noise,
        seed=arguments.seed,
    )
    line = f"{result['episodes']} episodes, {result['transitions']} transitions, mean return "
    line += f"{result['mean_return']:.2f} -> {display_path(arguments.out)}"
    print_result(arguments, result, [line])
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from guerdon.cli.train import evaluate_checkpoint

    if arguments.episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, not {arguments.episodes}")
    result = evaluate_checkpoint(arguments.checkpoint, arguments.episodes, arguments.seed, arguments.env)
    once = "unknown" if result["success_once"] is None else f"{result['success_once']:.1%}"
    at_end = "unknown" if result["success_at_end"] is None else f"{result['success_at_end']:.1%}"
    lines = [f"success      {once} of {result['episodes']} episodes, {at_end} at their end"]
    print_result(arguments, result, [*lines, f"env return   {result['env_return']:.2f}"])
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from guerdon.cli.check import check_installation

    results = check_installation()
    lines = [
        f"{'ok' if item.ok else ('missing' if item.optional else 'FAILED'):<9}{item.name:<14}{item.detail}"
        for item in results
    ]
    print_result(arguments, {"parts": [asdict(item) for item in results]}, lines)
    return 0 if all(item.ok or item.optional for item in results) else 1


if __name__ == "__main__":
    command()
