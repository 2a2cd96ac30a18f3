"""Changes that know a format: records and opcodes of pickles, members of zip archives, PNG chunks, JSON."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import pickle
import pickletools
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fuzz.mutations import MAX_INPUT, NUMBERS, mutate_bytes

_TEXTS: tuple[Any, ...] = ("", "x" * 5000, "a\ud800b", "²", "module:Env", "train", "\x00", None, True, [], {})

# Records


def _nested(rng: random.Random, make: Callable[[list[Any]], Any]) -> Any:
    """A list of the list before it, several times: few bytes, many items."""
    value: Any = make([rng.choice((0.0, 1, None, "x"))])
    for _ in range(rng.choice((3, 30, 60, 200))):
        value = make([value] * rng.choice((1, 2, 2, 10)))
    return value


def _cycle(rng: random.Random) -> Any:
    value: Any = rng.choice(([], {}))
    value.append(value) if isinstance(value, list) else value.update(images=value, obs=value)
    return value


def _number(rng: random.Random) -> Any:
    number = rng.choice((*NUMBERS, 10**400, 1 << 20000)) * rng.choice((1, -1))
    return rng.choice((number, float(rng.choice((0, 0.5, 1e308, float("nan"), float("inf")))), complex(1, 2)))


def _array(rng: random.Random) -> Any:
    """Arrays of odd types and shapes; some are large without holding a byte."""
    shapes = (
        (0,),
        (),
        (2, 0, 3),
        (10**9, 0),
        (0, 10**9),
        (2, 8, 8, 3),
        (1, 1, 1, 8, 8, 3),
        (1,) * 30,
        (2, 8, 8),
    )
    kinds = ("u1", "f4", "f8", "f2", "f16", "i8", "c16", "?", "S3", "U2", "O", ">f4", "u8")
    return np.zeros(rng.choice(shapes), rng.choice(kinds))


def _object_array(rng: random.Random) -> Any:
    array = np.empty(rng.choice((1, 2, 3)), dtype=object)
    array[:] = [rng.choice((None, 1, "x", np.zeros((8, 8, 3), np.uint8), {}))] * len(array)
    if rng.random() < 0.3:
        array[0] = array
    return array


def _tensor(rng: random.Random) -> Any:
    kinds = (
        torch.uint8,
        torch.float32,
        torch.bfloat16,
        torch.bool,
        torch.int64,
        torch.complex64,
        torch.float16,
    )
    shape = rng.choice(((0,), (), (2, 8, 8, 3), (1, 8, 8, 3), (3, 8, 8), (10**9, 0), (1,) * 20))
    return torch.zeros(shape, dtype=rng.choice(kinds))


def _shared(rng: random.Random) -> Any:
    """One array many times."""
    return [np.zeros(rng.choice(((8, 8, 3), (64, 64, 3), (1000,))), np.uint8)] * rng.choice((2, 1000, 20000))


_HOSTILE: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: _nested(rng, list),
    lambda rng: _nested(rng, tuple),
    _cycle,
    _number,
    _number,
    _array,
    _array,
    _object_array,
    _tensor,
    _shared,
    lambda rng: range(rng.choice((0, 2, 10**9, 10**30))),
    lambda rng: rng.choice(
        (None, True, "", "²", "\ud800", "x" * 5000, b"", b"\xff", "train", [], {}, (), set())
    ),
    lambda rng: {rng.choice((0, "²", "\ud800", None, (1, 2), 1.5, b"x")): 1},
    lambda rng: slice(0, 10**9),
    lambda rng: bytearray(8),
)


def mutate_record(record: Any, rng: random.Random) -> Any:
    """Put hostile values in place of one or two parts of plain data."""
    for _ in range(rng.choice((1, 1, 2))):
        record = _replace(record, rng)
    return record


def _replace(record: Any, rng: random.Random) -> Any:
    """Go down at random, and change what is there."""
    if isinstance(record, dict) and record and rng.random() < 0.9:
        key = rng.choice(list(record))
        if rng.random() < 0.1:
            return {name: value for name, value in record.items() if name != key}
        return {**record, key: _replace(record[key], rng)}
    if isinstance(record, list) and record and rng.random() < 0.85:
        place = rng.randrange(len(record))
        if rng.random() < 0.1:
            return record[:place] + record[place:][:: rng.choice((-1, 2))]
        return [*record[:place], _replace(record[place], rng), *record[place + 1 :]]
    if isinstance(record, np.ndarray) and record.ndim and rng.random() < 0.3:
        return rng.choice(
            (record[:0], record[..., None], record.astype(rng.choice(("f8", "O", "i8", "U5"))), record.T)
        )
    return rng.choice(_HOSTILE)(rng)


# Opcodes

_BOMBS = (
    pickle.EMPTY_LIST + pickle.NONE + pickle.APPEND,
    pickle.EMPTY_LIST
    + pickle.MARK
    + pickle.NONE * 4
    + pickle.APPENDS
    + (
        pickle.MEMOIZE
        + pickle.EMPTY_LIST
        + pickle.MARK
        + pickle.BINGET
        + b"\0"
        + pickle.DUP * 8
        + pickle.APPENDS
    )
    * 4,
    (pickle.DUP * 2 + pickle.TUPLE3) * 40,
    (pickle.DUP + pickle.TUPLE2) * 60,
    pickle.TUPLE1 * 5000,
    pickle.MARK * 3000,
    pickle.EMPTY_DICT + pickle.DUP + pickle.NONE + pickle.SETITEM,
    b"cbuiltins\nrange\n" + pickle.BININT + struct.pack("<i", 10**9) + pickle.TUPLE1 + pickle.REDUCE,
    b"cbuiltins\nbytearray\n" + pickle.BININT + struct.pack("<i", 10**9) + pickle.TUPLE1 + pickle.REDUCE,
    pickle.LONG4 + struct.pack("<i", 3000) + b"\x7f" * 3000,
    pickle.LONG1 + b"\x09" + b"\xff" * 8 + b"\0",
    b"cos\nsystem\n" + pickle.SHORT_BINUNICODE + b"\x04true" + pickle.TUPLE1 + pickle.REDUCE,
    pickle.EMPTY_TUPLE,
    pickle.NONE,
    pickle.POP,
    pickle.DUP,
    pickle.REDUCE,
    pickle.BUILD,
    pickle.EMPTY_LIST,
    pickle.NEWTRUE,
    pickle.STOP,
)


def mutate_opcodes(data: bytes, rng: random.Random) -> bytes:
    """Delete, repeat, move or put in opcodes of the pickle that begins somewhere in `data`."""
    head, *pieces, tail = _opcodes(data)
    if len(pieces) < 3:
        return mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place, other = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        action = rng.randrange(6)
        if action == 0:
            pieces[place] = b""
        elif action == 1:
            pieces[place] *= min(rng.choice((2, 3, 1000)), MAX_INPUT // (len(pieces[place]) + 1))
        elif action == 2:
            pieces[place], pieces[other] = pieces[other], pieces[place]
        elif action == 3:
            pieces[place] = mutate_bytes(pieces[place], rng)
        else:
            pieces[place] = rng.choice(_BOMBS) + (pieces[place] if action == 4 else b"")
    return head + b"".join(pieces) + tail


@functools.lru_cache(maxsize=64)  # the same few inputs are changed again and again
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    """What stands before a pickle, each of its opcodes, and what comes after it."""
    start = max(0, data.find(pickle.PROTO))
    places: list[int] = []
    with contextlib.suppress(Exception):  # a damaged pickle; what can be read of it is enough
        for _, _, place in pickletools.genops(data[start:]):
            places.append(start + (place or 0))
    places += [places[-1] + 1 if places else start, len(data)]
    return data[:start], *(data[a:b] for a, b in itertools.pairwise(places))


# Archives and pictures


@functools.lru_cache(maxsize=64)
def zip_members(data: bytes) -> dict[str, bytes]:
    """What is in an archive; nothing if that cannot be read, or is too large to be written often."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # a damaged archive
        return {}
    return members if sum(map(len, members.values())) <= MAX_INPUT // 4 else {}


