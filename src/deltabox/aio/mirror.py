"""The classes of `deltabox.aio`, made of the library's own when they are imported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import anyio

from .._connection import keeper
from ..branch import Branch
from ..checkpoint import Checkpoint, Stats
from ..files import Files
from ..process import AnyProcess, BytesProcess, Handle, Process, Stdin, Stream
from ..sandbox import Sandbox
from ..shell import Shell
from . import bridge

MIRRORED = (
    *(Handle, Shell, Stdin, Stream, AnyProcess, Process, BytesProcess),
    *(Files, Stats, Checkpoint, Sandbox, Branch),
)
"""The classes that something is asked of, bases first."""

ASKING: dict[type, set[str]] = {
    Sandbox: {"head", "checkpoints", "usage"},
    AnyProcess: {"exit_code"},
    Checkpoint: {"parent", "children", "stats"},
    Stats: {"changed_files"},
}
"""The properties that ask the engine."""

MAKING = {"create", "fork", "branch"}
"""The methods that make one sandbox."""


class Mirror:
    """What all of the classes are: an object of the library, asked by coroutines."""

    _mirrored: Any

    def __init__(self) -> None:
        raise TypeError(f"a {type(self).__name__} is made by `await Sandbox.create()` and the like")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _mirror_of(getattr(self._mirrored, name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mirror):
            return NotImplemented
        return bool(self._mirrored == other._mirrored)

    def __hash__(self) -> int:
        return hash(self._mirrored)

    def __reduce__(self) -> Any:
        return self._mirrored.__reduce__()

    def __repr__(self) -> str:
        shown = repr(self._mirrored)
        return f"<aio.{shown[1:]}" if shown.startswith("<") else f"aio.{shown}"


class Made:
    """A sandbox that is being made: to be awaited, or entered with `async with`."""

    def __init__(self, making: Coroutine[Any, Any, Any]) -> None:
        self._making = making

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._making.__await__()

    async def __aenter__(self) -> Any:
        self._made = await self._making
        return self._made

    async def __aexit__(self, *exception: Any) -> None:
        await self._made.__aexit__(*exception)


_mirrors: dict[type, type] = {}


def _mirror_of(value: Any) -> Any:
    """The same for coroutines: of ours, and of the tuples and lists of them that ours return."""
    if isinstance(value, (list, tuple)) and any(type(part) in _mirrors for part in value):
        return type(value)(_mirror_of(part) for part in value)
    mirror = _mirrors.get(type(value))
    if mirror is None:
        return value
    found: Any = object.__new__(mirror)
    found._mirrored = value
    return found


def awaited(plain: Any) -> Any:
    """The same sandbox, process, shell, checkpoint, ... for coroutines.

    For what the library has made: a search's `state.sandbox`, say. Both can be used.
    TypeError for anything else.
    """
    if type(plain) not in _mirrors:
        raise TypeError(f"a {type(plain).__name__} is nothing that asks the engine")
    return _mirror_of(plain)


def _plain(value: Any) -> Any:
    """What the library itself takes for an argument."""
    return value._mirrored if isinstance(value, Mirror) else value


async def _ask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    plain = {name: _plain(value) for name, value in kwargs.items()}
    heard = plain.get("on_stdout")
    if inspect.iscoroutinefunction(heard):
        plain["on_stdout"] = lambda data: bridge.await_in_call(heard(data))
    return _mirror_of(await bridge.call(function, *map(_plain, args), **plain))


def _method(name: str, member: Any) -> Any:
    if isinstance(member, classmethod):  # the only one is Sandbox.create

        async def create(*args: Any, **kwargs: Any) -> Any:
            # without it the first one would block while the engine starts
            await anyio.to_thread.run_sync(keeper().ensure)
            return await _ask(getattr(Sandbox, name), *args, **kwargs)

        @functools.wraps(member.__func__)
        def creating(cls: type, *args: Any, **kwargs: Any) -> Made:
            return Made(create(*args, **kwargs))

        return classmethod(creating)
    if name in MAKING:

        @functools.wraps(member)
        def making(self: Any, *args: Any, **kwargs: Any) -> Made:
            return Made(_ask(member, self, *args, **kwargs))

        return making

    @functools.wraps(member)
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await _ask(member, self, *args, **kwargs)

    return method


def _property(original: type, name: str, member: property) -> property:
    read = member.fget
    assert read is not None
    if name in ASKING.get(original, ()):
        return property(lambda self: _ask(read, self), doc=member.__doc__)
    return property(lambda self: _mirror_of(read(self._mirrored)), doc=member.__doc__)


async def _enter(self: Any) -> Any:
    return self


async def _leave(self: Any, *exception: Any) -> None:
    await _ask(type(self._mirrored).__exit__, self, *exception)


async def _lines(self: Any) -> Any:
    while line := await self.readline():
        yield line


def _make(original: type) -> type:
    members: dict[str, Any] = {"__doc__": original.__doc__, "__module__": __package__}
    for name, member in vars(original).items():
        if name == "__iter__":
            members["__aiter__"] = _lines
        elif name == "__enter__":
            members |= {"__aenter__": _enter, "__aexit__": _leave}
        elif name.startswith("_"):
            continue
        elif isinstance(member, property):
            members[name] = _property(original, name, member)
        elif isinstance(member, classmethod) or inspect.isfunction(member):
            members[name] = _method(name, member)
    bases = [_mirrors[base] for base in original.__bases__ if base in _mirrors]
    return type(original.__name__, tuple(bases) or (Mirror,), members)


for _original in MIRRORED:
    _mirrors[_original] = _make(_original)

MIRRORS = {one.__name__: one for one in _mirrors.values()}
"""By name."""
