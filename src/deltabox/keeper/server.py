"""Connections and sessions: who talks to the keeper, and what happens when they go.

A *session* is a client process, known by its pidfd: when it ends, however it ends, its sandboxes
are closed. A *connection* serves one call at a time in a thread of its own, which is what makes the
library thread-safe without any multiplexing. The pump watches each connection for its other end
being closed, so that a call which waits for a program ends with the caller that asked for it.

When there has been no sandbox for a moment, the keeper ends. A client that is still connected then
finds its connections closed and starts the next keeper when it needs one; a request that arrives
just too late is not answered, which tells the client the same.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .. import errors
from .background import after_reply
from .box import Box, Call, CallerGone, gone
from .journal import start_time
from .protocol import VERSION, Channel, Message, describe
from .requests import Requests
from .streams import Pump
from .trees import Tree

log = logging.getLogger(__name__)

LINGER: Final = 2.0
"""Seconds without a sandbox after which the keeper ends."""
FIRST: Final = 10.0
"""Seconds it waits for its first request."""


_FIRST: Final = -10


class Session:
    """A client process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.started = start_time(pid)
        self.boxes: set[str] = set()


class Connection:
    """One connection of a session; serves one request at a time."""

    def __init__(self, channel: Channel, session: Session) -> None:
        self.channel = channel
        self.session = session
        self.unclaimed: list[str] = []
        self.given: list[tuple[Tree, str]] = []  # checkpoints described in the last answer
        self._lock = threading.Lock()
        self._call: tuple[Call, Box] | None = None
        self._hung = False

    def attaching(self, box: Box) -> Callable[[Call], None]:
        """What `Box.calling` calls, so that the call ends when this connection does."""

        def attach(call: Call) -> None:
            with self._lock:
                self._call = (call, box)
                hung = self._hung
            if hung:
                gone(call, box)

        return attach

    def finished(self) -> None:
        """The request in progress is over."""
        with self._lock:
            self._call = None

    def hung_up(self) -> None:
        """The other end was closed (pump's thread)."""
        with self._lock:
            self._hung = True
            call = self._call
        if call is not None:
            gone(*call)


