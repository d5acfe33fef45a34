"""`Sandbox.run`: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import threading
import time

import pytest

from deltabox import CommandFailed, CommandTimeout, Sandbox


def test_result_of_a_string_and_a_list(sandbox: Sandbox) -> None:
    result = sandbox.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert 0 < result.duration < 5
    assert not result.truncated
    assert sandbox.run(["printf", "%s", "a b"]).stdout == "a b"


def test_environment_is_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    lines = sandbox.run(["env"], env={"A": "1", "TERM": "xterm"}).stdout.split()
    found = dict(line.split("=", 1) for line in lines)
    assert found.pop("A") == "1"
    assert found == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "LANG": "C.UTF-8",
        "TERM": "xterm",
    }


def test_cwd_and_user(sandbox: Sandbox) -> None:
    assert sandbox.run("pwd", cwd="/usr").stdout == "/usr\n"
    assert sandbox.run("id -un; echo $HOME", user="daemon").stdout == "daemon\n/usr/sbin\n"
    assert sandbox.run(["id", "-u"], user=1234).stdout == "1234\n"
    assert sandbox.run("echo through > /dev/stdout", user="daemon").stdout == "through\n"
    with pytest.raises(ValueError, match="no user 'nobody-here'"):
        sandbox.run("true", user="nobody-here")


def test_input(sandbox: Sandbox) -> None:
    assert sandbox.run("cat", input="text\n").stdout == "text\n"
    big = bytes(range(256)) * 4096 * 3
    result = sandbox.run("cat", input=big, text=False)
    assert result.stdout == big
    assert sandbox.run("cat; readlink /proc/self/fd/0").stdout == "/dev/null\n"


def test_signals_and_exit_codes(sandbox: Sandbox) -> None:
    assert sandbox.run("kill -9 $$").exit_code == -9
    assert sandbox.run("no-such-command").exit_code == 127


def test_check(sandbox: Sandbox) -> None:
    assert sandbox.run("true", check=True).exit_code == 0
    with pytest.raises(CommandFailed, match="exit code 5: broken") as caught:
        sandbox.run("echo broken >&2; exit 5", check=True)
    assert caught.value.result.exit_code == 5


def test_timeout_kills_the_whole_tree(sandbox: Sandbox) -> None:
    started = time.monotonic()
    with pytest.raises(CommandTimeout, match=r"within 0\.3 s") as caught:
        sandbox.run("echo before; setsid sleep 1000 & sleep 1000", timeout=0.3)
    assert time.monotonic() - started < 3
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.stdout == "before\n"
    assert sandbox.processes() == []


def test_background_programs_live_on(sandbox: Sandbox) -> None:
    started = time.monotonic()
    result = sandbox.run("echo now; (sleep 0.2; yes | head -c 300000; echo done > /tmp/done) &")
    assert result.stdout == "now\n"
    assert time.monotonic() - started < 0.15 or sandbox.processes()
    for _ in range(100):
        if sandbox.files.exists("/tmp/done"):
            break
        time.sleep(0.05)
    assert sandbox.files.read("/tmp/done") == b"done\n"


def test_on_stdout_gets_pieces_as_they_come(sandbox: Sandbox) -> None:
    pieces: list[tuple[float, str]] = []
    started = time.monotonic()
    result = sandbox.run(
        "echo one; sleep 0.3; printf 'zw\\303'; sleep 0.1; printf '\\266lf'",
        on_stdout=lambda piece: pieces.append((time.monotonic() - started, piece)),
    )
    assert "".join(piece for _, piece in pieces) == result.stdout == "one\nzwölf"
    assert pieces[0][0] < 0.2 < pieces[-1][0]


def test_an_error_in_on_stdout_kills_the_command(sandbox: Sandbox) -> None:
    def refuse(_: str) -> None:
        raise PermissionError(13, "mine")

    with pytest.raises(PermissionError, match="mine"):
        sandbox.run("echo x; sleep 1000", on_stdout=refuse)
    for _ in range(100):
        if not sandbox.processes():
            break
        time.sleep(0.02)
    assert sandbox.processes() == []


def test_long_output_is_cut_but_read(sandbox: Sandbox) -> None:
    result = sandbox.run("head -c 20000000 /dev/zero; echo end >&2", text=False)
    assert result.truncated
    assert len(result.stdout) == 16 << 20
    assert (result.exit_code, result.stderr) == (0, b"end\n")


def test_missing_program_and_directory(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError, match="'no-such-program'"):
        sandbox.run(["no-such-program"])
    with pytest.raises(FileNotFoundError, match="'/no/such/place'"):
        sandbox.run("true", cwd="/no/such/place")
    with pytest.raises(PermissionError, match="'/etc/passwd'"):
        sandbox.run(["/etc/passwd"])


def test_many_threads(sandbox: Sandbox) -> None:
    results: dict[int, str] = {}

    def work(number: int) -> None:
        for turn in range(5):
            results[number] = sandbox.run(f"echo {number}.{turn}").stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n}.4\n" for n in range(8)}
    assert sandbox.processes() == []


def test_very_much_input(sandbox: Sandbox) -> None:
    """The work grows with the input, not with its square."""
    size = 150 << 20
    found = sandbox.run("wc -c", input=bytes(size), timeout=60, check=True)
    assert int(found.stdout) == size
