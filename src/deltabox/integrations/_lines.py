"""Messages as lines of JSON, with bytes in base64.

The program inside a sandbox (`_environment.py`) runs in whatever Python the caller has there, so
this is what every Python has. A line, because that is what `Stream.readline` gives with a single
request to the engine. A message is None, bool, int, float, str, bytes and lists of them
(`_values.py` says how everything else becomes these): the maps of JSON are free to stand for bytes.
Floats come back bit for bit, but for what a NaN carries.

Also runs inside: standard library only, Python 3.9 or later.
"""

from __future__ import annotations

import base64
import json
from typing import Any


def to_line(message: Any) -> bytes:
    """A message as it travels. `TypeError` for what is no plain data."""
    return json.dumps(message, default=_told, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> Any:
    """The message that a line holds. `ValueError` for one that holds none."""
    return json.loads(line, object_hook=_meant)


def _told(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"": base64.b64encode(value).decode()}
    raise TypeError(f"a {type(value).__name__} is no plain data")


def _meant(found: dict[str, Any]) -> bytes:
    if list(found) != [""]:
        raise ValueError("a map that stands for no bytes")
    return base64.b64decode(found[""], validate=True)
