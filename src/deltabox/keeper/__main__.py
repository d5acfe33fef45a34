"""`python -m deltabox.keeper --state DIR`: start the keeper, and return when it can be spoken to.

The process that was called only forks; the keeper is its child, in a session of its own, so that
the caller has no child left over and a terminal's Ctrl-C does not reach the engine. The caller
learns through a pipe how the start went: nothing is said on success, one JSON line otherwise.

Everything the keeper mounts is in a mount namespace of its own and goes with it.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import logging
import logging.handlers
import os
import signal
import socket
import sys
import time
from pathlib import Path

from ..errors import DeltaBoxError, HostUnsupported

log = logging.getLogger("deltabox.keeper")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deltabox.keeper", description=__doc__)
    parser.add_argument("--state", required=True, type=Path, help="the state directory")
    parser.add_argument(
        "--foreground", action="store_true", help="do not fork; log to standard error"
    )
    arguments = parser.parse_args()
    if arguments.foreground:
        keep(arguments.state, ready=None)
        return
    told, tell = os.pipe()
    if os.fork() == 0:
        os.close(told)
        os.setsid()
        code = 1
        try:
            keep(arguments.state, ready=tell)
            code = 0
        except SystemExit:
            code = 0  # another keeper is up
        except BaseException as error:
            log.critical("the keeper ends", exc_info=True)
            _tell(tell, error)
        finally:
            logging.shutdown()
            os._exit(code)
    os.close(tell)
    with os.fdopen(told, "rb") as answer:
        sys.stdout.buffer.write(answer.read())


def _tell(fd: int, error: BaseException) -> None:
    kind = type(error).__name__ if isinstance(error, DeltaBoxError) else "DeltaBoxError"
    text = str(error) if isinstance(error, DeltaBoxError) else f"{type(error).__name__}: {error}"
    try:
        os.write(fd, json.dumps({"class": kind, "message": text}).encode())
        os.close(fd)
    except OSError:
        pass  # the keeper was up already, and nobody listens


def keep(state: Path, *, ready: int | None) -> None:
    """Be the keeper of a state directory until nobody needs it. `ready` is closed once it is up."""
    if os.geteuid() != 0:
        raise HostUnsupported("the engine needs root")
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = state.resolve()
    _log_to(state, foreground=ready is None)
    lock = _lock(state)
    os.umask(0o022)
    os.chdir("/")
    sys.setswitchinterval(0.0001)

    # here, after the fork: the caller's process never needs them
    from ..deltacr.engine import Engine
    from ..linux import mount, namespace
    from . import journal
    from .requests import Requests
    from .server import Server
    from .streams import Pump

    for removed in journal.clean(state):
        log.warning("left by an earlier keeper, removed: %s", removed)
    namespace.unshare(namespace.CLONE_NEWNS)
    mount.mount("none", "/", None, mount.MS_REC | mount.MS_SLAVE)
    record = journal.Journal(state)
    engine = Engine(directory=state)
    engine.on_made, engine.on_gone = record.made, record.gone
    record.made("cgroup", str(engine.group))
    pump = Pump()
    requests = Requests(directory=state, engine=engine, pump=pump, journal=record)
    path = state / "keeper.sock"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    listener.bind(str(path))
    os.umask(old)
    listener.listen(128)
    server = Server(listener, path, requests, pump)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    pump.start()
    # what has been imported lives as long as we do: no collection needs to look at it
    gc.collect()
    gc.freeze()
    log.info("up: process %d", os.getpid())
    if ready is not None:
        _detach(state)
        os.close(ready)
    try:
        server.serve()
    finally:
        log.info("ending")
        requests.close_all()
        pump.end()
        engine.close()
        record.gone("cgroup", str(engine.group))
        record.close()
        os.close(lock)
        log.info("ended")


def _log_to(state: Path, *, foreground: bool) -> None:
    handler: logging.Handler
    if foreground:
        handler = logging.StreamHandler()
    else:
        handler = logging.handlers.RotatingFileHandler(
            state / "keeper.log", maxBytes=4 << 20, backupCount=1
        )
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname).1s %(threadName)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.addHandler(handler)
    level = os.environ.get("DELTABOX_LOG", "INFO").upper()
    root.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


def _lock(state: Path) -> int:
    """Be the only keeper. One that is just ending is waited for.

    A record lock belongs to this process alone: no child can keep it after us.
    """
    fd = os.open(state / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + 20.0
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if _answers(state / "keeper.sock"):
                raise SystemExit(0) from None  # another was faster, and is up
            if time.monotonic() > deadline:
                raise DeltaBoxError(
                    f"another keeper holds {state} and does not answer; see its keeper.log"
                ) from None
            time.sleep(0.02)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


def _detach(state: Path) -> None:
    """Let go of the caller's terminal and pipes."""
    null = os.open("/dev/null", os.O_RDWR)
    output = os.open(state / "keeper.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)


if __name__ == "__main__":
    main()
