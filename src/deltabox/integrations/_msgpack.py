"""msgpack for a Python that has nothing but its standard library, and messages as lines.

The program inside a sandbox (`_environment.py`) runs in whatever Python the caller has there, so it
cannot count on msgspec. What it has to write and read is little: None, bool, int, float, str,
bytes and lists (see `_values.py` for how everything else becomes these), in the encoding of
https://github.com/msgpack/msgpack/blob/master/spec.md. The large parts are bytes, which are copied
once, so this takes some ten microseconds for a usual message. The host uses msgspec.

A message is one line, because that is what `Stream.readline` gives with a single request to the
engine: newlines are escaped, at the cost of two passes that look for a byte each.

Also runs inside: standard library only, Python 3.9 or later.
"""

from __future__ import annotations

import struct
from typing import Any

_ESCAPE, _ESCAPED_ESCAPE, _ESCAPED_NEWLINE = b"\x1b", b"\x1b0", b"\x1b1"


def to_line(message: bytes) -> bytes:
    """A message as it travels."""
    escaped = message.replace(_ESCAPE, _ESCAPED_ESCAPE).replace(b"\n", _ESCAPED_NEWLINE)
    return escaped + b"\n"


def from_line(line: bytes) -> bytes:
    """The message that a line (with its newline) holds."""
    return line[:-1].replace(_ESCAPED_NEWLINE, b"\n").replace(_ESCAPED_ESCAPE, _ESCAPE)


def pack(value: Any) -> bytes:
    """Encode plain data. `TypeError` for anything else, `OverflowError` beyond 64 bits."""
    parts: list[bytes] = []
    _pack(value, parts)
    return b"".join(parts)


def _pack(value: Any, parts: list[bytes]) -> None:
    if value is None:
        parts.append(b"\xc0")
    elif value is True:
        parts.append(b"\xc3")
    elif value is False:
        parts.append(b"\xc2")
    elif isinstance(value, int):
        if 0 <= value < 0x80:
            parts.append(value.to_bytes(1, "big"))
        else:
            parts.append(b"\xd3" + value.to_bytes(8, "big", signed=True))
    elif isinstance(value, float):
        parts.append(struct.pack(">Bd", 0xCB, value))
    elif isinstance(value, str):
        encoded = value.encode()
        parts.append(struct.pack(">BI", 0xDB, len(encoded)) + encoded)
    elif isinstance(value, bytes):
        parts.append(struct.pack(">BI", 0xC6, len(value)))
        parts.append(value)
    elif isinstance(value, list):
        parts.append(struct.pack(">BI", 0xDD, len(value)))
        for item in value:
            _pack(item, parts)
    else:
        raise TypeError(f"{type(value).__name__} is no plain data")


# first byte -> how the value, or the length of what follows, is written, and what follows
_SCALARS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpack(message: bytes) -> Any:
    """Decode one value. `ValueError` when it is cut short, or has maps or extensions."""
    try:
        value, end = _unpack(message, 0)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the message ends too early: {error}") from error
    if end != len(message):
        raise ValueError(f"{len(message) - end} bytes follow the message")
    return value


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _SCALARS:
        return _number(_SCALARS[first], data, at)
    if 0xA0 <= first < 0xC0:
        return _text(data, at, first - 0xA0)
    if 0x90 <= first < 0xA0:
        return _list(data, at, first - 0x90)
    if first in _BYTES:
        size, at = _number(_BYTES[first], data, at)
        return _cut(data, at, size)
    if first in _TEXTS:
        size, at = _number(_TEXTS[first], data, at)
        return _text(data, at, size)
    if first in _LISTS:
        size, at = _number(_LISTS[first], data, at)
        return _list(data, at, size)
    raise ValueError(f"a message cannot hold what begins with the byte {first:#x}")


def _number(form: str, data: bytes, at: int) -> tuple[Any, int]:
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)


def _cut(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise ValueError("the message ends too early")
    return data[at : at + size], at + size


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    found, at = _cut(data, at, size)
    return found.decode(), at


def _list(data: bytes, at: int, size: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(size):
        item, at = _unpack(data, at)
        items.append(item)
    return items, at
