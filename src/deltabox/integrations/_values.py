"""What environments say and are told, as plain data: observations, actions, infos, frames.

Not pickle: what runs in the sandbox may be anything, and a pickle from there could run code in the
host's process. Everything becomes None, bool, int, float, str, bytes, and lists that begin with a
letter that says what they stand for; what comes out is of the same type, dtype and bits as what
went in. What is none of these types is refused by name, with the way to it.

Also runs inside: standard library, numpy and gymnasium only, Python 3.9 or later.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.spaces import GraphInstance

_KINDS = "biufcmMSU"  # of dtypes: numbers, times, text; no objects and no records
_EXACT = (bool, float, str, bytes)


class NotData(ValueError):
    """A value that cannot be told as data, or data that stands for no value."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""

    def __str__(self) -> str:
        return f"{self.path.lstrip()}: {self.problem}" if self.path else self.problem


def lower(value: Any) -> Any:
    """A value as plain data. `NotData` for what is not known here."""
    kind = type(value)
    if value is None or kind in _EXACT:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else ["i", f"{value:x}"]
    if kind is np.ndarray:
        return _array(value)
    if kind is dict:
        return _mapping(value)
    if kind is tuple:
        return ["t", *_items(value)]
    if kind is list:
        return ["l", *_items(value)]
    return _rare(value)


def _array(value: Any) -> list[Any]:
    if value.dtype.kind not in _KINDS or not value.dtype.itemsize:
        raise NotData(f"a numpy array of dtype {value.dtype} cannot be told as data")
    return ["a", value.dtype.str, list(value.shape), value.tobytes()]


def _mapping(value: dict[Any, Any]) -> list[Any]:
    data = ["d"]
    for key, item in value.items():
        data.append(lower(key))
        try:
            data.append(lower(item))
        except NotData as error:
            error.path = f"[{key!r}]{error.path}"
            raise
    return data


def _items(values: Any) -> list[Any]:
    data = []
    for at, item in enumerate(values):
        try:
            data.append(lower(item))
        except NotData as error:
            error.path = f"[{at}]{error.path}"
            raise
    return data


def _rare(value: Any) -> Any:
    """Scalars of numpy, graphs, sets, and what is one of the known types by inheritance."""
    if isinstance(value, np.generic):
        if isinstance(value, np.str_):
            return ["u", str.__str__(value)]
        if isinstance(value, np.bytes_):
            return ["b", bytes(value)]
        if value.dtype.kind not in _KINDS:
            raise NotData(f"a numpy scalar of dtype {value.dtype} cannot be told as data")
        return ["n", value.dtype.str, value.tobytes()]
    if isinstance(value, GraphInstance):
        return ["g", *_items(value)]
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return _array(np.asarray(value))
    if isinstance(value, int):  # an IntEnum
        return lower(int(value))
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict):
        return _mapping(value)
    if isinstance(value, (list, tuple)):
        return ["t" if isinstance(value, tuple) else "l", *_items(value)]
    if isinstance(value, (set, frozenset)):
        return ["s" if isinstance(value, set) else "f", *_items(value)]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    kind = type(value)
    raise NotData(f"a {kind.__module__}.{kind.__qualname__} cannot be told as data")


def lift(data: Any) -> Any:
    """The value that data stands for. `NotData` for data that stands for none.

    The data may come from a hostile program: nothing is built that is larger than the data, and
    nothing of it is executed.
    """
    if type(data) is not list:
        return data
    try:
        return _LIFTED[data[0]](*data[1:])
    except NotData:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise NotData(f"{str(data)[:80]} stands for no value ({error})") from error


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(str(name))
    if dtype.kind not in _KINDS or not dtype.itemsize:
        raise NotData(f"an array of dtype {dtype} is not taken")
    return dtype


def _lifted_array(name: str, shape: list[int], data: bytes) -> Any:
    dtype = _dtype(name)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise NotData(f"{len(data)} bytes are no array of dtype {dtype} and shape {shape}")
    if not data:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()  # a copy can be written to


def _lifted_scalar(name: str, data: bytes) -> Any:
    dtype = _dtype(name)
    if len(data) != dtype.itemsize:
        raise NotData(f"{len(data)} bytes are no {dtype}")
    return np.frombuffer(data, dtype)[0]


def _lifted_mapping(*data: Any) -> dict[Any, Any]:
    return {lift(key): lift(item) for key, item in zip(data[::2], data[1::2])}  # noqa: B905


_LIFTED: dict[str, Any] = {
    "a": _lifted_array,
    "b": np.bytes_,
    "c": complex,
    "d": _lifted_mapping,
    "f": lambda *data: frozenset(map(lift, data)),
    "g": lambda *data: GraphInstance(*map(lift, data)),
    "i": lambda text: int(text, 16),
    "l": lambda *data: list(map(lift, data)),
    "n": _lifted_scalar,
    "s": lambda *data: set(map(lift, data)),
    "t": lambda *data: tuple(map(lift, data)),
    "u": np.str_,
}
