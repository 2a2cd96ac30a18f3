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
from typing import NoReturn

import guerdon
from guerdon.cli.verb import Handler, Verb, print_result
from guerdon.core.errors import ConfigError, GuerdonError, RunInterrupted

VERBS = (
    Verb("demo", "demo:demo_verb", "run all three stages on the embedded environment"),
    Verb("collect", "collect:collect_verb", "stage 1: run a policy and save labelled episodes"),
    Verb("train-reward", "train_reward:train_reward_verb", "stage 2: fit, validate and save a reward model"),
    Verb("train", "train:train_verb", "stage 3: train a policy"),
    Verb("evaluate", "train:evaluate_verb", "measure the success of a saved policy"),
    Verb("zoo", "zoo:zoo_verb", "train on a reward model of the zoo; `zoo list` lists them"),
    Verb("collect-demos", "zoo:collect_demos_verb", "record demonstrations for the zoo"),
    Verb("reward score", "reward:score_verb", "success probabilities of a data set"),
    Verb("reward card", "reward:card_verb", "one page that shows whether a reward model can be trusted"),
    Verb("reward quantize", "reward:quantize_verb", "make and verify the int8 version"),
    Verb("data inspect", "data:inspect_verb", "format, episodes, cameras, labels and faults"),
    Verb("data convert", "data:convert_verb", "copy to another format"),
    Verb("data audit", "data:audit_verb", "check labels, balance, duplicates, cameras and NaN"),
    Verb("data process", "data:process_verb", "clean a robot's data.pkl for training"),
    Verb("robot-sim", "robot:robot_sim_verb", "a simulated robot that speaks SERL's protocol"),
    Verb("teleop", "robot:teleop_verb", "drive a robot by hand and watch the learned reward"),
    Verb("check", "check:check_verb", "check that everything is installed and works"),
)
"""Every verb there is: name, `module:function`, what it does."""
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
    handler: Handler = arguments.handler
    try:
        result = handler(arguments)
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
    """The names of all verbs, and the arguments of the one that is called: no other module is imported."""
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
            handler = verb.load()
            for names, options in getattr(handler, "arguments", ()):
                added.add_argument(*names, **options)
            added.set_defaults(handler=handler)
    return parser


if __name__ == "__main__":
    command()
