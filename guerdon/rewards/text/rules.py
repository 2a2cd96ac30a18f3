"""Rewards by rule for text tasks: a batch of responses and references in, float32 [N] in [0, 1] out.

No text can hang a rule. Equivalence and regular expressions are checked in a process of their own, where a
pair has `seconds` of a processor and then counts as wrong (see `deadline`); the other rules take time in
proportion to the length of the text. Texts beyond `max_chars` count as wrong; of a response to a mathematical
question the end is read, where the answer stands. What cannot be parsed is wrong, and the debug log says so.
"""

from __future__ import annotations

import logging
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from guerdon.config.build import build
from guerdon.config.limits import PositiveFloat, PositiveInt
from guerdon.core.errors import ConfigError, DataError, unknown_name
from guerdon.core.types import FloatArray
from guerdon.rewards.text.deadline import DeadlineChecks, Pair, tagged
from guerdon.rewards.text.trl import TRLReward, trl_rewards

log = logging.getLogger("guerdon")

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FLAGS = {"ignorecase": re.IGNORECASE, "multiline": re.MULTILINE, "dotall": re.DOTALL}


class TextReward(ABC):
    """A rule that scores responses; calling it checks the batch and then scores it.

    TRL's trainers take a rule as it is: `GRPOTrainer(reward_funcs=[MathReward(), FormatReward()], ...)`.
    """

    @overload
    def __call__(self, responses: Sequence[str], references: Sequence[str], /) -> FloatArray: ...

    @overload
    def __call__(
        self, *, prompts: Sequence[Any] | None = None, completions: Sequence[Any], **columns: Any
    ) -> list[float | None]: ...

    def __call__(  # type: ignore[misc]  # mypy takes positional-only names for columns
        self,
        responses: Any = None,
        references: Any = None,
        /,
        *,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        **columns: Any,
    ) -> FloatArray | list[float | None]:
        """Rewards of N responses -> float32 [N]; as TRL calls it, a list of numbers.

        Args:
            responses: N texts.
            references: N right answers; rules that need none take them all the same.
            prompts: of TRL; not looked at.
            completions: of TRL: N texts or lists of messages, in place of `responses`.
            columns: of TRL: the other columns of the data set. The right answers are in the first of
                `reference`, `references`, `solution`, `answer`, `ground_truth` and `label` that is there;
                `as_trl` names another.
        """
        if completions is not None:
            return trl_rewards(self, completions, columns)
        for name, texts in (("responses", responses), ("references", references)):
            if isinstance(texts, str) or not isinstance(texts, Sequence):
                raise DataError(f"{name} must be a list of texts, not {type(texts).__name__}")
            wrong = [type(item).__name__ for item in texts if not isinstance(item, str)]
            if wrong:
                raise DataError(f"{name} must hold texts, not {wrong[0]}")
        if len(responses) != len(references):
            raise DataError(f"{len(responses)} responses and {len(references)} references do not pair up")
        return self.score(responses, references)

    def as_trl(self, *, column: str | None = None, name: str | None = None) -> TRLReward:
        """The rule for a TRL trainer, with its references in `column`, called `name` in logs."""
        return TRLReward(self, column, self.__name__ if name is None else name)

    @property
    def needs_reference(self) -> bool:
        """Whether rewards depend on the references."""
        return True

    @property
    def __name__(self) -> str:
        """How TRL calls it in logs."""
        return next(
            (name for name, kind in TEXT_REWARDS.items() if type(self) is kind), type(self).__qualname__
        )

    @abstractmethod
    def score(self, responses: Sequence[str], references: Sequence[str]) -> FloatArray:
        """Rewards of a checked batch -> float32 [N]."""


