"""The `guerdon` command.

Logs and progress go to stderr, results to stdout; `--json` prints the result as one JSON object. Exit codes:
0 on success, 1 on a failure explained in a line or two, 2 on wrong usage (an unknown verb, flag or setting).

A new verb is a function in one of the modules beside this one and a line in `VERBS`.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import guerdon
from guerdon.cli.verb import OVERRIDES, Verb, argument, config_arguments, print_result
from guerdon.core.errors import ConfigError, GuerdonError, RunInterrupted

PATH = argument("path", type=Path)
CHECKPOINT = argument("--checkpoint", type=Path, required=True, metavar="C", help="the reward model")
THRESHOLD = argument("--threshold", type=float, metavar="P", help="decide at P, not as calibrated")
PRECISION = argument("--precision", choices=["fp32", "bf16", "int8"], default="fp32")
FORMAT = argument("--format", help="the format of the data; detected if not given")

VERBS = (
    Verb("demo", "demo:demo_verb", "run all three stages on the embedded environment", OVERRIDES),
    Verb(
        "collect",
        "collect:collect_verb",
        "stage 1: run a policy and save labelled episodes",
        *config_arguments(default="collect"),
        argument("--resume", action="store_true", help="count what is there towards the targets"),
    ),
    Verb(
        "train-reward",
        "train_reward:train_reward_verb",
        "stage 2: fit, validate and save a reward model",
        *config_arguments(default="train_reward"),
    ),
    Verb("train", "train:train_verb", "stage 3: train a policy", *config_arguments(default="train")),
    Verb(
        "evaluate",
        "train:evaluate_verb",
        "measure the success of a saved policy",
        argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a run or a step of it"),
        argument("--episodes", type=int, default=100, metavar="N", help="fresh episodes (100)"),
        argument("--seed", type=int, default=12345, metavar="S", help="of the environments"),
        argument("--env", metavar="ID", help="environment to play in (the policy's own)"),
    ),
    Verb(
        "zoo",
        "zoo:zoo_verb",
        "train on a reward model of the zoo; `zoo list` lists them",
        argument("--config-name", metavar="NAME", help="config, such as cartpole_gail"),
        argument("--config-path", metavar="DIR", help="where to look for it first"),
        argument("--di-engine", type=Path, metavar="FILE", help="a config file of DI-engine, read, not run"),
        argument("--trust", action="store_true", help="run that file, if reading it is not enough"),
        OVERRIDES,
    ),
    Verb(
        "collect-demos",
        "zoo:collect_demos_verb",
        "record demonstrations for the zoo",
        argument("--env", metavar="ID", help="environment; a saved policy knows its own"),
        argument("--policy", default="scripted", metavar="P", help="`scripted`, or a saved policy"),
        argument("--episodes", type=int, default=10, metavar="N", help="whole episodes (10)"),
        argument("--noise", type=float, default=0.0, metavar="X", help="share of random actions (0)"),
        argument("--seed", type=int, default=0, metavar="S", help="of environments and noise"),
        argument("--out", type=Path, required=True, metavar="FILE", help="a .safetensors file"),
    ),
    Verb(
        "reward score",
        "reward:score_verb",
        "success probabilities of a data set, of pictures or of a video",
        argument("path", type=Path, help="a data set, a picture, a folder of pictures, or a video"),
        argument("--out", type=Path, metavar="FILE", help="write one row per frame (.parquet, .json)"),
        CHECKPOINT,
        THRESHOLD,
        PRECISION,
    ),
    Verb(
        "reward card",
        "reward:card_verb",
        "one page that shows whether a reward model can be trusted",
        argument("--data", type=Path, required=True, help="held-out episodes"),
        argument("--out", type=Path, required=True, metavar="HTML"),
        CHECKPOINT,
        THRESHOLD,
        PRECISION,
    ),
    Verb(
        "reward quantize",
        "reward:quantize_verb",
        "make and verify the int8 version",
        argument("path", type=Path, help="a data set; the one it was fitted to is best"),
        THRESHOLD,
        CHECKPOINT,
    ),
    Verb(
        "reward recalibrate",
        "reward:recalibrate_verb",
        "another threshold without a refit",
        argument("--data", type=Path, required=True, help="labelled episodes that it was not fitted to"),
        argument("--fpr", type=float, metavar="F", help="share of failure frames that may fire"),
        argument("--threshold", type=float, metavar="P", help="this threshold; the calibration stays"),
        argument("--out", type=Path, metavar="C2", help="write here instead of into the checkpoint"),
        CHECKPOINT,
    ),
    Verb(
        "data inspect",
        "data:inspect_verb",
        "format, episodes, cameras, labels and faults",
        PATH,
        FORMAT,
        argument("--preview", type=Path, metavar="PNG", help="also draw a sheet of frames"),
    ),
    Verb(
        "data convert",
        "data:convert_verb",
        "copy to another format",
        argument("source", type=Path),
        argument("target", type=Path),
        argument("--to", required=True, metavar="FORMAT", help="the format to write"),
        FORMAT,
    ),
    Verb("data audit", "data:audit_verb", "check labels, balance, duplicates, cameras and NaN", PATH, FORMAT),
    Verb(
        "data process",
        "data:process_verb",
        "clean a robot's data.pkl for training",
        argument("path", type=Path, metavar="PKL"),
        argument("--to", default="native", metavar="FORMAT", help="the format to write (native)"),
        argument("--keep-stationary", action="store_true", help="keep frames in which nothing moved"),
        argument("--hold-steps", type=int, metavar="N", help="steps at the target that make a success"),
        argument("--out", type=Path, metavar="DIR", help="instead of collected_data/ beside the file"),
    ),
    Verb("robot-sim", "robot:robot_sim_verb", "a simulated robot that speaks SERL's protocol"),
    Verb("teleop", "robot:teleop_verb", "drive a robot by hand and watch the learned reward"),
    Verb("check", "check:check_verb", "check that everything is installed and works"),
)
"""Every verb there is: name, `module:function`, what it does, what it takes."""
GROUPS = {
    "reward": "use and assess a fitted reward model",
    "data": "look at data sets, convert, audit, clean",
}
"""First words that several verbs share."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if arguments.debug else logging.INFO,
        format="%(message)s",
        force=True,
    )
    verb: Verb = arguments.verb
    try:
        result = verb.run(arguments)
        if result is None:
            return 0
        print_result(arguments, result)
        if result.error:
            print(f"guerdon: error: {result.error}", file=sys.stderr)
        return 0 if result.ok and not result.error else 1
    except GuerdonError as error:
        if arguments.debug:
            raise
        print(f"guerdon: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except RunInterrupted as stopped:
        if os.environ.get("RANK", "0") == "0":  # only the first of several processes prints
            print(f"guerdon: {stopped}:", file=sys.stderr)
            print(_command_to_go_on(argv, stopped), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("guerdon: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse; settings (`key=value`) may stand before and after flags, which argparse alone does not allow."""
    parser = _parser(argv)
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The names of all verbs, and the arguments of the one that is called."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    common.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    parser = argparse.ArgumentParser(prog="guerdon", description=guerdon.__doc__)
    parser.add_argument("--version", action="version", version=f"guerdon {guerdon.__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    groups = {"": verbs}
    called = [item for item in argv if not item.startswith("-")]
    for verb in VERBS:
        group, _, name = verb.name.rpartition(" ")
        if group not in groups:
            described = verbs.add_parser(group, help=GROUPS[group])
            groups[group] = described.add_subparsers(title="actions", required=True, metavar="ACTION")
        added = groups[group].add_parser(name, parents=[common], help=verb.help, description=verb.help)
        words = verb.name.split()
        if called[: len(words)] == words:
            for names, options in verb.arguments:
                added.add_argument(*names, **options)
            added.set_defaults(verb=verb)
    return parser


if __name__ == "__main__":
    command()
