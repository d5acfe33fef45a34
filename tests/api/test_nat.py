"""network="nat": package managers, git and DNS work inside; every tree has its own connections.

What the ordinary clients need to reach their registries here (proxies, certificates, indexes) is
in the environment of whoever runs the tests and in files of the host; the environment is passed
on. Everything else talks to servers of the test itself, at an address of the host that is not
loopback.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltabox import HostUnsupported, Result, Sandbox, UnsupportedState
from deltabox.deltacr import network

_PASSED_ON = re.compile(
    r"(?i)(pip|npm_config|uv)_.*|(https?|ftp|all|no)_proxy|(ssl|node|curl|requests|git)_.*(cert|ca).*"
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}


@pytest.fixture
def nat() -> Iterator[Sandbox]:
    with Sandbox.create(network="nat") as made:
        yield made


@pytest.fixture(scope="module")
def address() -> str:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("198.51.100.1", 9))  # sends nothing
        return str(sock.getsockname()[0])


class Greeter:
    """A server that greets every connection and then answers each line with itself."""

    def __init__(self, address: str) -> None:
        self.listener = socket.create_server((address, 0))
        self.port = int(self.listener.getsockname()[1])
        self.ended = threading.Semaphore(0)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.sendall(b"hello\n")
                while data := connection.recv(4096):
                    connection.sendall(data)
            except ConnectionResetError:
                pass
        self.ended.release()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def greeter(address: str) -> Iterator[Greeter]:
    made = Greeter(address)
    yield made
    made.close()


def python(sandbox: Sandbox, text: str) -> Result:
    return sandbox.run(["python3", "-c", textwrap.dedent(text)], timeout=30)


def greeting(sandbox: Sandbox, address: str, port: int) -> str:
    """What a connection to the outside brings; the error's name when there is none."""
    return python(
        sandbox,
        f"""
        import socket
        try:
            with socket.create_connection(("{address}", {port}), timeout=5) as sock:
                print(sock.recv(100).decode().strip())
        except OSError as error:
            print(type(error).__name__, error)
        """,
    ).stdout.strip()