def zipped(members: Mapping[str, bytes], kind: int) -> bytes:
    """An archive with right checksums."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def mutate_zip(data: bytes, rng: random.Random) -> bytes:
    """Change a member of an archive and write it anew with right checksums, or the archive's own bytes."""
    members = zip_members(data)
    if rng.random() < 0.3 or not members:
        return mutate_bytes(data, rng)
    name = rng.choice(list(members))
    changed = mutate_bytes(members[name], rng, list(members.values()))
    return zipped({**members, name: changed}, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


_NAME = re.compile(rb"[A-Za-z_0-9]+")


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change a number or name in the header and keep its length right, or the file's bytes."""
    length = int.from_bytes(data[:8], "little")
    header, content = data[8 : 8 + length], data[8 + length :]
    found = list(_NAME.finditer(header))
    if not found or rng.random() < 0.2:
        return mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2))):
        match, other = rng.choice(found), rng.choice(found)
        text = str(rng.choice(NUMBERS)).encode() if match[0].isdigit() else other[0]
        text = rng.choice((text, other[0], b"0", b"BOOL", b"F64", b"I64", b"env_rewards"))
        header = header[: match.start()] + text + header[match.end() :]
    if rng.random() < 0.2:
        content = content[: rng.randrange(len(content) + 1)]
    return len(header).to_bytes(8, "little") + header + content


