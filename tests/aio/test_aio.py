"""The library for coroutines: the same sandboxes, awaited, under asyncio and trio."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import deltabox
from deltabox import _connection, aio, explore
from deltabox.aio.mirror import ASKING, MAKING, MIRRORED, MIRRORS

HERE = Path(__file__).parents[2]
Test = Callable[[], Awaitable[None]]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    """Run a coroutine function under each of the two."""
    return lambda test: anyio.run(test, backend=request.param)


async def asleep(sandbox: aio.Sandbox) -> list[str]:
    """The commands that sleep inside."""
    lines = [" ".join(process.cmdline) for process in await sandbox.processes()]
    return [line for line in lines if line.startswith("sleep")]


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(20):
        while not await reached():
            await anyio.sleep(0.02)


def test_back_and_forth(run: Callable[[Test], None]) -> None:
    async def main() -> None:
        async with aio.Sandbox.create(hostname="awaited") as sb:
            shell = await sb.shell()
            await shell.run("x=1")
            process = await sb.spawn(["python3", "-i", "-q"])
            await process.stdin.write("x = 1\n")
            cp = await sb.checkpoint("ready")
            assert (cp.name, await cp.parent, await cp.children) == ("ready", None, [])
            assert (await cp.stats).processes == 2 and await sb.head == cp
            assert await (await cp.stats).changed_files >= 0
            await shell.run("x=2", check=True)
            await process.stdin.write("x = 2\n")
            await sb.files.write_text("/root/a", "new")
            assert [change.path for change in await sb.diff(cp)] == ["/root/a"]
            await sb.rollback(cp)
            assert (await shell.run("echo $x")).stdout == "1\n"
            await process.stdin.write("print(x)\n")
            assert await process.stdout.readline(timeout=20) == "1\n"
            assert not await sb.files.exists("/root/a")
            forks = await sb.fork_many(2, at=cp)
            for number, fork in enumerate(forks):
                async with fork:
                    own = await fork.counterpart(shell)
                    assert own.sandbox == fork and own.pid == shell.pid
                    said = await own.run(f"echo $((x + {number}))")
                    assert said.stdout == f"{1 + number}\n"
            assert await process.exit_code is None
            await process.kill()
            assert await process.wait() == -9
        assert sb.closed

    run(main)


def test_streams(run: Callable[[Test], None]) -> None:
    heard: list[str] = []

    async def hear(text: str) -> None:
        await anyio.sleep(0.01)
        heard.append(text)

    async def main() -> None:
        async with aio.Sandbox.create() as sb:
            process = await sb.spawn("echo 1; echo 2; exit 3")
            assert [line async for line in process.stdout] == ["1\n", "2\n"]
            assert await process.wait() == 3
            done = await sb.run("echo one; sleep 0.2; echo two", on_stdout=hear)
            assert done.stdout == "".join(heard) == "one\ntwo\n" and len(heard) == 2
            assert (await sb.run(["cat"], input=b"\xff", text=False)).stdout == b"\xff"

    run(main)


def test_waiting_needs_no_threads(run: Callable[[Test], None]) -> None:
    threads = len(os.listdir("/proc/self/task"))

    async def main() -> None:
        async with aio.Sandbox.create() as sb, anyio.create_task_group() as group:
            for _ in range(60):
                group.start_soon(sb.run, "sleep 1000")

            async def all_sleep() -> bool:
                return len(await asleep(sb)) == 60

            await until(all_sleep)
            assert len(os.listdir("/proc/self/task")) <= threads + 2  # the one that has created
            group.cancel_scope.cancel()

    run(main)


def test_a_cancelled_command_is_killed(run: Callable[[Test], None]) -> None:
    async def main() -> None:
        async with aio.Sandbox.create() as sb:
            with anyio.move_on_after(0.5) as scope:
                await sb.run("sleep 1000")
            assert scope.cancelled_caught

            async def none_sleeps() -> bool:
                return not await asleep(sb)

            await until(none_sleeps)
            shell = await sb.shell()
            with anyio.move_on_after(0.2):
                await shell.run("sleep 1000")
            assert (await sb.run("echo on")).stdout == "on\n"

    run(main)


def test_what_changes_the_sandbox_is_never_half_done(run: Callable[[Test], None]) -> None:
    """A checkpoint, rollback, or commit whose caller is cancelled is waited for."""

    async def main() -> None:
        async with aio.Sandbox.create() as sb:
            cp = await sb.checkpoint()
            for number in range(10):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await sb.checkpoint(f"c{number}")
                assert f"c{number}" in [one.name for one in await sb.checkpoints]
                await sb.files.write_text("/root/a", "")
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await sb.rollback(cp)
                assert not await sb.files.exists("/root/a")
            before = len(await sb.checkpoints)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await sb.fork()
            assert len(await sb.checkpoints) <= before + 1

    run(main)


def test_branches(run: Callable[[Test], None]) -> None:
    async def main() -> None:
        async with aio.Sandbox.create() as sb:
            async with sb.branch("kept") as branch:
                await branch.files.write_text("/srv/kept", "")
                assert [change.path for change in await branch.diff()] == ["/srv/kept"]
                assert branch.parent == sb and branch.name == "kept"
            assert branch.committed and branch.closed
            with pytest.raises(ValueError, match="on purpose"):
                async with sb.branch() as branch:
                    await branch.files.write_text("/srv/lost", "")
                    raise ValueError("on purpose")
            assert not branch.committed
            one, other = await sb.branch("one"), await sb.branch("other")
            await one.commit()
            with pytest.raises(aio.BranchStale):
                await other.commit()
            await other.abort()
            assert await sb.files.list("/srv") == ["kept"]

    run(main)


def test_errors_are_the_librarys(run: Callable[[Test], None]) -> None:
    async def main() -> None:
        async with aio.Sandbox.create() as sb:
            with pytest.raises(deltabox.CommandFailed, match="exit code 3"):
                await sb.run("exit 3", check=True)
            with pytest.raises(FileNotFoundError):
                await sb.files.read("/missing")
            with pytest.raises(deltabox.UnknownCheckpoint):
                await sb.rollback("missing")
            with pytest.raises(TypeError, match="on purpose"):
                await sb.run("echo 1", on_stdout=_raises)
        with pytest.raises(deltabox.SandboxClosed):
            await sb.run("true")
        with pytest.raises(ValueError, match="network"):
            await aio.Sandbox.create(network="both")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="create"):
            aio.Sandbox()

    run(main)


def _raises(text: str) -> None:
    raise TypeError("on purpose")


def test_a_coroutine_that_is_dropped() -> None:
    """Closed in the middle of a wait it gives its call up, and waits no more."""

    async def main() -> None:
        async with aio.Sandbox.create() as sb:
            for call in (sb.run("sleep 1000"), sb.checkpoint("kept")):
                assert await sb.files.exists("/")  # there is a connection, so the first wait is
                call.send(None)  # for the answer; begun, and not gone on with
                await anyio.sleep(0.5)
                call.close()

            async def none_sleeps() -> bool:
                return not await asleep(sb)

            await until(none_sleeps)
            assert [one.name for one in await sb.checkpoints] == ["kept"]

    anyio.run(main)


def _public(cls: type) -> dict[str, Any]:
    return {
        name: member
        for base in reversed(cls.__mro__)
        if base is not object
        for name, member in vars(base).items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize("original", MIRRORED, ids=lambda cls: str(cls.__name__))
def test_nothing_is_missing(original: type) -> None:
    """Every public name is there; methods and what asks is awaited, the rest is plain."""
    mirrored = _public(MIRRORS[original.__name__])
    assert mirrored.keys() == _public(original).keys()
    for name, member in mirrored.items():
        if not isinstance(member, property) and name not in MAKING:
            assert inspect.iscoroutinefunction(member), name
    assert ("__aiter__" in dir(MIRRORS[original.__name__])) is ("__iter__" in dir(original))


def test_only_what_is_awaited_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the engine was asked")

    with deltabox.Sandbox.create() as sandbox, sandbox.branch() as branch:
        checkpoint = sandbox.checkpoint()
        found: list[Any] = [sandbox, branch, sandbox.spawn("true"), sandbox.shell(), checkpoint]
        found += [sandbox.files, checkpoint.stats]
        with monkeypatch.context() as patch:
            patch.setattr(_connection.Keeper, "stream", no)
            checkpoint._stats = None
            for one in found:
                asking = {name for cls in type(one).__mro__ for name in ASKING.get(cls, ())}
                asking -= {
                    name for name in vars(type(one)) if name not in ASKING.get(type(one), ())
                }
                for name, member in _public(type(one)).items():
                    if not isinstance(member, property):
                        continue
                    if name in asking:
                        with pytest.raises(AssertionError):
                            getattr(one, name)
                    else:
                        getattr(one, name)
        branch.abort()


def test_the_names_are_the_librarys() -> None:
    assert set(aio.__all__) == {*deltabox.__all__, "awaited"}
    for name in deltabox.__all__:
        assert (getattr(aio, name) is getattr(deltabox, name)) is (name not in MIRRORS)


def test_what_type_checkers_see_is_up_to_date() -> None:
    subprocess.run([sys.executable, HERE / "tools" / "mirror", "--check"], check=True)


def test_without_its_libraries() -> None:
    """The sentence says what to install; the library itself needs none of it."""
    code = (
        "import sys; sys.modules['greenlet'] = None\nimport deltabox\n"
        "try:\n    import deltabox.aio\nexcept ImportError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert said.stdout == "deltabox.aio needs greenlet: pip install 'deltabox[aio]'\n"
    core = (HERE / "pyproject.toml").read_text().split("[project.optional-dependencies]")[0]
    assert not re.search("anyio|greenlet", core)


def test_what_the_library_has_made_can_be_awaited() -> None:
    """As in a search, whose functions may be coroutine functions."""

    class Counts:
        async def propose(self, state: explore.State) -> list[str]:
            return ["one", "two"]

        async def apply(self, state: explore.State, action: str) -> None:
            sandbox = aio.awaited(state.sandbox)
            await sandbox.run(f"sleep 0.2; echo {action} >> /srv/log", check=True)

        async def score(self, state: explore.State) -> float:
            said = await aio.awaited(state.counterpart(shell)).run("wc -l < /srv/log")
            return float(said.stdout)

    with deltabox.Sandbox.create() as sb:
        shell = sb.shell()
        found = explore.beam(sb, Counts(), width=2, depth=3, budget=explore.Budget(parallel=2))
        assert (found.score, found.nodes) == (3.0, 10)
    with pytest.raises(TypeError, match="int"):
        aio.awaited(3)  # type: ignore[call-overload]


def test_beside_the_synchronous_one() -> None:
    """Both in one thread: a synchronous call within a coroutine blocks, and that is all."""

    async def main() -> None:
        async with aio.Sandbox.create() as sb:
            with deltabox.Sandbox.create() as other:
                began = time.monotonic()
                async with anyio.create_task_group() as group:
                    group.start_soon(sb.run, "sleep 0.2")
                    await anyio.sleep(0.05)
                    assert other.run("sleep 0.2; echo 1").stdout == "1\n"
                assert time.monotonic() - began < 10

    anyio.run(main)