class Server:
    """Accepts connections in the main thread until nobody is left."""

    def __init__(self, listener: socket.socket, path: Path, requests: Requests, pump: Pump) -> None:
        self.listener = listener
        self.path = path
        self.requests = requests
        self.pump = pump
        self.sessions: dict[int, Session] = {}
        self.lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = False
        self._active = 0

    def stop(self) -> None:
        """End `serve` soon; may be called from a signal handler."""
        self._ended = True
        os.eventfd_write(self._wake, 1)

    def serve(self) -> None:
        """Accept and serve until there has been no sandbox for a while."""
        poller = select.poll()
        poller.register(self.listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        end = time.monotonic() + FIRST
        while not self._ended:
            with self.lock:
                idle = not self._active and not self.requests.boxes
                if idle and time.monotonic() >= end:
                    self._ended = True
                    break
            if not idle:
                end = time.monotonic() + LINGER
            wait = max(0.0, end - time.monotonic()) * 1000 + 1 if idle else None
            ready = dict(poller.poll(wait))
            if self._wake in ready:
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    pass
            if self.listener.fileno() in ready:
                self._accept()
        # nobody can connect from here on; a client that just tries starts the next keeper
        self.path.unlink(missing_ok=True)
        self.listener.close()

    def _begin(self) -> bool:
        """A request has come; False when it is too late for it."""
        with self.lock:
            if self._ended:
                return False
            self._active += 1
            return True

    def _finish(self) -> None:
        with self.lock:
            self._active -= 1
            wake = not self._active and not self.requests.boxes
        if wake:
            os.eventfd_write(self._wake, 1)

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            log.warning("accept: %s", error)
            time.sleep(0.05)  # out of descriptors: do not spin
            return
        threading.Thread(target=self._serve, args=(sock,), name="connection", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        # What runs beside a request is not what its caller waits for; threads have their own nice
        # value in Linux (setpriority(2)).
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _FIRST)
        try:
            connection = self._greet(channel)
        except Exception as error:
            log.warning("a connection that failed to greet: %s", error)
            connection = None
        if connection is None:
            channel.close()
            return
        fd = sock.fileno()

        open_still = threading.Lock()  # taken for good before the descriptor is closed

        def hung_up(_events: int) -> None:
            # The pump may have heard of an earlier connection that had the same descriptor, or we
            # may be the earlier one.
            if open_still.acquire(blocking=False):
                try:
                    if not _has_hung_up(sock):
                        return
                    self.pump.forget(fd)
                finally:
                    open_still.release()
                connection.hung_up()

        self.pump.watch(fd, select.EPOLLRDHUP, hung_up)
        try:
            self._converse(connection)
        except OSError as error:
            log.debug("connection: %s", error)
        except Exception:
            log.exception("connection")
        finally:
            open_still.acquire()
            self.pump.forget(fd)
            channel.close()
            for number in connection.unclaimed:
                log.info("%s was never claimed", number)
                self._close(connection.session, number)
            for tree, number in connection.given:
                tree.released([number])

    def _greet(self, channel: Channel) -> Connection | None:
        """The first message: the right version, and who is there."""
        credentials = channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("iII", credentials)
        hello = channel.receive()
        if hello is None:
            return None
        error: Exception | None = None
        if uid != os.geteuid() or not pid:
            error = errors.HostUnsupported("the engine serves only its own user, in its own place")
        elif hello.get("version") != VERSION:
            error = errors.DeltaBoxError(
                "the running engine is of another version of deltabox; end the programs that use it"
            )
        if error is not None:
            channel.send({"error": describe(error)})
            return None
        session = self._session(pid)
        channel.send({"ok": {"pid": os.getpid()}})
        return Connection(channel, session)

    def _session(self, pid: int) -> Session:
        with self.lock:
            session = self.sessions.get(pid)
            if session is not None and session.started == start_time(pid):
                return session
            session = Session(pid)
            self.sessions[pid] = session

        def ended(_events: int) -> None:
            self.pump.forget(session.pidfd)
            threading.Thread(target=self._end_session, args=(session,), daemon=True).start()

        self.pump.watch(session.pidfd, select.EPOLLIN, ended)
        log.info("session of process %d", pid)
        return session

    def _end_session(self, session: Session) -> None:
        log.info("process %d has ended: %d sandboxes to close", session.pid, len(session.boxes))
        for number in list(session.boxes):
            self._close(session, number)
        with self.lock:
            if self.sessions.get(session.pid) is session:
                del self.sessions[session.pid]
        os.close(session.pidfd)
        os.eventfd_write(self._wake, 1)

    def _close(self, session: Session, number: str) -> None:
        try:
            self.requests.close(number)
        except Exception:
            log.exception("closing %s", number)
        session.boxes.discard(number)
        os.eventfd_write(self._wake, 1)

    def _converse(self, connection: Connection) -> None:
        channel = connection.channel
        while (message := channel.receive()) is not None:
            connection.unclaimed.clear()
            connection.given.clear()
            released = message.pop("released", None)
            if released:
                self.requests.released(released)
            op = str(message.pop("op"))
            if op == "claim":
                continue
            reply: Message
            if not self._begin():
                return
            with after_reply():
                try:
                    reply = {"ok": self._do(connection, op, message)}
                except CallerGone:
                    return
                except BaseException as error:
                    reply = {"error": describe(error)}
                finally:
                    connection.finished()
                    self._finish()
                try:
                    channel.send(reply)
                except ValueError as error:
                    channel.send({"error": describe(error)})

    def _do(self, connection: Connection, op: str, arguments: dict[str, Any]) -> Any:
        return self.requests.handler(op)(connection, **arguments)


def _has_hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))
