"""The library's side of the keeper's socket: one connection for each call in progress.

Connections are kept for the next call when one has ended well, and closed when it was interrupted:
the keeper then gives the call up (see `keeper.protocol`). So any thread may call at any time, and
Ctrl-C needs no care anywhere above this module.

A handle belongs to the process that made it. A forked child shares its parent's sockets, and two
processes talking over one socket would mix up their answers; so every call checks the process id
and says so instead.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from . import errors
from .errors import DeltaBoxError, HostUnsupported, SandboxClosed
from .keeper.protocol import VERSION, Channel, Message, rebuild

DEFAULT_STATE: Final = "/var/lib/deltabox"
_KEPT: Final = 32
_SETTLED: Final = 10.0  # seconds for an answer that must be waited for


class Waits(Protocol):
    """How somebody waits for data without blocking his thread (aio/bridge.py)."""

    def __call__(self, sock: socket.socket, *, within: float | None) -> None:
        """Wait where a call is being made for it; return at once everywhere else.

        `within`: seconds after which to return in any case, and not to be cut short until then.
        """


_waits: Waits | None = None


def wait_by(waits: Waits) -> None:
    """Have every wait for an answer begin with this."""
    global _waits
    _waits = waits


def _wait(sock: socket.socket) -> None:
    if _waits is not None:
        _waits(sock, within=sock.gettimeout())


def state_directory() -> Path:
    """Where the engine keeps its things: $DELTABOX_STATE or /var/lib/deltabox."""
    return Path(os.environ.get("DELTABOX_STATE") or DEFAULT_STATE).absolute()


class Keeper:
    """The connections of this process to the keeper of one state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._starting = threading.Lock()
        self._released: deque[tuple[str, str]] = deque()

    def release(self, tree: str, checkpoint: str) -> None:
        """An object for a checkpoint has gone; the engine is told with the next request.

        For finalizers, which may run anywhere, under any lock: appending to a deque takes none.
        """
        if os.getpid() == self._process:
            self._released.append((tree, checkpoint))

    def _request(self, op: str, arguments: dict[str, Any]) -> Message:
        """A request, with what was released since the last one."""
        message: Message = {"op": op} | arguments
        released: dict[str, list[str]] = {}
        with contextlib.suppress(IndexError):
            while True:
                tree, checkpoint = self._released.popleft()
                released.setdefault(tree, []).append(checkpoint)
        if released:
            message["released"] = released
        return message

    def call(self, op: str, *, _settle: bool = False, **arguments: Any) -> Any:
        """Ask for something that exists already: a lost keeper means a closed sandbox.

        `_settle`: what was asked for changes the whole sandbox and cannot be given up half-way. An
        interrupt is raised when the engine is through with it, so that no later call can meet it.
        """
        return self.stream(op, None, _settle=_settle, **arguments)

    def stream(
        self,
        op: str,
        event: Callable[[bytes], None] | None,
        *,
        _settle: bool = False,
        **arguments: Any,
    ) -> Any:
        """As `call`; what comes before the answer goes to `event`."""
        self._check_process()
        channel = self._take()
        if channel is None:
            try:
                channel = self._connect()
            except OSError:
                raise _lost(self.state) from None
        try:
            channel.send(self._request(op, arguments))
            answer = _answer(channel, event)
        except OSError:
            channel.close()
            raise _lost(self.state) from None
        except BaseException:
            if _settle:
                _wait_for_answer(channel)
            channel.close()
            raise
        if answer is None:
            channel.close()
            raise _lost(self.state)
        self._give(channel)
        return _value(answer)

    @contextmanager
    def making(self, op: str, *, start: bool, **arguments: Any) -> Iterator[Any]:
        """Ask for something new. It is ours at the end of the block; if that is not reached, the
        keeper takes it back. `start`: start a keeper when there is none.
        """
        channel, answer = self._ask_for(op, start=start, **arguments)
        try:
            yield _value(answer)
            channel.send({"op": "claim"})
        except BaseException as error:
            if isinstance(error, Exception) and "error" in answer:
                self._give(channel)
            else:
                channel.close()
            raise
        self._give(channel)

    def _ask_for(self, op: str, *, start: bool, **arguments: Any) -> tuple[Channel, Message]:
        self._check_process()
        while True:
            kept = self._take()
            channel = kept or (self._connected() if start else self._connect_or_lost())
            try:
                channel.send(self._request(op, arguments))
                answer = _answer(channel, None)
            except OSError:
                answer = None
            except BaseException:
                channel.close()
                raise
            if answer is not None:
                return channel, answer
            channel.close()
            if not start or kept is None:
                raise _lost(self.state)
            self._drop_idle()  # they led to a keeper that has gone

    def ensure(self) -> None:
        """Have the keeper run. Starting one takes a third of a second."""
        channel = self._connected()
        self._drop_idle()  # they may lead to a keeper that has gone
        self._give(channel)

    def post(self, op: str, **arguments: Any) -> None:
        """Ask without waiting for the answer, over a connection that is used for nothing else."""
        if os.getpid() != self._process:
            return
        channel = self._connect()
        channel.send({"op": op} | arguments)
        channel.sock.close()

    # -- connections -------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise DeltaBoxError(
                f"this sandbox belongs to process {self._process}, which forked this one "
                f"({os.getpid()}); create a sandbox of your own, or use it there"
            )

    def _take(self) -> Channel | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give(self, channel: Channel) -> None:
        with self._lock:
            if len(self._idle) < _KEPT:
                self._idle.append(channel)
                return
        with contextlib.suppress(OSError):
            channel.send({"op": "claim"})  # what came last over it has arrived
        channel.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _connect_or_lost(self) -> Channel:
        try:
            return self._connect()
        except OSError:
            raise _lost(self.state) from None

    def _connect(self) -> Channel:
        """A new connection, greeted. `OSError` when there is no keeper."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        channel = Channel(sock, _wait)
        try:
            sock.connect(str(self.state / "keeper.sock"))
            channel.send({"op": "hello", "version": VERSION})
            answer = channel.receive()
            if answer is None:
                raise ConnectionResetError("the keeper has just ended")
            _value(answer)
        except BaseException:
            channel.close()
            raise
        return channel

    def _connected(self) -> Channel:
        """A new connection to a keeper that is started if necessary."""
        deadline = time.monotonic() + 30.0
        while True:
            try:
                return self._connect()
            except (FileNotFoundError, ConnectionError):
                if time.monotonic() > deadline:
                    raise DeltaBoxError(
                        f"the engine of {self.state} does not start; see its keeper.log"
                    ) from None
            except PermissionError:
                raise HostUnsupported(_unsupported()) from None
            with self._starting:
                self._start()

    def _start(self) -> None:
        if os.geteuid() != 0:
            raise HostUnsupported(_unsupported())
        package = Path(__file__).resolve().parent.parent
        environment = dict(os.environ)
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{package}{os.pathsep}{path}" if path else str(package)
        command = [sys.executable, "-m", "deltabox.keeper", "--state", str(self.state)]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            cwd="/",
            start_new_session=True,
            check=False,
        )
        said = done.stdout.decode(errors="replace").strip()
        if said:
            told = json.loads(said)
            if told["class"] == "HostUnsupported":
                raise HostUnsupported(_unsupported(told["message"]))
            cls: type[DeltaBoxError] = getattr(errors, told["class"], DeltaBoxError)
            raise cls(f"the engine could not start: {told['message']}")
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise DeltaBoxError(f"the engine could not start: {lines[-1]}")


def _unsupported(reason: str = "the engine needs root") -> str:
    """The doctor's sentence for this host, or `reason` where it finds nothing wrong."""
    from . import doctor

    return " ".join(doctor.blockers()) or reason