def carriers() -> dict[int, int]:
    """The processes that carry packets, of our keepers: pid -> parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, name, rest = stat.read_text().replace(")", "(").split("(")
        except (OSError, ValueError):
            continue
        if name == "_nat" and rest.split()[0] not in "ZX":
            found[int(stat.parent.name)] = int(rest.split()[1])
    return found


@pytest.fixture
def own_carriers() -> Callable[[], dict[int, int]]:
    """Those started since."""
    before = set(carriers())
    return lambda: {pid: parent for pid, parent in carriers().items() if pid not in before}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# -- what people do with it ------------------------------------------------------------------


def test_pip(nat: Sandbox) -> None:
    nat.run("python3 -m venv /venv", check=True)
    done = nat.run(
        "/venv/bin/pip install --no-cache-dir pip-install-test", env=ENVIRONMENT, timeout=90
    )
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "Downloading" in done.stdout
    assert nat.run("/venv/bin/python -c 'import pip_install_test'").exit_code == 0


def test_apt(nat: Sandbox) -> None:
    done = nat.run(
        "rm -rf /var/lib/apt/lists && apt-get update && cd /tmp && apt-get download hello && ls",
        env=ENVIRONMENT,
        timeout=90,
    )
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "hello_" in done.stdout.splitlines()[-1]


def test_npm(nat: Sandbox) -> None:
    if nat.run("command -v npm").exit_code != 0:
        nat.run("apt-get update && apt-get install -y --no-install-recommends npm", timeout=110)
    done = nat.run(
        "mkdir /npm && cd /npm && npm install isarray && ls node_modules",
        env=ENVIRONMENT,
        timeout=90,
    )
    assert done.exit_code == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "isarray"


def test_git(nat: Sandbox, address: str, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (
        ["init", "-q", "work"],
        ["-C", "work", "commit", "-q", "--allow-empty", "-m", "first"],
        ["clone", "-q", "--bare", "work", "served.git"],
        ["-C", "served.git", "update-server-info"],
    ):
        subprocess.run([*git, *command], check=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer((address, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://{address}:{server.server_port}/served.git"
        done = nat.run(f"git clone -q {where} /clone && git -C /clone log --format=%s", timeout=30)
        server.shutdown()
    assert (done.exit_code, done.stdout) == (0, "first\n"), done.stderr


def test_names_are_asked_of_a_server_of_the_sandboxs_own_network(nat: Sandbox) -> None:
    assert nat.files.read_text("/etc/resolv.conf").startswith("nameserver 10.0.2.3\n")
    done = python(
        nat,
        """
        import socket, struct
        question = struct.pack(">6H", 4711, 0x100, 1, 0, 0, 0) + bytes(1) + bytes([0, 2, 0, 1])
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.settimeout(10)
        sock.sendto(question, ("10.0.2.3", 53))
        number, flags = struct.unpack(">HH", sock.recv(4096)[:4])
        print(number, flags >> 15)
        """,
    )
    assert done.stdout == "4711 1\n", done


def test_the_resolver_file_is_not_a_change_and_may_be_changed(nat: Sandbox) -> None:
    fresh = nat.checkpoint()
    assert nat.diff(fresh) == []
    nat.files.write_text("/etc/resolv.conf", "nameserver 10.0.2.4\n")
    assert [change.path for change in nat.diff(fresh)] == ["/etc/resolv.conf"]
    nat.rollback(fresh)
    assert nat.files.read_text("/etc/resolv.conf").startswith("nameserver 10.0.2.3\n")


def test_the_resolver_file_keeps_what_is_not_an_address() -> None:
    host = ["# by hand\n", "nameserver 127.0.0.53\n", "options edns0\n", "search a.test b.test\n"]
    assert network.resolver(host) == "nameserver 10.0.2.3\noptions edns0\nsearch a.test b.test\n"
    assert network.resolver([]) == "nameserver 10.0.2.3\n"


def test_a_base_without_etc_gets_none(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with Sandbox.create(base=tmp_path / "base", network="nat") as sandbox:
        assert not sandbox.files.exists("/etc")


# -- checkpoints, rollbacks, forks -------------------------------------------------------------


def test_it_works_again_after_each_rollback(nat: Sandbox, greeter: Greeter, address: str) -> None:
    interfaces = nat.run("ip address; ip route").stdout
    assert "10.0.2.15/24" in interfaces and "default via 10.0.2.2" in interfaces
    checkpoint = nat.checkpoint()
    for _ in range(5):
        nat.rollback(checkpoint)
        assert greeting(nat, address, greeter.port) == "hello"
        assert nat.run("ip address; ip route").stdout == interfaces
    nat.checkpoint()


def test_forks_have_it_at_once(nat: Sandbox, greeter: Greeter, address: str) -> None:
    forks = nat.fork_many(4)
    with ThreadPoolExecutor(5) as pool:
        answers = pool.map(lambda s: greeting(s, address, greeter.port), [nat, *forks])
        assert list(answers) == ["hello"] * 5
    grandchild = forks[0].fork()
    assert greeting(grandchild, address, greeter.port) == "hello"
    for fork in [grandchild, *forks]:
        fork.close()
    assert greeting(nat, address, greeter.port) == "hello"


_CLIENT = """
import socket, sys
sock = socket.create_connection(("{address}", {port}), timeout=20)
lines = sock.makefile("rw")
print(lines.readline(), end="", flush=True)
for line in sys.stdin:
    lines.write(line)
    lines.flush()
    print(lines.readline(), end="", flush=True)
