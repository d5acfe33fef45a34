"""Gymnasium's spaces as data, and made again of it.

A space is told by what its constructor takes, so that the one that is built is equal to it and
samples alike. Only gymnasium's own classes, exactly: a class derived from one may mean something
else, and is refused by name.

Also runs inside: standard library, numpy and gymnasium only, Python 3.9 or later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from ._values import NotData


def described(space: Any) -> dict[str, Any]:
    """What `_values.lower` takes. `NotData` for a space that is not gymnasium's own."""
    kind = type(space)
    if kind not in _DESCRIBED:
        known = ", ".join(known.__name__ for known in _DESCRIBED)
        raise NotData(
            f"a {kind.__module__}.{kind.__qualname__} is no space that can be told as data "
            f"(these can: {known}); wrap the environment so that it has one of them"
        )
    return {"kind": kind.__name__, **_DESCRIBED[kind](space)}


def _all(inner: Any) -> list[Any]:
    return [described(space) for space in inner]


def _integers(space: Any) -> dict[str, Any]:
    """Their dtype where it is not the usual one: older versions have no other."""
    return {} if space.dtype == np.int64 else {"dtype": space.dtype.str}


_DESCRIBED: dict[type, Any] = {
    spaces.Box: lambda s: {"low": s.low, "high": s.high, "dtype": s.dtype.str},
    spaces.Discrete: lambda s: {"n": int(s.n), "start": int(s.start), **_integers(s)},
    spaces.MultiDiscrete: lambda s: {"nvec": s.nvec, "start": s.start, "dtype": s.dtype.str},
    spaces.MultiBinary: lambda s: {"n": s.n},
    spaces.Text: lambda s: {
        "min_length": s.min_length,
        "max_length": s.max_length,
        "charset": s.characters,
    },
    spaces.Tuple: lambda s: {"spaces": _all(s.spaces)},
    spaces.OneOf: lambda s: {"spaces": _all(s.spaces)},
    # pairs, not a dict: that would be sorted
    spaces.Dict: lambda s: {"spaces": [(key, described(one)) for key, one in s.spaces.items()]},
    spaces.Sequence: lambda s: {"space": described(s.feature_space), "stack": s.stack},
    spaces.Graph: lambda s: {
        "node_space": described(s.node_space),
        "edge_space": None if s.edge_space is None else described(s.edge_space),
    },
}


def built(data: Any) -> spaces.Space[Any]:
    """The space that data stands for. `NotData` if it stands for none."""
    try:
        options = dict(data)
        space: spaces.Space[Any] = _BUILT[options.pop("kind")](options)
        return space
    except NotData:
        raise
    except Exception as error:  # whatever gymnasium says of arguments that make no sense
        raise NotData(f"{str(data)[:80]} stands for no space ({error})") from error


def _composed(options: dict[str, Any]) -> list[Any]:
    return [built(one) for one in options["spaces"]]


_BUILT: dict[str, Any] = {
    "Box": lambda o: spaces.Box(o["low"], o["high"], dtype=np.dtype(o["dtype"]).type),
    "Discrete": lambda o: spaces.Discrete(**o),
    "MultiDiscrete": lambda o: spaces.MultiDiscrete(
        o["nvec"], dtype=np.dtype(o["dtype"]).type, start=o["start"]
    ),
    "MultiBinary": lambda o: spaces.MultiBinary(o["n"]),
    "Text": lambda o: spaces.Text(**o),
    "Tuple": lambda o: spaces.Tuple(_composed(o)),
    "OneOf": lambda o: spaces.OneOf(_composed(o)),
    "Dict": lambda o: spaces.Dict([(key, built(one)) for key, one in o["spaces"]]),
    "Sequence": lambda o: spaces.Sequence(built(o["space"]), stack=bool(o["stack"])),
    "Graph": lambda o: spaces.Graph(
        built(o["node_space"]), None if o["edge_space"] is None else built(o["edge_space"])
    ),
}


def parts(space: Any) -> Iterator[Any]:
    """A space and all that it is made of, in an order that depends on nothing else.

    Each has a generator of random numbers of its own, for `sample`.
    """
    yield space
    inner: list[Any] = []
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        inner = list(space.spaces)
    elif isinstance(space, spaces.Dict):
        inner = list(space.spaces.values())
    elif isinstance(space, spaces.Sequence):
        inner = [space.feature_space]
    elif isinstance(space, spaces.Graph):
        inner = [one for one in (space.node_space, space.edge_space) if one is not None]
    for one in inner:
        yield from parts(one)