_PNG = b"\x89PNG\r\n\x1a\n"
_KINDS = (
    b"IHDR",
    b"IDAT",
    b"PLTE",
    b"tRNS",
    b"iTXt",
    b"zTXt",
    b"iCCP",
    b"eXIf",
    b"acTL",
    b"fcTL",
    b"fdAT",
    b"IEND",
)


def mutate_png(data: bytes, rng: random.Random) -> bytes:
    """Change the chunks of a PNG and keep their checksums right; other pictures change as bytes."""
    if not data.startswith(_PNG) or rng.random() < 0.2:
        return mutate_bytes(data, rng)
    chunks: list[tuple[bytes, bytes]] = []
    place = len(_PNG)
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        chunks.append((kind, data[place + 8 : place + 8 + length]))
        place += 12 + length
    for _ in range(rng.choice((1, 2))):
        number = rng.randrange(len(chunks))
        kind, content = chunks[number]
        action = rng.randrange(5)
        if action == 0:
            kind = rng.choice(_KINDS)
        elif action == 1 and kind == b"IHDR" and len(content) >= 8:
            sizes = (rng.choice((1, 8, 100, 3000, 13000, 60000, 2**31 - 1)) for _ in range(2))
            content = struct.pack(">II", *sizes) + content[8:]
        elif action == 2:
            chunks.insert(number, (rng.choice(_KINDS), rng.randbytes(rng.randrange(64))))
            continue
        elif action == 3 and kind == b"IDAT":
            content = zlib.compress(rng.randbytes(rng.randrange(300)) + b"\0" * rng.choice((0, 10**5)))
        else:
            content = mutate_bytes(content, rng)
        chunks[number] = (kind, content)
    return _PNG + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


# JSON


def or_bytes(mutate: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """`mutate`, or a change of bytes where it cannot parse them, such as torn inputs of the corpus."""

    @functools.wraps(mutate)
    def changed(data: bytes, rng: random.Random) -> bytes:
        try:
            return mutate(data, rng)
        except Exception:  # whatever parsers raise
            return mutate_bytes(data, rng)

    return changed


def change_json(value: Any, rng: random.Random) -> Any:
    """Go down at random, and put something else in the place of what is there."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: change_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], change_json(value[place], rng), *value[place + 1 :]]
    if rng.random() < 0.5:
        return rng.choice((*NUMBERS, 10**400, 0.5, float("inf"), float("nan"))) * rng.choice((1, -1))
    return rng.choice(_TEXTS)


@or_bytes
def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change some values and write the text anew, or change the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = change_json(value, rng)
    return json.dumps(value).encode()
