"""Random changes of bytes, for targets that bring no mutation of their own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

MAX_INPUT = 1 << 20
"""Longer inputs are cut: size is not what the fuzzing looks for."""
NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    32767,
    65535,
    10**6,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
)
"""Where sizes, signs and counters go wrong."""
_NUMBER = re.compile(rb"-?\d+")
_TEXTS = (b"-1", b"nan", b"1e999", b"10" * 40, b"0.5", b"null", b"{}", "²".encode(), b"\xff", b"")


def mutate_bytes(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A changed copy of `data`; `others` are further valid inputs, of which pieces are taken."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if others and rng.random() < 0.1:
            _splice(changed, rng, rng.choice(others))
        else:
            rng.choice(_MUTATIONS)(changed, rng)
    return bytes(changed[:MAX_INPUT])


def _place(data: bytearray, rng: random.Random, width: int = 1) -> int:
    return rng.randrange(max(1, len(data) - width + 1))


def _length(data: bytearray, rng: random.Random) -> int:
    """Mostly short."""
    return rng.randint(1, max(1, min(len(data), 1 << rng.randrange(9))))


def _flip_bit(data: bytearray, rng: random.Random) -> None:
    if data:
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, rng: random.Random) -> None:
    if data:
        data[_place(data, rng)] = rng.randrange(256)


def _set_number(data: bytearray, rng: random.Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    start = _place(data, rng, width)
    number = rng.choice(NUMBERS) * rng.choice((1, 1, 1, -1)) % (1 << 8 * width)
    data[start : start + width] = number.to_bytes(width, rng.choice(("little", "big")))


def _set_text_number(data: bytearray, rng: random.Random) -> None:
    found = list(_NUMBER.finditer(data[: 1 << 14]))
    if found:
        match = rng.choice(found)
        text = rng.choice(_TEXTS) if rng.random() < 0.4 else str(rng.choice(NUMBERS)).encode()
        data[match.start() : match.end()] = text


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[_place(data, rng) :]


def _delete(data: bytearray, rng: random.Random) -> None:
    start = _place(data, rng)
    del data[start : start + _length(data, rng)]


def _repeat(data: bytearray, rng: random.Random) -> None:
    start = _place(data, rng)
    data[start:start] = data[start : start + _length(data, rng)] * rng.choice((1, 1, 2, 40))


def _insert(data: bytearray, rng: random.Random) -> None:
    start = _place(data, rng)
    data[start:start] = rng.randbytes(_length(data, rng))


def _swap(data: bytearray, rng: random.Random) -> None:
    length = _length(data, rng)
    first, second = sorted((_place(data, rng, length), _place(data, rng, length)))
    if first + length <= second:
        ends = slice(first, first + length), slice(second, second + length)
        data[ends[0]], data[ends[1]] = data[ends[1]], data[ends[0]]


def _splice(data: bytearray, rng: random.Random, other: bytes) -> None:
    """A piece of another input, or its end, put in place of as much or of the end."""
    piece, length = bytearray(other), _length(data, rng)
    start, source = _place(data, rng), _place(piece, rng)
    if rng.random() < 0.3:
        data[start:] = piece[source:]
    else:
        data[start : start + length] = piece[source : source + length]


_MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_byte,
    _set_number,
    _set_number,
    _set_text_number,
    _truncate,
    _delete,
    _repeat,
    _insert,
    _swap,
)