@dataclass(frozen=True, kw_only=True)
class _PassOrFail(TextReward):
    """1 or 0 each: whether a response passes."""

    max_chars: PositiveInt = 100_000
    """A longer response is wrong."""

    def score(self, responses: Sequence[str], references: Sequence[str]) -> FloatArray:
        """1 or 0 each."""
        rewards = np.zeros(len(responses), np.float32)
        ids = [number for number, text in enumerate(responses) if len(text) <= self.max_chars]
        if len(ids) < len(responses):
            count = len(responses) - len(ids)
            log.debug("%d responses of more than %d characters: no reward", count, self.max_chars)
        rewards[ids] = self._passed([(responses[number], references[number]) for number in ids])
        return rewards

    @abstractmethod
    def _passed(self, pairs: Sequence[Pair]) -> list[bool]: ...


@dataclass(frozen=True, kw_only=True)
class ExactMatchReward(_PassOrFail):
    """1 where the response is the reference, after both are normalised in the same way."""

    answer_tag: str | None = None
    """Compare only what stands in the last `<tag>...</tag>` of the response."""
    ignore_case: bool = True
    """Case does not matter."""
    ignore_spaces: bool = True
    """Any run of spaces and line breaks counts as one, and none at the ends."""
    ignore_punctuation: bool = False
    """ASCII punctuation is left out."""
    ignore_articles: bool = False
    """The English words a, an and the are left out."""

    def _passed(self, pairs: Sequence[Pair]) -> list[bool]:
        return [self._said(response) == self.normalized(reference) for response, reference in pairs]

    def normalized(self, text: str) -> str:
        """The text as it is compared."""
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = text.translate(_NO_PUNCTUATION)
        if self.ignore_articles:
            text = _ARTICLES.sub(" ", text)
        return " ".join(text.split()) if self.ignore_spaces else text

    def _said(self, response: str) -> str | None:
        if self.answer_tag is None:
            return self.normalized(response)
        inside = tagged(response, self.answer_tag)
        return self.normalized(inside) if inside else None


@dataclass(frozen=True, kw_only=True)
class FormatReward(_PassOrFail):
    """1 for `<think>...</think><answer>...</answer>`: each tag once, in order, and not empty."""

    tags: tuple[str, ...] = ("think", "answer")
    """The tags in their order."""
    allow_outside: bool = False
    """Whether other text may stand before, between and after them."""

    @property
    def needs_reference(self) -> bool:
        """Its rewards depend on the responses alone."""
        return False

    def __post_init__(self) -> None:
        if not self.tags or len(set(self.tags)) != len(self.tags) or not all(self.tags):
            raise ConfigError(f"tags must be different names, not {self.tags}")

    def _passed(self, pairs: Sequence[Pair]) -> list[bool]:
        return [self._holds(response) for response, _ in pairs]

    def _holds(self, text: str) -> bool:
        """Linear in the length of the text: every part is searched for once."""
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        if any(text.count(mark) != 1 for mark in marks):
            return False
        for number, mark in enumerate(marks):
            before, found, text = text.partition(mark)
            inside = number % 2 == 1
            if not found or (inside and not before.strip()):
                return False
            if not inside and before.strip() and not self.allow_outside:
                return False
        return self.allow_outside or not text.strip()


@dataclass(frozen=True, kw_only=True)
class RegexReward(_PassOrFail):
    """1 where a regular expression is found in the response; `{reference}` in it stands for the reference."""

    pattern: str
    """In Python's syntax; the reference is escaped before it is put in."""
    full: bool = False
    """Whether the whole response must match."""
    flags: tuple[str, ...] = ()
    """Of `ignorecase`, `multiline` and `dotall`."""
    seconds: PositiveFloat = 1.0
    """What one response may take; then it is wrong."""

    def __post_init__(self) -> None:
        for flag in self.flags:
            if flag not in _FLAGS:
                raise ConfigError(unknown_name("flag", flag, _FLAGS))
        try:
            re.compile(self.pattern.replace("{reference}", ""))
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{self.pattern!r} is no regular expression: {error}") from error

    @property
    def needs_reference(self) -> bool:
        """Whether the pattern speaks of it."""
        return "{reference}" in self.pattern

    @cached_property
    def _checks(self) -> DeadlineChecks:
        settings = {
            "pattern": self.pattern,
            "flags": sum(int(_FLAGS[flag]) for flag in set(self.flags)),
            "full": self.full,
            "references": self.needs_reference,
        }
        return DeadlineChecks("regex", settings, self.seconds)

    def _passed(self, pairs: Sequence[Pair]) -> list[bool]:
        return self._checks.run(pairs)