def _answer(channel: Channel, event: Callable[[bytes], None] | None) -> Message | None:
    while (message := channel.receive()) is not None:
        if "event" not in message:
            return message
        if event is not None:
            # an OSError of the caller's own function is not one of the connection
            try:
                event(message["data"])
            except OSError as error:
                raise CallbackError(error) from error
    return None


def _wait_for_answer(channel: Channel) -> None:
    try:
        channel.sock.settimeout(_SETTLED)
        channel.receive()
    except (OSError, ValueError):
        pass  # the keeper has gone, or a part of the answer was lost in the interrupt


class CallbackError(Exception):
    """Carries an OSError of a caller's callback past the handling of connection errors."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _value(answer: Message) -> Any:
    if "error" in answer:
        raise rebuild(answer["error"])
    return answer["ok"]


def _lost(state: Path) -> SandboxClosed:
    return SandboxClosed(
        f"the sandbox is closed: its engine process has ended ({state}/keeper.log says more)"
    )


_keepers: dict[Path, Keeper] = {}
_keepers_lock = threading.Lock()


def keeper() -> Keeper:
    """The keeper of the present state directory."""
    state = state_directory()
    with _keepers_lock:
        found = _keepers.get(state)
        if found is None:
            found = _keepers[state] = Keeper(state)
        return found


def _forget_in_child() -> None:
    """In a forked child: close our copies of the parent's sockets and begin afresh."""
    global _keepers_lock
    _keepers_lock = threading.Lock()
    for parent in _keepers.values():
        for channel in parent._idle:
            channel.sock.close()
        parent._idle = []
        parent._lock = threading.Lock()
    _keepers.clear()


def _close_idle() -> None:
    for keeper in _keepers.values():
        keeper._drop_idle()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_close_idle)


def no_copies(what: str) -> NoReturn:
    """Refuse to pickle or copy a handle."""
    raise TypeError(
        f"a {what} stands for something that runs, and cannot be pickled or copied; "
        "create or fork a sandbox where you need one"
    )
