"""Calls of the library from coroutines, without threads and without a second library.

The library blocks in one place only: where it waits for the engine's answer (`_connection`). A call
from a coroutine is made in a greenlet of its own. When it would block there it switches back to the
coroutine, which awaits the socket instead, and is gone on with. So everything above that place is
the same code for both, and a cancelled task is the same to it as Ctrl-C: an exception that comes
out of the wait, upon which it gives the request up by closing the connection.

SQLAlchemy's asyncio extension has shown the way. Rejected: a thread for each call, which cannot be
cancelled, and of which a thousand waiting commands need a thousand; and generating asynchronous
code from the synchronous one, which is a second tree to be read and debugged.
"""

from __future__ import annotations

import contextvars
import socket
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import anyio
from greenlet import getcurrent, greenlet

from .. import _connection

P = ParamSpec("P")
T = TypeVar("T")


class _Work(greenlet):
    """A call in progress; what it switches to its parent is to be awaited."""

    ignored = False  # nobody can await for it any more


async def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns, or raises; whatever it waits for is awaited."""
    work = _Work(function)
    work.gr_context = contextvars.copy_context()
    outcome: Any = work.switch(*args, **kwargs)
    while not work.dead:
        work.parent = getcurrent()
        try:
            value = await outcome
        except BaseException as error:
            # a coroutine that is closed in the middle must not await again
            work.ignored = isinstance(error, GeneratorExit)
            outcome = work.throw(error)
        else:
            outcome = work.switch(value)
    result: T = outcome
    return result


def await_in_call(awaitable: Awaitable[T]) -> T:
    """Within a function that `call` calls: wait for something asynchronous."""
    current = getcurrent()
    assert isinstance(current, _Work) and current.parent is not None
    value: T = current.parent.switch(awaitable)
    return value


def _wait(sock: socket.socket, *, within: float | None) -> None:
    current = getcurrent()
    if isinstance(current, _Work) and not current.ignored:
        await_in_call(_readable(sock, within))


async def _readable(sock: socket.socket, within: float | None) -> None:
    if within is None:
        await anyio.wait_readable(sock)
        return
    # nobody is told if it is not: the receiving then ends by the socket's own timeout
    with anyio.move_on_after(within, shield=True):
        await anyio.wait_readable(sock)


_connection.wait_by(_wait)
