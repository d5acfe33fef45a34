"""TCP connections whose other end is outside the sandbox, and sockets in the host's network."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator

import pytest

from deltabox import Sandbox, UnsupportedState
from deltabox.linux import namespace as namespaces
from tests.objects.test_tcp import PREPARE
from tests.probe import Probe


def _outside(probe: Probe, call: Callable[[], socket.socket]) -> socket.socket:
    """A socket in the sandbox's network that no process of its tree holds."""
    wanted = probe.ask("os.readlink('/proc/self/ns/net')")
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == wanted:
                path = f"/proc/{entry}/ns/net"
                return namespaces.within(path, namespaces.CLONE_NEWNET, call)
        except OSError:
            continue  # it has ended
    raise AssertionError("nobody is in the sandbox's network namespace")


@pytest.fixture
def external(sandbox: Sandbox) -> Iterator[tuple[Probe, socket.socket]]:
    """A program with a connection to the outside, which has sent b'before'."""
    probe = Probe.start(sandbox)
    yield from _with_external(probe)


def _with_external(probe: Probe) -> Iterator[tuple[Probe, socket.socket]]:
    probe.do(PREPARE)
    with _outside(probe, lambda: socket.create_server(("127.0.0.1", 4444))) as listener:
        probe.do("s = socket.create_connection(('127.0.0.1', 4444)); name = s.getsockname()")
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"before")
            probe.do("select.select([s], [], [])")
            yield probe, peer


_AFTER_RESET = """[events(s), *(outcome(lambda: s.recv(10)) for _ in range(3)),
    outcome(lambda: s.send(b'x')), s.getsockname() == list(name) or s.getsockname() == name]"""
_OUTCOME = """
def outcome(call):
    try:
        found = call()
        return found.decode() if isinstance(found, bytes) else found
    except OSError as error:
        return errno.errorcode[error.errno]
"""


def test_connections_to_the_outside_are_reset(
    sandbox: Sandbox, external: tuple[Probe, socket.socket]
) -> None:
    probe, peer = external
    probe.do(_OUTCOME)
    checkpoint = sandbox.checkpoint()
    probe.do("s.send(b'alive')")
    assert peer.recv(10) == b"alive", "the checkpoint has disturbed the connection"
    with sandbox.fork(at=checkpoint) as fork:
        copy = probe.within(fork)
        events, *outcomes = copy.ask(_AFTER_RESET)
        assert events & select.POLLERR and events & select.POLLHUP and events & select.POLLIN
        assert outcomes == ["before", "ECONNRESET", "", "EPIPE", True]
    probe.do("s.send(b'alive')")
    assert peer.recv(10) == b"alive", "a fork has disturbed the connection"
    sandbox.rollback(checkpoint)
    again = sandbox.checkpoint()
    assert probe.ask(_AFTER_RESET)[1:] == ["before", "ECONNRESET", "", "EPIPE", True]
    sandbox.rollback(again)
    assert probe.ask(_AFTER_RESET)[1:] == ["before", "ECONNRESET", "", "EPIPE", True]


def test_connections_to_the_outside_are_refused() -> None:
    with Sandbox.create(on_external="refuse") as sandbox:
        probe = Probe.start(sandbox)
        for _, peer in _with_external(probe):
            with pytest.raises(UnsupportedState, match=r"to 127\.0\.0\.1:4444, outside"):
                sandbox.checkpoint()
            probe.do("s.send(b'alive')")
            assert peer.recv(10) == b"alive"


def test_on_external_is_checked() -> None:
    with pytest.raises(ValueError, match="on_external"):
        Sandbox.create(on_external="hope")  # type: ignore[arg-type]


def test_the_hosts_network() -> None:
    with Sandbox.create(network="host") as sandbox:
        probe = Probe.start(sandbox)
        probe.do("import socket; s = socket.socket(); s.setsockopt(6, 1, 1)")
        checkpoint = sandbox.checkpoint()
        sandbox.rollback(checkpoint)
        assert probe.ask("s.getsockopt(6, 1)") == 1
        probe.do("s.bind(('127.0.0.1', 0))")
        with pytest.raises(UnsupportedState, match="a socket in the host's network"):
            sandbox.checkpoint()
