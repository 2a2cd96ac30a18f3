"""Text rewards as TRL calls them: `reward(prompts=..., completions=..., **columns) -> list[float | None]`.

TRL's trainers (GRPO and others) hand over whole batches: completions as texts, or as lists of messages where
the data set is conversational, and every other column of the data set by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import FloatArray
from guerdon.data.files.bounds import one_line

REFERENCE_COLUMNS = ("reference", "references", "solution", "answer", "ground_truth", "label")
"""Where the right answers are looked for, in this order, unless a column is named."""


class Rule(Protocol):
    """What scores texts against references."""

    @property
    def needs_reference(self) -> bool:
        """Whether scores depend on the references."""

    def score(self, responses: Sequence[str], references: Sequence[str]) -> FloatArray:
        """Rewards float32 [N]."""


def trl_rewards(
    rule: Rule, completions: Sequence[Any], columns: Mapping[str, Any], column: str | None = None
) -> list[float | None]:
    """Rewards of N completions.

    Args:
        rule: scores them.
        completions: N texts, or N lists of messages, of which the last one of the assistant counts.
        columns: the other columns of the batch.
        column: the one with the right answers; None looks for the usual names.

    Returns:
        A number each, None where the right answer is None: TRL leaves such rows out of this reward.
    """
    texts = [_text(completion) for completion in completions]
    if not rule.needs_reference:
        return [float(reward) for reward in rule.score(texts, [""] * len(texts))]
    references = _references(columns, len(texts), column)
    rows = [number for number, reference in enumerate(references) if reference is not None]
    scores = rule.score([texts[row] for row in rows], [str(references[row]) for row in rows])
    rewards: list[float | None] = [None] * len(texts)
    for row, reward in zip(rows, scores, strict=True):
        rewards[row] = float(reward)
    return rewards


def _references(columns: Mapping[str, Any], count: int, column: str | None) -> Sequence[Any]:
    names = [name for name in REFERENCE_COLUMNS if name in columns] if column is None else [column]
    if not names or names[0] not in columns:
        wanted = (
            f"column {column!r}" if column else f"column with right answers ({', '.join(REFERENCE_COLUMNS)})"
        )
        raise ConfigError(
            f"the data has no {wanted}, only {sorted(map(str, columns))}: name one with as_trl(column=...)"
        )
    found = columns[names[0]]
    if isinstance(found, str) or not isinstance(found, Sequence) or len(found) != count:
        raise DataError(f"the column {names[0]!r} must be a list of {count} answers, not {one_line(found)}")
    for answer in found:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
            raise DataError(f"the column {names[0]!r} must hold texts or numbers, not {one_line(answer)}")
    return found


def _text(completion: Any) -> str:
    """What the assistant said last."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, Mapping) for message in completion):
        said = [message for message in completion if message.get("role") == "assistant"] or completion[-1:]
        return _content(said[-1].get("content")) if said else ""
    raise DataError(f"a completion is a text or a list of messages, not {one_line(completion)}")


def _content(content: Any) -> str:
    """The text of a message, which may come in parts (`{"type": "text", "text": ...}`)."""
    if content is None:  # a message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text", "") for part in content if isinstance(part, Mapping)]
        return "".join(part for part in parts if isinstance(part, str))
    raise DataError(f"the content of a message is a text or a list of parts, not {one_line(content)}")


class TRLReward:
    """A rule under another name, or with its references in a column of another name.

    Args:
        rule: scores the completions.
        column: the data set's column with the right answers; None looks for the usual names.
        name: how TRL calls it in logs.
    """

    def __init__(self, rule: Rule, column: str | None, name: str) -> None:
        self._rule, self._column, self.__name__ = rule, column, name

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Rewards of a batch; see `trl_rewards`."""
        return trl_rewards(self._rule, completions, columns, self._column)