"""


def test_a_checkpoint_does_not_touch_an_idle_connection(
    nat: Sandbox, greeter: Greeter, address: str
) -> None:
    program = _CLIENT.format(address=address, port=greeter.port)
    client = nat.spawn(["python3", "-c", program])
    assert client.stdout.readline(timeout=20) == "hello\n"
    for number in range(5):
        try:
            nat.checkpoint()
        except UnsupportedState as refused:  # taken or refused, the connection must not notice
            assert "socket" in str(refused)
        client.stdin.write(f"still there {number}\n")
        assert client.stdout.readline(timeout=20) == f"still there {number}\n"


def test_a_rollback_ends_the_connections_of_what_never_happened(
    nat: Sandbox, greeter: Greeter, address: str
) -> None:
    checkpoint = nat.checkpoint()
    client = nat.spawn(["python3", "-c", _CLIENT.format(address=address, port=greeter.port)])
    assert client.stdout.readline(timeout=20) == "hello\n"
    assert not greeter.ended.acquire(timeout=0.2)
    nat.rollback(checkpoint)
    assert greeter.ended.acquire(timeout=10), "the peer outside still waits"


@pytest.mark.parametrize(
    "change",
    [
        "ip address add 10.9.9.9/32 dev eth0",
        "ip route add 10.8.0.0/16 via 10.0.2.2",
        "ip link set eth0 mtu 1400",
        "ip link set eth0 down",
        "ip link add name more type dummy",
    ],
)
def test_changes_inside_are_refused(nat: Sandbox, change: str) -> None:
    before = nat.checkpoint()
    done = nat.run(change)
    if "type dummy" in change and done.exit_code != 0:
        done = nat.run("ip link add name more type veth")
    assert done.exit_code == 0, done.stderr
    with pytest.raises(UnsupportedState, match=r"addresses or routes were changed"):
        nat.checkpoint()
    nat.rollback(before)
    nat.checkpoint()


# -- borders -----------------------------------------------------------------------------------


def test_sandboxes_do_not_reach_each_other(nat: Sandbox) -> None:
    server = nat.spawn(
        "exec python3 -u -c \"import socket; s=socket.create_server(('0.0.0.0', 7777)); "
        "print('up'); c=s.accept()[0]; c.sendall(b'mine')\""
    )
    assert server.stdout.readline(timeout=20) == "up\n"
    with Sandbox.create(network="nat") as other:
        for where in ("10.0.2.15", "10.0.2.2", "10.0.2.16"):
            assert "Error" in greeting(other, where, 7777), where
    assert greeting(nat, "10.0.2.15", 7777) == "mine"


@pytest.mark.parametrize("where", ["127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.2.2", "10.0.2.3"])
def test_the_hosts_loopback_is_out_of_reach(nat: Sandbox, where: str) -> None:
    """Also for a sandbox's root who sends such packets out through the interface."""
    greeter = Greeter("0.0.0.0")
    try:
        assert "Error" in greeting(nat, where, greeter.port)
        nat.run(
            """
            for name in all eth0; do echo 1 > /proc/sys/net/ipv4/conf/$name/route_localnet; done
            ip address del 127.0.0.1/8 dev lo
            ip route flush table local dev lo
            ip route add 127.0.0.0/8 via 10.0.2.2
            """,
        )
        if where.startswith("127"):
            assert "via 10.0.2.2 dev eth0" in nat.run(f"ip route get {where}").stdout
        if where != "0.0.0.0":  # the sandbox's kernel itself takes that for its own
            assert "rror" in greeting(nat, where, greeter.port)
        assert _handshake(nat, where, greeter.port) == "no answer"
    finally:
        greeter.close()


def test_a_handmade_packet_gets_out_where_it_may(
    nat: Sandbox, greeter: Greeter, address: str
) -> None:
    """The counterpart: what the test above sends would be answered."""
    assert _handshake(nat, address, greeter.port) == "answer"


def _handshake(sandbox: Sandbox, where: str, port: int) -> str:
    """Send a TCP SYN as a raw frame, and see whether a SYN ACK comes."""
    return python(
        sandbox,
        f"""
        import socket, struct, time
        def sum16(data):
            total = sum(struct.unpack(f">{{len(data) // 2}}H", data))
            while total >> 16:
                total = (total & 0xffff) + (total >> 16)
            return ~total & 0xffff
        source, target = socket.inet_aton("10.0.2.15"), socket.inet_aton("{where}")
        tcp = struct.pack(">HHIIHHHH", 40000, {port}, 1, 0, 0x5002, 60000, 0, 0)
        pseudo = source + target + struct.pack(">HH", 6, 20)
        tcp = tcp[:16] + struct.pack(">H", sum16(pseudo + tcp)) + tcp[18:]
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 40, 1, 0, 64, 6, 0) + source + target
        ip = ip[:10] + struct.pack(">H", sum16(ip)) + ip[12:]
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        sock.bind(("eth0", 0))
        mine = bytes.fromhex("5254000a020f")
        gateway = bytes.fromhex("52550a000202")
        sock.send(gateway + mine + b"\\x08\\x00" + ip + tcp)
        sock.settimeout(1)
        deadline, answer = time.monotonic() + 1.5, "no answer"
        while time.monotonic() < deadline:
            try:
                frame = sock.recv(65536)
            except TimeoutError:
                break
            if frame[:6] == mine and frame[12:14] == b"\\x08\\x00" and frame[23] == 6:
                ports, flags = struct.unpack(">HH", frame[34:38]), frame[47]
                if ports == ({port}, 40000) and flags & 0x12 == 0x12:
                    answer = "answer"
        print(answer)
        """,
    ).stdout.strip()


