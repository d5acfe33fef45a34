"""What travels over the keeper's socket, and how.

A message is four bytes of length and one msgpack map. A request is `{"op": name, ...arguments}`;
the answer is any number of `{"event": kind, "data": bytes}` and then one `{"ok": value}` or one
`{"error": {...}}`. A request that makes something new (a sandbox, a fork) is followed by
`{"op": "claim"}`: a caller that is interrupted before it could claim what it asked for does not
leave it behind, because the keeper closes what is unclaimed when the connection ends. In the same
way a checkpoint that is described in an answer counts as referred to from then on, and no longer
if the connection ends with that answer. When the client's object for it goes, the next request of
whatever kind names it in `"released": {tree: [ids]}`.

There is one connection for each call in progress and no multiplexing: an interrupted call (Ctrl-C
in the middle of an answer) can then be given up by closing its connection, and no other call
notices. Frames are not typed with msgspec structs on purpose: keeper and library are always the
same version (`hello` checks it), and plain maps keep the import and the decoding cheap.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from .. import errors

log = logging.getLogger(__name__)

VERSION: Final = 2
LARGEST: Final = 1 << 30
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()

Message = dict[str, Any]


class Channel:
    """One end of a connection: whole messages in, whole messages out. Not thread-safe.

    `wait` is called whenever something is about to be received: for whoever must not block there.
    """

    def __init__(
        self, sock: socket.socket, wait: Callable[[socket.socket], None] | None = None
    ) -> None:
        self.sock = sock
        self._wait = wait
        self._held = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message; `OSError` when the other side has gone."""
        body = _encoder.encode(message)
        if len(body) > LARGEST:
            raise ValueError(f"a message of {len(body)} bytes is too large (limit {LARGEST})")
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Message | None:
        """The next message, or None when the other side has closed the connection."""
        held = self._held
        while len(held) < 4:
            if not self._more(65536):
                return None
        (length,) = _LENGTH.unpack_from(held)
        if length > LARGEST:
            raise ConnectionError(f"a message of {length} bytes was announced")
        while len(held) < 4 + length:
            if not self._more(max(65536, 4 + length - len(held))):
                return None
        message: Message = _decoder.decode(memoryview(held)[4 : 4 + length])
        if len(held) == 4 + length:
            self._held = bytearray()
        else:
            self._held = held[4 + length :]
        return message

    def _more(self, size: int) -> bool:
        if self._wait is not None:
            self._wait(self.sock)
        data = self.sock.recv(min(size, 1 << 20))
        self._held += data
        return bool(data)

    def close(self) -> None:
        """Close, also for the copies of this socket that forked processes may hold."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()


_BUILT_IN: Final[dict[str, type[Exception]]] = {
    cls.__name__: cls
    for cls in (ValueError, TypeError, EOFError, KeyError, UnicodeError, NotImplementedError)
}


def describe(error: BaseException) -> Message:
    """An error as a map that `rebuild` turns into the same error on the other side."""
    if isinstance(error, errors.DeltaBoxError):
        plain = (str, bytes, int, float, bool, list, dict, type(None))
        attributes = {k: v for k, v in error.attributes.items() if isinstance(v, plain)}
        return {
            "class": type(error).__name__,
            "message": str(error),
            "attributes": attributes,
        }
    if isinstance(error, OSError) and error.errno is not None:
        name = error.filename
        if name is not None and not isinstance(name, (str, bytes)):
            name = str(name)
        return {
            "class": "OSError",
            "message": error.strerror or str(error),
            "errno": error.errno,
            "filename": name,
        }
    for cls in type(error).__mro__:
        if cls.__name__ in _BUILT_IN and type(error).__module__ == "builtins":
            return {"class": cls.__name__, "message": str(error), "attributes": {}}
    log.error("an error of our own", exc_info=error)
    text = f"the engine met an error of its own ({type(error).__name__}: {error})"
    return {"class": "DeltaBoxError", "message": f"{text}; keeper.log has more", "attributes": {}}


def rebuild(described: Message) -> Exception:
    """The error that `describe` was given."""
    name = described["class"]
    message = described["message"]
    if name == "OSError":
        filename = described.get("filename")
        if filename is None:
            return OSError(described["errno"], message)
        return OSError(described["errno"], message, filename)
    if name in _BUILT_IN:
        return _BUILT_IN[name](message)
    cls = getattr(errors, name) if name in errors.__all__ else errors.DeltaBoxError
    error: Exception = cls(message, **described.get("attributes", {}))
    return error
