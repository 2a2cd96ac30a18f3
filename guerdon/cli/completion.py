"""`guerdon completion`: a script that completes verbs, flags, configs and settings in a shell.

The script holds all words, so that pressing Tab starts no Python. They come from the table of verbs and the
schema of settings: print the script again after an update.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from guerdon.cli.verb import Result, Verb
from guerdon.config import GuerdonConfig, flatten_keys
from guerdon.config.compose import PACKAGE_CONF
from guerdon.config.load import ZOO_CONF
from guerdon.config.schema_zoo import SerialConfig

COMMON = ("--json", "--debug", "--help")


class Words(NamedTuple):
    """What can be typed where."""

    after: dict[str, list[str]]
    """Words typed so far (a verb, a group, or nothing) -> what may follow."""
    values: dict[tuple[str, str], list[str]]
    """A verb and one of its flags -> values of the flag; other flags take numbers or files."""


def completion_verb(arguments: argparse.Namespace) -> Result:
    """The script for one shell."""
    from guerdon.cli.main import VERBS

    script = SCRIPTS[arguments.shell](words_of(VERBS))
    return Result({"shell": arguments.shell, "script": script}, [script])


def words_of(verbs: Sequence[Verb]) -> Words:
    """All words that can be completed."""
    after: dict[str, list[str]] = {"": ["--help", "--version"]}
    values: dict[tuple[str, str], list[str]] = {}
    for verb in verbs:
        group, _, action = verb.name.rpartition(" ")
        if group and group not in after:
            after[group] = []
            after[""].append(group)
        after[group].append(action)
        offered: list[str] = []
        after[verb.name] = offered
        for names, options in verb.arguments:
            choices = _names(verb) if names[0] == "--config-name" else list(options.get("choices", ()))
            if names[0] == "overrides":
                schema = SerialConfig if verb.name == "zoo" else GuerdonConfig
                offered += [f"{key}=" for key in flatten_keys(schema)]
                offered += {"zoo": ["list"], "config show": [*_names(verb), *_stems(ZOO_CONF)]}.get(
                    verb.name, []
                )
            elif names[0].startswith("-"):
                offered += names
                if choices:
                    values |= {(verb.name, name): choices for name in names}
            else:
                offered += choices
        offered += COMMON
    return Words(after, values)


def _names(verb: Verb) -> list[str]:
    """The package's configs for a verb."""
    return _stems(ZOO_CONF if verb.name == "zoo" else PACKAGE_CONF)


def _stems(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _cases(words: Words) -> str:
    """Branches of a `case` over "words so far|flag before", for bash and zsh."""
    found = {f'"{verb}|{flag}"': values for (verb, flag), values in words.values.items()}
    found |= {f'"{place}|"*': after for place, after in words.after.items()}
    return "\n".join(f'    {pattern}) choices="{" ".join(each)}" ;;' for pattern, each in found.items())


def _verb_loop(words: Words, first: str, last: str, word: str) -> str:
    """Shell code that finds the verb among the words before the cursor, for bash and zsh."""
    groups = "|".join(sorted({name.split()[0] for name in words.after if " " in name}))
    return f"""  for ((i = {first}; i < {last}; i++)); do
    case "{word}" in -*) continue ;; esac
    case "$place" in
      "") place="{word}" ;;
      {groups}) place="$place {word}" ;;
    esac
  done"""


def _bash(words: Words) -> str:
    loop = _verb_loop(words, "1", "COMP_CWORD", "${COMP_WORDS[i]}")
    return f"""# bash completion for guerdon: eval "$(guerdon completion bash)"
_guerdon() {{
  local i place="" choices="" current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "$before" in -*) ;; *) before="" ;; esac
{loop}
  case "$place|$before" in
{_cases(words)}
  esac
  COMPREPLY=($(compgen -W "$choices" -- "$current"))
  if [[ ${{#COMPREPLY[@]}} -eq 1 && "${{COMPREPLY[0]}}" == *= ]]; then compopt -o nospace; fi
}}
complete -o default -F _guerdon guerdon"""


def _zsh(words: Words) -> str:
    loop = _verb_loop(words, "2", "CURRENT", "${words[i]}")
    return f"""#compdef guerdon
# zsh completion for guerdon, after compinit: eval "$(guerdon completion zsh)"
_guerdon() {{
  local i place="" choices="" before="${{words[CURRENT-1]}}"
  case "$before" in -*) ;; *) before="" ;; esac
{loop}
  case "$place|$before" in
{_cases(words)}
  esac
  compadd -S "" -- ${{(M)${{=choices}}:#*=}}
  compadd -- ${{${{=choices}}:#*=}}
  _files
}}
compdef _guerdon guerdon"""


def _fish(words: Words) -> str:
    lines = ["# fish completion for guerdon: guerdon completion fish | source"]
    groups = {name.split()[0] for name in words.after if " " in name}
    for place, found in words.after.items():
        plain = " ".join(word for word in found if not word.startswith("-"))
        condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in place.split())
        if not place or place in groups:  # another word must follow, and no file
            condition += f"{'; and ' * bool(place)}not __fish_seen_subcommand_from {plain}"
        start = f"complete -c guerdon -n '{condition}'"
        if plain:
            lines.append(f'{start}{" -f" if not place or place in groups else ""} -a "{plain}"')
        for flag in (word for word in found if word.startswith("--")):
            values = words.values.get((place, flag))
            offered = f' -x -a "{" ".join(values)}"' if values else ""
            lines.append(f"{start} -l {flag.removeprefix('--')}{offered}")
    return "\n".join(lines)


SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
