"""The command line: arguments of every verb, and help that lists the verbs by stage."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import guerdon
from guerdon.cli.verb import Verb

STAGES = {
    "start": "Start",
    "collect": "Stage 1: collect labelled episodes",
    "fit": "Stage 2: fit a reward model",
    "use": "Stage 3: use it",
    "zoo": "Reward models of the literature",
    "trust": "See whether a reward can be trusted",
    "data": "Data sets",
    "tools": "Tools",
}
"""`Verb.stage` -> heading, in the order of the help."""
WIDTH = 19


def parse(argv: Sequence[str], verbs: Sequence[Verb], groups: Mapping[str, str]) -> argparse.Namespace:
    """Parse; settings (`key=value`) may stand before and after flags, which argparse alone does not allow.

    Args:
        argv: without the program's name.
        verbs: all verbs; the arguments of the one that is called are parsed.
        groups: what the first words do that several verbs share.
    """
    parser = _parser(argv, verbs, groups)
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser(argv: Sequence[str], verbs: Sequence[Verb], groups: Mapping[str, str]) -> argparse.ArgumentParser:
    """The names of all verbs, and the arguments of the one that is called."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    common.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    parser = argparse.ArgumentParser(
        prog="guerdon",
        **_texts("guerdon", "VERB", (guerdon.__doc__ or "").partition("\n")[0], overview(verbs)),
    )
    parser.add_argument("--version", action="version", version=f"guerdon {guerdon.__version__}")
    actions = parser.add_subparsers(required=True, prog="guerdon", metavar="VERB", help=argparse.SUPPRESS)
    places = {"": actions}
    called = [item for item in argv if not item.startswith("-")]
    for verb in verbs:
        group, _, name = verb.name.rpartition(" ")
        if group not in places:
            members = [each for each in verbs if each.name.startswith(f"{group} ")]
            described = actions.add_parser(
                group, **_texts(f"guerdon {group}", "ACTION", groups[group], "\n".join(_lines(members)))
            )
            places[group] = described.add_subparsers(
                required=True, prog=f"guerdon {group}", metavar="ACTION", help=argparse.SUPPRESS
            )
        added = places[group].add_parser(
            name,
            parents=[common],
            description=verb.help,
            epilog=f"example: {verb.example}" if verb.example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        words = verb.name.split()
        if called[: len(words)] == words:
            for names, options in verb.arguments:
                added.add_argument(*names, **options)
            added.set_defaults(verb=verb)
    return parser


def _texts(prog: str, word: str, description: str, epilog: str) -> dict[str, Any]:
    """Arguments of a parser that only chooses another one: the list of choices is `epilog`, as it stands."""
    usage = f"{prog} [-h] {word} ..."
    kind = argparse.RawDescriptionHelpFormatter
    return {"usage": usage, "description": description, "epilog": epilog, "formatter_class": kind}


def overview(verbs: Iterable[Verb]) -> str:
    """All verbs under the headings of their stages, each with an example."""
    verbs = list(verbs)
    lines: list[str] = []
    for stage, heading in STAGES.items():
        lines += [f"{heading}:", *_lines(verb for verb in verbs if verb.stage == stage), ""]
    return "\n".join([*lines, "guerdon VERB --help lists the arguments of a verb."])


def _lines(verbs: Iterable[Verb]) -> list[str]:
    lines = []
    for verb in verbs:
        lines.append(f"  {verb.name:<{WIDTH}}{verb.help}")
        if verb.example:
            lines.append(f"  {'':<{WIDTH}}$ {verb.example}")
    return lines
