"""A running process tree: PID 1, the group it lives in, and what can be asked of it.

PID 1 is the interpreter, so asking means sending it a small program: to spawn a command (vfork and
execve by records) or to signal one.  It reaps on its own and reports every end over a second
socket, `reports`.  A request is answered only after all earlier ends were reported, which makes
any request a barrier for reports.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

from ..linux import cgroup, pidfd
from ..linux import namespace as ns
from ..linux import numbers as nr
from ..linux.ask import Answers, Questions
from ..linux.proc import (
    ProcessInfo,
    describe_network,
    devices,
    inside_pids,
    mount_count,
    network_state,
    process_info,
    read,
)
from ..linux.terminal import TIOCSCTTY
from .boot import SIGCHLD
from .interrupted import Waits
from .look import CommonLook
from .model import Capture
from .network import Network
from .objects.shared_memory import Sharing
from .peer import Loaded, Peer, PeerGone, ProgramFailed, Run, insist
from .records import REQUEST_SLOT, Program, Var
from .reports import Exit, Reports
from .space import Space, elsewhere
from .survey import SURVEY, Around, Survey, Surveying, WorldState, world_questions
from .template import Template
from .turns import Ahead

FindFile = Callable[[int, bytes, int], Iterator[str]]


class Live:
    """One process tree with its namespaces. Made by `Tree.boot` and `Tree.restore`."""

    def __init__(
        self,
        *,
        init: int,
        group: Path,
        network: Network,
        requests: socket.socket,
        reports: socket.socket,
        slot: int,
        sharing: Sharing,
    ) -> None:
        self.init = init
        self.network = network
        self.pidfd = os.pidfd_open(init)
        self.group = group
        self.peer = Peer(requests)
        self.reports = Reports(reports)
        self.slot = slot
        self.root = -1
        self.lock = threading.RLock()  # held by spawn and by a freeze: no child is half made
        self.world = WorldState(0, b"")
        self.loaded: Loaded | None = None  # the restore, in a world that was made ahead
        self.tasks = 0  # while it waits to be used: how many it has, instead of a sandbox's share
        self.waits = Waits()
        self.around: Around | None = None  # what the last stop has found; None after a request
        self.rested: Template | None = None  # of the last stop; None after a request
        self.origin: Capture | None = None  # what it was restored from
        self.cloned_from: Template | None = None
        self.asked = False  # whether there was a request since
        self.base: Template | None = None  # the last state of it that a template holds
        self.successor: Template | None = None  # made ahead for the next checkpoint
        self.improving = False  # somebody is about to make a better one
        self.spaces: dict[int, Space] = {}  # by host pid
        self.sharing = sharing  # its shared memory
        self.shared: tuple[str, ...] = ()  # directories that are no part of its state
        self.released = False
        self.ahead = Ahead()
        self._world: Questions | None = None
        self._common: CommonLook | None = None
        self._surveying: Surveying | None = None
        self._survey: Loaded | None = None  # its next program
        self.handed: dict[str, int] = {}  # descriptors taken out of a restored PID 1
        self.on_end: Callable[[], None] = lambda: None
        # guesses at the path of a file by its handle (kind, bytes) and inode number; whoever owns
        # the files knows
        self.find: FindFile = lambda kind, handle, inode: iter(())
        self._ended = False
        self._end_lock = threading.Lock()
        self._ending = threading.Lock()

    def attach(self, world: WorldState | None) -> None:
        """Open what needs the mounts to be in place; `world` is known from an earlier sandbox."""
        self.root = os.open(f"/proc/{self.init}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.world = world or WorldState(mount_count(self.init), network_state(self.init))

    @contextlib.contextmanager
    def world_now(self) -> Iterator[Callable[[], WorldState]]:
        """The state of mounts and network, asked for meanwhile."""
        if self._world is None:
            has_network = bool(self.world.network)
            interfaces = devices(read(f"/proc/{self.init}/net/dev")) if has_network else []
            self._world = world_questions(tuple(interfaces), has_network)
        asked = self._world.begin([self.init])
        answers: Answers | None = None

        def finish() -> WorldState:
            nonlocal answers
            answers = asked()
            network = describe_network(answers.find) if self.world.network else b""
            return WorldState(answers["mountinfo"].count(b"\n"), network)

        try:
            yield finish
        finally:
            if answers is None:
                asked()

    def common(self) -> CommonLook:
        """What PID 1 has, and all others began with."""
        if self._common is None:
            self._common = CommonLook(self.init)
        return self._common

    def take(self, numbers: Mapping[str, int]) -> None:
        """Get descriptors that PID 1 has made for the keeper: name -> number in PID 1."""
        for name, number in numbers.items():
            self.handed[name] = pidfd.getfd(self.pidfd, number)

    def space(self, host: int, pid: int) -> Space:
        """What is known of the memory of one process, by its host pid and its pid inside."""
        there = self.spaces.get(host)
        if there is not None and there.pid != pid:  # the host has given its number to another
            self.spaces.pop(host).close()
        if host not in self.spaces:
            origin = self.cloned_from if self.restored(pid) else None
            known = origin.known.get(pid) if origin is not None else None
            if known is not None:
                known = elsewhere(known, self.sharing.place)
            self.spaces[host] = Space(host, pid, origin, known)
            if origin is not None:
                self.spaces[host].adopt(self.reports.watcher(pid))
        return self.spaces[host]

    @property
    def is_watched(self) -> bool:
        """Whether a program may be told by inotify(7) that somebody reads a file."""
        capture = None if self.base is None else self.base.capture
        return capture is None or any(one.kind == "inotify" for one in capture.descriptions)

    def restored(self, pid: int) -> bool:
        """Whether a process was cloned from a template, by its pid inside."""
        return self.origin is not None and pid in self.origin.by_pid

    def forget_others(self, hosts: Container[int]) -> None:
        """Drop what is known of processes that have ended."""
        for host in [host for host in self.spaces if host not in hosts]:
            self.spaces.pop(host).close()

    def keep_successor(self, base: Template | None, made: Template) -> bool:
        """Keep a template for the next checkpoint; False when it comes too late."""
        with self._end_lock:
            if self._ended or self.successor is not None or self.base is not base:
                return False
            self.successor = made
            return True

    def advance(self, base: Template) -> None:
        """A checkpoint has been taken: what is made ahead must begin with its template."""
        with self._end_lock:
            self.base = base
            stale, self.successor = self.successor, None
        if stale is not None:
            stale.close()

    def replace_successor(self, base: Template, made: Template) -> bool:
        """Keep a better template for the next checkpoint; False when it comes too late."""
        with self._end_lock:
            if self._ended or self.base is not base:
                return False
            worse, self.successor = self.successor, made
        if worse is not None:
            worse.close()
        return True

    def drop_read_ahead(self) -> bool:
        """Free the template made ahead if it holds pages that no other does; whether it did."""
        with self.ahead.excluded():
            made, base = self.successor, self.base
            # a fork that nothing has been read into has its base's; half read counts as well
            if made is None or made.stash is (None if base is None else base.stash):
                return False
            self.drop_successor()
            return True

    def drop_successor(self) -> None:
        """Free the template made ahead: as a fork it keeps what the one before it has held."""
        made = self.take_successor()
        if made is not None:
            made.close()

    def take_successor(self) -> Template | None:
        with self._end_lock:
            made, self.successor = self.successor, None
            return made

    # -- children ---------------------------------------------------------------------------

    def spawn(
        self,
        *,
        argv: Sequence[bytes],
        env: Sequence[bytes],
        cwd: bytes,
        uid: int,
        gid: int,
        groups: Sequence[int],
        stdio: Mapping[int, int],
        controlled: bool = False,
    ) -> int:
        """Start a command as a child of PID 1, leader of its own session; its pid inside.

        `stdio` maps file descriptor numbers inside to descriptors of this process. A name without
        a slash is looked up in the PATH of `env`, inside. `controlled`: standard input is a
        terminal, which controls the session. Raises the OSError of chdir or execve.
        """
        names = [f"fd{number}" for number in stdio]
        program = Program(*names)
        program.root.keep_to_itself()
        body = program.sequence("spawn")
        arguments = program.clone_args(
            flags=ns.CLONE_VM | ns.CLONE_VFORK | ns.CLONE_CLEAR_SIGHAND,
            exit_signal=SIGCHLD,
            stack=program.stack(8192),
            stack_size=8192,
        )
        pid = program.variable()
        program.root.clone(arguments, body, save=pid)
        body.call(nr.SETSID)
        high = max(stdio, default=0) + 300
        for index, name in enumerate(names):
            body.call(nr.DUP3, program.inputs[name], high + index, 0o2000000)
        for index, number in enumerate(stdio):
            body.call(nr.DUP3, high + index, number, 0)
        if controlled:
            body.call(nr.IOCTL, 0, TIOCSCTTY, 0, what="control by the terminal")
        for low, top in _gaps(sorted(stdio)):
            body.call(nr.CLOSE_RANGE, low, top, 0)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for kind, soft, ceiling in (
            (resource.RLIMIT_NOFILE, min(1024, hard), hard),
            (resource.RLIMIT_CORE, 0, 0),
        ):
            limit = program.data(struct.pack("<QQ", soft, ceiling))
            body.call(nr.PRLIMIT64, 0, kind, limit, 0)
        body.call(nr.UMASK, 0o022)
        if groups:
            packed = program.data(struct.pack(f"<{len(groups)}I", *groups))
            body.call(nr.SETGROUPS, len(groups), packed, what="setgroups")
        else:
            body.call(nr.SETGROUPS, 0, 0)
        body.call(nr.SETRESGID, gid, gid, gid, what=f"setgid({gid})")
        body.call(nr.SETRESUID, uid, uid, uid, what=f"setuid({uid})")
        body.call(nr.CHDIR, program.text(cwd), what="chdir")
        body.call(nr.RT_SIGPROCMASK, 2, program.data(bytes(8)), 0, 8)
        candidates = _candidates(argv[0], env)
        argument_vector, environment = program.vector(argv), program.vector(env)
        results: list[Var] = []
        for position, candidate in enumerate(candidates):
            result = program.variable()
            results.append(result)
            body.call(
                nr.EXECVE,
                program.text(candidate),
                argument_vector,
                environment,
                save=result,
                may_fail=position < len(candidates) - 1,
                what="execve",
            )
        with self.lock:
            run, self.around, self.rested, self.asked = None, None, None, True
            try:
                with self.peer.lock:
                    run = self.peer.send(
                        program.seal(),
                        self.slot + REQUEST_SLOT,
                        dict(zip(names, stdio.values(), strict=True)),
                    )
                    self.peer.answer(run)
                return run.variable(pid)
            except ProgramFailed as failure:
                if run is None:
                    raise OSError(failure.errno, "too many descriptors") from None
                code = failure.errno
                if "execve" in failure.where:
                    if any(run.variable(result) == -errno.EACCES for result in results):
                        code = errno.EACCES
                    raise OSError(code, os.strerror(code), os.fsdecode(argv[0])) from None
                if "chdir" in failure.where:
                    raise OSError(code, os.strerror(code), os.fsdecode(cwd)) from None
                raise OSError(code, f"{os.strerror(code)} ({failure.where})") from None

    def kill(self, pid: int, sig: int) -> None:
        """Signal one process by its pid inside. ProcessLookupError if there is none."""
        self._signal([(pid, sig)], strict=True)

    def kill_tree(self, pid: int) -> None:
        """SIGKILL for a process, its session, group and every descendant, until none is left."""
        doomed: set[int] = {pid}
        while True:
            found = [p for p in self.processes() if p.state not in "ZX"]
            grown = True
            while grown:
                more = {
                    p.pid
                    for p in found
                    if p.pid in doomed or p.ppid in doomed or p.sid == pid or p.pgid == pid
                }
                grown = not more <= doomed
                doomed |= more
            alive = [p.pid for p in found if p.pid in doomed and p.pid != 1]
            if not alive:
                return
            self._signal([(victim, 9) for victim in alive], strict=False)

    def _signal(self, targets: Sequence[tuple[int, int]], *, strict: bool) -> None:
        program = Program()
        for pid, sig in targets:
            program.root.call(nr.KILL, pid, sig, may_fail=not strict)
        try:
            with self.lock:
                self.around, self.rested, self.asked = None, None, True
                self.peer.run(program.seal(), self.slot + REQUEST_SLOT)
        except ProgramFailed as failure:
            raise OSError(failure.errno, os.strerror(failure.errno)) from None

    def survey(self) -> Survey:
        """What only a member of the namespaces can see; PID 1 looks.

        Once it has answered, every child that had ended by then has been reported.
        """
        with self.surveying() as answer:
            return answer()

    @contextlib.contextmanager
    def surveying(self) -> Iterator[Callable[[], Survey]]:
        """PID 1 looks while something else is done; what is yielded waits for its answer."""
        with self.lock:
            self._surveying = surveying = Surveying(self.peer, self._take_survey())
            try:
                yield surveying.answer
            finally:
                self._surveying = None
                surveying.end()

    def prepare_survey(self) -> None:
        """Load the next survey's program ahead of need."""
        with self.lock:
            if self._survey is None and not self._ended:
                self._survey = Loaded(SURVEY, self.slot + REQUEST_SLOT)

    def _take_survey(self) -> Loaded:
        loaded, self._survey = self._survey, None
        return loaded or Loaded(SURVEY, self.slot + REQUEST_SLOT)

    def peer_pids(self, sockets: Sequence[int]) -> list[int]:
        """Whom SO_PEERCRED of each socket names, as a pid inside, also when it has ended."""
        if self._surveying is not None:
            self._surveying.answer()  # one thing after the other
        found: list[int] = []
        for first in range(0, len(sockets), _AT_ONCE):
            some = sockets[first : first + _AT_ONCE]
            program = Program(*(f"socket{index}" for index in range(len(some))))
            answers = []
            for fd in program.inputs.values():
                answer, size = program.data(bytes(16)), program.data(struct.pack("<I", 12))
                program.root.call(nr.GETSOCKOPT, fd, socket.SOL_SOCKET, _SO_PEERCRED, answer, size)
                answers.append(answer.offset)
            fds = {f"socket{index}": fd for index, fd in enumerate(some)}
            with self.lock:
                run = self.peer.run(program.seal(), self.slot + REQUEST_SLOT, fds)
            found += [struct.unpack_from("<i", run.memory, at)[0] for at in answers]
        return found

    def read_exits(self) -> list[Exit]:
        """Ends reported so far; EOFError when PID 1 itself has died."""
        return self.reports.exits()

    def await_answer(self, run: Run) -> None:
        """Wait for PID 1, while those it rebuilds may have more to report than the socket holds."""
        poller = select.poll()
        poller.register(self.peer.sock, select.POLLIN)
        poller.register(self.reports.sock, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(10_000)}
            if not ready or self.peer.sock.fileno() in ready:
                break
            self.reports.collect()
        self.peer.answer(run)

    # -- looking at it ------------------------------------------------------------------------

    def host_pids(self) -> list[int]:
        """Host pids of all members except PID 1."""
        return [pid for pid in cgroup.processes(self.group) if pid != self.init]

    def hosts(self) -> dict[int, int]:
        """Host pids of all members except PID 1, by pid inside."""
        return {inside: host for host, inside in inside_pids(self.host_pids()).items()}

    def processes(self) -> list[ProcessInfo]:
        """All processes but PID 1, as seen inside."""
        inside = inside_pids([self.init, *self.host_pids()])
        return sorted(
            (
                info
                for host in inside
                if host != self.init and (info := process_info(host, inside)) is not None
            ),
            key=lambda info: info.pid,
        )

    # -- the end ------------------------------------------------------------------------------

    @property
    def fit(self) -> bool:
        """For one that has waited: whether PID 1 lives, and its network is still carried."""
        return not self._ended and not pidfd.ended(self.pidfd, 0) and self.network.carried

    def release(self) -> None:
        """Let a restored tree run. The answer to the barrier message is its start."""
        self.released = True
        self.peer.sock.send(b"go")

    def stop(self) -> None:
        """Freeze everything; when this returns no instruction of the tree runs until `thaw`.

        The cgroup freezer is several times faster than waiting for the end of everybody. What does
        not freeze soon (a parent in vfork cannot) is killed instead, which is final.
        """
        if self._ended:
            return
        with self.ahead.excluded():
            self.ahead.over = True
            try:
                cgroup.freeze(self.group, True)
                if not cgroup.wait_event(self.group, b"frozen 1", 0.05):
                    self.kill_all()
            except BaseException:
                self.thaw()
                raise

    def thaw(self) -> None:
        """Undo `stop`."""
        cgroup.freeze(self.group, False)
        self.ahead.over = self._ended

    def kill_all(self) -> None:
        """Kill everything and wait for it.

        PID 1 becomes a zombie only after it has reaped the whole namespace (pid_namespaces(7)).
        `cgroup.kill` must not be used: once it has been written, this kernel kills everything that
        CLONE_INTO_CGROUP brings into the group later (6.18), and groups are used again.
        """
        with contextlib.suppress(ProcessLookupError):
            insist(lambda: pidfd.send_signal(self.pidfd, 9))
        if not pidfd.ended(self.pidfd, 30.0):
            raise PeerGone(f"processes in {self.group.name} did not die within 30 s")

    def end(self) -> None:
        """Stop, reap, give the group back, close every descriptor. May be called twice."""
        with self._ending:
            # not held any longer: who works ahead takes it in the middle of a step
            with self._end_lock:
                if self._ended:
                    return
                self._ended = True
                successor, self.successor = self.successor, None
            if successor is not None:
                successor.close()
            self._end()

    def _end(self) -> None:
        self.ahead.over = True
        self.kill_all()
        pidfd.reap(self.pidfd)
        with self.ahead.excluded():  # what it uses is closed from here on
            self.forget_others(())
        self.peer.close()
        with self.lock:
            if self._survey is not None:
                self._survey.close()
                self._survey = None
        if self.loaded is not None:
            self.loaded.close()
            self.loaded = None
        self.reports.close()
        for fd in (self.root, self.pidfd, *self.handed.values()):
            if fd >= 0:
                os.close(fd)
        insist(self.thaw)  # or the group would be lost
        insist(self._await_empty)
        self.on_end()

    def _await_empty(self) -> None:
        if not cgroup.wait_event(self.group, b"populated 0", 10.0):
            raise PeerGone(f"{self.group.name} still has members")


_AT_ONCE = 200  # descriptors in one request
_SO_PEERCRED = 17


def _gaps(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of descriptor numbers between and after the given ones."""
    gaps = []
    low = 0
    for number in numbers:
        if number > low:
            gaps.append((low, number - 1))
        low = number + 1
    gaps.append((low, (1 << 32) - 1))
    return gaps


def _candidates(name: bytes, env: Sequence[bytes]) -> list[bytes]:
    if b"/" in name:
        return [name]
    path = next((e[5:] for e in env if e.startswith(b"PATH=")), b"/usr/bin:/bin")
    return [directory + b"/" + name for directory in path.split(b":") if directory]