@dataclass(frozen=True, kw_only=True)
class MathReward(TextReward):
    r"""1 where the response's final answer equals the reference mathematically, as `math-verify` sees it.

    Both may be LaTeX or plain numbers and expressions: 0.5, 1/2 and \boxed{\frac{1}{2}} are the same.
    """

    answer_tag: str | None = None
    """Read the answer from the last `<tag>...</tag>` of the response, and nowhere else."""
    seconds: PositiveFloat = 5.0
    """What one response may take; then it is wrong."""
    max_chars: PositiveInt = 4_000
    """So much of the response's end is read; a longer reference is an error."""

    @cached_property
    def _checks(self) -> DeadlineChecks:
        settings = {"answer_tag": self.answer_tag, "max_chars": self.max_chars}
        return DeadlineChecks("math", settings, self.seconds)

    def score(self, responses: Sequence[str], references: Sequence[str]) -> FloatArray:
        """1 or 0 each."""
        longest = max(map(len, references), default=0)
        if longest > self.max_chars:
            raise DataError(f"a reference has {longest} characters, more than max_chars={self.max_chars}")
        ends = [text[-2 * self.max_chars :] for text in responses]  # with room for tags
        return np.array(self._checks.run(list(zip(ends, references, strict=True))), np.float32)


class CombinedTextReward(TextReward):
    """The weighted sum of several rules.

    Args:
        rules: (rule, weight) pairs; weights may be negative, as penalties.
    """

    def __init__(self, rules: Sequence[tuple[TextReward, float]]) -> None:
        if not rules:
            raise ConfigError("a combined reward needs at least one rule")
        for _, weight in rules:
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not np.isfinite(weight):
                raise ConfigError(f"a weight must be a finite number, not {weight!r}")
        self.rules = tuple(rules)

    @property
    def needs_reference(self) -> bool:
        """Whether one of its rules does."""
        return any(rule.needs_reference for rule, _ in self.rules)

    def score(self, responses: Sequence[str], references: Sequence[str]) -> FloatArray:
        """Sums of weight times reward."""
        total = np.zeros(len(responses), np.float32)
        for rule, weight in self.rules:
            total += np.float32(weight) * rule(responses, references)
        return total


TEXT_REWARDS: dict[str, type[TextReward]] = {
    "math": MathReward,
    "exact_match": ExactMatchReward,
    "format": FormatReward,
    "regex": RegexReward,
    "combined": CombinedTextReward,
}
"""Name in the settings -> class."""


def create_text_reward(spec: str | Mapping[str, Any]) -> TextReward:
    """A rule from plain settings.

    Args:
        spec: a name, or a mapping of `name` and the rule's settings; `combined` takes `rules`, a list of such
            mappings, each with a `weight` (1 by default).
    """
    settings = _section(spec)
    name = settings.pop("name", None)
    if name is None:
        raise ConfigError(f"a text reward needs a name, one of {', '.join(TEXT_REWARDS)}")
    if name not in TEXT_REWARDS:
        raise ConfigError(unknown_name("text reward", name, TEXT_REWARDS))
    kind = TEXT_REWARDS[name]
    if kind is not CombinedTextReward:
        return build(kind, settings, name)
    rules = settings.pop("rules", None)
    if settings or isinstance(rules, str | Mapping) or not isinstance(rules, Sequence):
        raise ConfigError(
            f"combined takes rules, a list, and nothing else; not {sorted(settings) or rules!r}"
        )
    sections = [_section(rule) for rule in rules]
    weights = [section.pop("weight", 1.0) for section in sections]
    return CombinedTextReward(list(zip(map(create_text_reward, sections), weights, strict=True)))


def _section(spec: Any) -> dict[str, Any]:
    if isinstance(spec, str):
        return {"name": spec}
    if not isinstance(spec, Mapping):
        raise ConfigError(f"a text reward is a name or a mapping with a name, not {spec!r}")
    return dict(spec)