# -- faults, and the end -----------------------------------------------------------------------


def test_a_dead_carrier_is_a_pulled_cable(
    own_carriers: Callable[[], dict[int, int]], greeter: Greeter, address: str
) -> None:
    with Sandbox.create(network="nat") as sandbox:
        before = sandbox.checkpoint()
        for whole in (False, True):
            alive = own_carriers()
            first = [pid for pid, parent in alive.items() if parent not in alive]
            for victim in first if whole else set(alive) - set(first):
                os.kill(victim, 9)
            assert within(10, lambda: "unreachable" in greeting(sandbox, address, greeter.port))
            with pytest.raises(UnsupportedState, match="eth0 is dead"):
                sandbox.checkpoint()
            for _ in range(6):  # more than are kept ready
                sandbox.rollback(before)
                assert greeting(sandbox, address, greeter.port) == "hello"


def test_an_interface_deleted_inside_is_refused(
    nat: Sandbox, greeter: Greeter, address: str
) -> None:
    before = nat.checkpoint()
    nat.run("ip link delete eth0", check=True)
    with pytest.raises(UnsupportedState, match=r"eth0 is dead|were changed inside"):
        nat.checkpoint()
    nat.rollback(before)
    assert greeting(nat, address, greeter.port) == "hello"


def test_nothing_is_left(own_carriers: Callable[[], dict[int, int]]) -> None:
    with Sandbox.create(network="nat") as sandbox:
        assert own_carriers()
        checkpoint = sandbox.checkpoint()
        forks = sandbox.fork_many(3, at=checkpoint)
        for _ in range(10):
            sandbox.rollback(checkpoint)
        # one for each of four sandboxes, those kept ready, and their parent
        assert within(10, lambda: len(own_carriers()) <= 4 + 4 + 1), own_carriers()
        for fork in forks:
            fork.close()
        assert within(10, lambda: len(own_carriers()) <= 1 + 4 + 1), own_carriers()
    assert within(10, lambda: not own_carriers())


def test_a_killed_keeper_leaves_no_carrier(
    own_carriers: Callable[[], dict[int, int]], tmp_path: Path
) -> None:
    program = """
    import os, signal, pathlib, re
    from deltabox import Sandbox
    sandbox = Sandbox.create(network="nat")
    log = pathlib.Path(os.environ["DELTABOX_STATE"], "keeper.log").read_text()
    os.kill(int(re.findall(r"up: process (\\d+)", log)[-1]), signal.SIGKILL)
    os._exit(0)
    """
    environment = os.environ | {"DELTABOX_STATE": str(tmp_path / "state")}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=60
    )
    assert within(10, lambda: not own_carriers())
    subprocess.run(
        [sys.executable, "-m", "deltabox", "doctor", "--clean", "--json"],
        env=environment,
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_a_host_without_the_library_says_what_to_install(tmp_path: Path) -> None:
    """The library is covered up, in a mount namespace in which a keeper of its own starts."""
    program = """
    from deltabox import HostUnsupported, Sandbox
    try:
        Sandbox.create(network="nat")
    except HostUnsupported as error:
        print(error)
    with Sandbox.create() as sandbox:
        print(sandbox.run("cat /proc/net/dev").stdout.count("lo:"))
    """
    loaded = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    (library,) = re.findall(r"libslirp\.so\.0 .*=> (\S+)", loaded)
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0" && exec "$@"'),
            *(library, sys.executable, "-c", textwrap.dedent(program)),
        ],
        env=os.environ | {"DELTABOX_STATE": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    sentence, loopback = done.stdout.splitlines()
    assert "libslirp0" in sentence and "libslirp.so.0" in sentence
    assert loopback == "1"


def test_a_carrier_that_says_no_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script, said in (("echo no such thing >&3", "no such thing"), ("exit 1", "ended at once")):
        carrier = tmp_path / "_nat"
        carrier.write_text(f"#!/bin/sh\n{script}\n")
        carrier.chmod(0o755)
        monkeypatch.setattr(network, "CARRIER", carrier)
        with pytest.raises(HostUnsupported, match=said):
            network.Carrier(65534)
