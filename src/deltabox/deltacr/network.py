"""Network namespaces: made ahead of need, each with what connects it to the outside, if anything.

`network="nat"` gives every process tree a namespace with a tap device and carries what comes out
of it with ordinary sockets of an unprivileged process on the host (nat.c, over libslirp).  No
interface, address, route or firewall rule of the host is touched.  All namespaces have the same
addresses, so a restored socket finds its own; a rollback or fork never shares a connection with
anyone, because each tree's connections are sockets of another process.

The namespace is configured here, by records that run inside it (netdevice(7), tun.rst of the
kernel), and nothing joins it from outside: the carrier gets the tap's descriptor and needs no
power over the sandbox or the host.  One carrier per tree of sandboxes starts once and forks a
child per namespace (with the tap 0.4 ms more than a bare namespace; starting a program for each
takes 3), so that a fault in one sandbox's packets ends that sandbox's network and no other's.

Tried and dropped: *slirp4netns* and *pasta*, a process that joins each namespace.  They do the
same work, but connect to whatever address a packet names: root of a sandbox who routes 127.0.0.1
to the tap reaches the host's own loopback through slirp4netns 1.2.0, `--disable-host-loopback`
and its sandbox notwithstanding (measured).  Here the loop around libslirp is ours and drops such
frames.  *veth and NAT rules*: faster, but they change the host's forwarding and firewall.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from ..errors import HostUnsupported
from ..linux import namespace as ns
from ..linux import numbers as nr
from ..linux import pidfd
from . import boot
from .peer import Peer, ProgramFailed, end_task, own_task, pair
from .records import Program, Sequence, Var

CARRIER = Path(__file__).with_name("_nat")

# The network every sandbox sees, as in QEMU's and others' user networks. nat.c has the same.
INTERFACE = b"eth0"
GUEST, GATEWAY, RESOLVER = (IPv4Address(f"10.0.2.{host}") for host in (15, 2, 3))
_NETMASK = IPv4Address("255.255.255.0")
_MAC = bytes.fromhex("5254000a020f")  # the same everywhere: programs take it for an identity
_MTU = 65520  # packets never leave the host as such, and large ones are cheap to carry

# linux/sockios.h, linux/if_tun.h, linux/if.h, linux/route.h
_SIOCADDRT, _SIOCSIFFLAGS, _SIOCSIFADDR = 0x890B, 0x8914, 0x8916
_SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFHWADDR = 0x891C, 0x8922, 0x8924
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_UP, _IFF_BROADCAST, _IFF_RUNNING, _IFF_MULTICAST = 0x1, 0x2, 0x40, 0x1000
_IFF_TAP, _IFF_NO_PI = 0x2, 0x1000
_RTF_UP, _RTF_GATEWAY = 1, 2
_AF_INET, _ARPHRD_ETHER = 2, 1
_UNPRIVILEGED = 65534  # of the tree's own range of uids: what "nobody" inside is


@dataclass(frozen=True)
class Network:
    """A network namespace, and the link to its carrier where it has one.

    `namespace` is a descriptor that PID 1 of a tree joins; once it has, only `link` is needed.
    Whoever holds the link keeps the carrier; closing it ends every connection to the outside.
    """

    namespace: int
    link: socket.socket | None = None

    def entered(self) -> None:
        """Somebody lives in the namespace now, which keeps it."""
        os.close(self.namespace)

    def leave(self) -> None:
        """Let the carrier go; it ends on its own, and the namespace with its last process."""
        if self.link is not None:
            self.link.close()

    def close(self) -> None:
        """Both, for a network that nobody has entered."""
        self.entered()
        self.leave()

    @property
    def carried(self) -> bool:
        """False when it should have a carrier and that has ended (or never began)."""
        if self.link is None:
            return True
        poller = select.poll()
        poller.register(self.link, 0)  # POLLHUP comes unasked
        return not poller.poll(0)


class Networks:
    """Makes the network namespaces of one tree of sandboxes.

    `kind` is "none" (a namespace with `lo`), "nat" (and `eth0` to the outside) or "host" (the
    keeper's own). `owner` is the host uid of the tree's root. Raises HostUnsupported at once when
    the host lacks what the kind needs.
    """

    def __init__(self, kind: str, owner: int) -> None:
        self._nat = kind == "nat"
        self._host = kind == "host"
        self._carrier = Carrier(owner + _UNPRIVILEGED) if self._nat else None

    def make(self, door: Peer, slot: int) -> Network:
        """A new network; the door makes the namespace, which so belongs to the tree."""
        if self._host:
            return Network(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        program = _NAT if self._nat else _NONE
        try:
            run = door.run(program.sealed, slot)
        except ProgramFailed as error:
            if "tun" in error.where:
                raise HostUnsupported(
                    f'network="nat" needs the kernel\'s tun driver (modprobe tun): {error}'
                ) from error
            raise
        pid = run.variable(program.pid)
        task = own_task(pid)
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            if self._carrier is None:
                return Network(namespace)
            try:
                tap = pidfd.getfd(task, run.variable(program.tap))
                try:
                    return Network(namespace, self._carrier.carry(tap))
                finally:
                    os.close(tap)
            except BaseException:
                os.close(namespace)
                raise
        finally:
            end_task(task)

    def close(self) -> None:
        """End the carrier. All networks have been left."""
        if self._carrier is not None:
            self._carrier.close()


class Carrier:
    """The process that carries a tree's packets: it forks a child for each tap.

    It ends with its socket, that is with the keeper too, however that ends. (A death signal would
    come when the *thread* that started it ends.)  When it has died it is started again for the
    next network; those it carried are gone, as if their cables had been pulled.
    """

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        if not CARRIER.exists():
            raise HostUnsupported(f"{CARRIER} is missing: the package was not built")
        self._sock, theirs = pair()
        with theirs:
            pid = os.posix_spawn(
                CARRIER,
                [CARRIER.name, str(self._uid)],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)],
                setsigmask=(),
            )
        self._task = own_task(pid)
        os.setpriority(os.PRIO_PROCESS, pid, 0)  # not that of the thread which serves a request
        self._sock.settimeout(10.0)
        try:
            said = self._sock.recv(1000).decode(errors="replace")
        except OSError as error:
            said = str(error)
        if said != "ok":
            self._end()
            raise HostUnsupported(
                'network="nat" needs libslirp (apt-get install libslirp0): '
                f"{said or 'its process ended at once'}"
            )

    def carry(self, tap: int) -> socket.socket:
        """Have a tap carried; the link that keeps it so."""
        mine, theirs = pair()
        with theirs:
            message = array.array("i", [tap, theirs.fileno()])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, message)]
            with self._lock:
                try:
                    self._sock.sendmsg([b"t"], rights)
                except OSError:  # it has died
                    self._end()
                    self._start()
                    self._sock.sendmsg([b"t"], rights)
        return mine

    def _end(self) -> None:
        self._sock.close()
        end_task(self._task)

    def close(self) -> None:
        """Let it end, which it does after its children; kill it (and so them) if it does not."""
        with self._lock:
            self._sock.close()
            pidfd.ended(self._task, 5.0)
            end_task(self._task)


def resolver(host: Iterable[str]) -> str:
    """What /etc/resolv.conf says inside, from the lines of the host's.

    The host's name server may be one that only the host reaches, so all questions go to an address
    of our own network; the carrier passes them to what the host's file names at that moment.
    """
    kept = [line.rstrip("\n") for line in host if line.split()[:1] in (["search"], ["options"])]
    return "\n".join([f"nameserver {RESOLVER}", *kept, ""])


# -- the program that makes a namespace ----------------------------------------------------------


class _Making:
    """A task in a network namespace of its own, which is configured and then waits to be ended.

    Making one takes as long as all the rest of PID 1, so they are made ahead of need.
    """

    def __init__(self, *, nat: bool) -> None:
        program = Program()
        body = program.sequence("network namespace")
        arguments = program.clone_args(
            flags=ns.CLONE_VM | ns.CLONE_PARENT | ns.CLONE_NEWNET, stack=program.stack()
        )
        program.root.clone(arguments, body, save=program.result)
        self.pid = program.result
        self.tap = program.variable()
        body.call(nr.PRCTL, boot.PR_SET_PDEATHSIG, boot.SIGKILL)
        sock = program.variable()
        body.call(nr.SOCKET, _AF_INET, 2 | 0o2000000, 0, save=sock)
        up = struct.pack("<H", _IFF_UP | _IFF_RUNNING)
        _configure(program, body, sock, _SIOCSIFFLAGS, b"lo", up, "lo up")
        if nat:
            self._connect(program, body, sock)
        body.call(nr.CLOSE, sock)
        program.root.barrier(0, 2)
        body.barrier(0, 2)
        body.call(34)  # pause(2)
        self.sealed = program.seal()

    def _connect(self, program: Program, do: Sequence, sock: Var) -> None:
        """A tap with our side of the network, and the route through it."""
        do.call(
            nr.OPENAT,
            boot.AT_FDCWD,
            program.text("/dev/net/tun"),
            os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC,
            save=self.tap,
            what="open tun",
        )
        kind = struct.pack("<H", _IFF_TAP | _IFF_NO_PI)
        _configure(program, do, self.tap, _TUNSETIFF, INTERFACE, kind, "tun")
        # It goes with the namespace, which the kernel does for many at once: when the carrier's
        # close(2) had to remove it, that held up every network of the host for 30 ms.
        do.call(nr.IOCTL, self.tap, _TUNSETPERSIST, 1, what="tun persist")
        for family, switch in (
            # no IPv6, or the kernel adds an address and goes on changing it for seconds
            ("ipv6", "disable_ipv6"),
            # without a carrier: "network is unreachable" at once, no waiting for timeouts
            ("ipv4", "ignore_routes_with_linkdown"),
        ):
            opened = program.variable()
            path = program.text(f"/proc/sys/net/{family}/conf/{INTERFACE.decode()}/{switch}")
            mode = os.O_WRONLY | os.O_CLOEXEC
            do.call(nr.OPENAT, boot.AT_FDCWD, path, mode, save=opened, may_fail=True)
            do.skip_if_error(opened, 2)  # a kernel without it
            do.call(nr.WRITE, opened, program.data(b"1"), 1, what=switch)
            do.call(nr.CLOSE, opened)
        up = struct.pack("<H", _IFF_UP | _IFF_RUNNING | _IFF_BROADCAST | _IFF_MULTICAST)
        for request, value, what in (
            (_SIOCSIFHWADDR, struct.pack("<H", _ARPHRD_ETHER) + _MAC, "hardware address"),
            (_SIOCSIFMTU, struct.pack("<i", _MTU), "mtu"),
            (_SIOCSIFADDR, _address(GUEST), "address"),
            (_SIOCSIFNETMASK, _address(_NETMASK), "netmask"),
            (_SIOCSIFFLAGS, up, "up"),
        ):
            _configure(program, do, sock, request, INTERFACE, value, f"eth0 {what}")
        everywhere = _address(IPv4Address(0))
        route = bytes(8) + everywhere + _address(GATEWAY) + everywhere
        route += struct.pack("<H", _RTF_UP | _RTF_GATEWAY)
        do.call(nr.IOCTL, sock, _SIOCADDRT, program.data(route.ljust(120, b"\0")), what="route")


def _configure(
    program: Program, do: Sequence, fd: Var, request: int, name: bytes, value: bytes, what: str
) -> None:
    """One ioctl on an interface: struct ifreq is its name and a union."""
    ifreq = name.ljust(16, b"\0") + value.ljust(24, b"\0")
    do.call(nr.IOCTL, fd, request, program.data(ifreq), what=what)


def _address(address: IPv4Address) -> bytes:
    """struct sockaddr_in, port 0."""
    return struct.pack("<HH", _AF_INET, 0) + address.packed + bytes(8)


_NONE, _NAT = _Making(nat=False), _Making(nat=True)
