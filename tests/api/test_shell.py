"""`Sandbox.shell`: one live bash, its state, its limits."""

from __future__ import annotations

import threading
import time

import pytest

from deltabox import CommandFailed, CommandTimeout, DeltaBoxError, Sandbox


def test_state_lasts(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("cd /tmp; x=41; f() { echo f$1; }; sleep 1000 &")
    assert sh.run("echo $x $PWD; f 2; jobs").stdout == (
        "41 /tmp\nf2\n[1]+  Running                 sleep 1000 &\n"
    )


def test_status_of_the_last_command(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    assert sh.run("(exit 7)").exit_code == 7
    assert sh.run("echo $?").stdout == "7\n"
    with pytest.raises(CommandFailed, match="exit code 1"):
        sh.run("false", check=True)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo 'it'\"'\"'s'", "it's\n"),
        ("printf 'a\\n'\nprintf 'b\\n'", "a\nb\n"),
        ("cat <<END\nx y\nEND", "x y\n"),
        ("echo zwölf # comment", "zwölf\n"),
        ("cat; read x; echo $?", "1\n"),
        ("ls /proc/self/fd | tr '\\n' ' '", "0 1 2 3 "),
        ("", ""),
        ("for i in 1 2\ndo echo $i\ndone", "1\n2\n"),
    ],
)
def test_commands_of_all_shapes(sandbox: Sandbox, command: str, expected: str) -> None:
    sh = sandbox.shell()
    assert sh.run(command).stdout == expected
    assert sh.run("echo ok").stdout == "ok\n"


def test_syntax_error_is_survived(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    result = sh.run("if true; then (")
    assert result.exit_code != 0
    assert "syntax error" in result.stderr
    assert sh.run("echo ok").stdout == "ok\n"


def test_trace_shows_nothing_of_ours(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("set -x")
    assert "__deltabox" not in sh.run("echo a").stderr


def test_exit_ends_the_shell(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    result = sh.run("echo bye; exit 3")
    assert (result.exit_code, result.stdout) == (3, "bye\n")
    with pytest.raises(DeltaBoxError, match="ended with exit code 3"):
        sh.run("echo x")


def test_timeout_spares_what_ran_before(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("sleep 1000 & x=1")
    with pytest.raises(CommandTimeout) as caught:
        sh.run("echo begun; sleep 2000 | cat", timeout=0.3)
    assert caught.value.stdout == "begun\n"
    assert sh.run("echo $x").stdout == "1\n"
    assert [p.cmdline for p in sandbox.processes() if p.cmdline[:1] == ("sleep",)] == [
        ("sleep", "1000")
    ]


def test_timeout_of_a_loop_in_the_shell_itself(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    with pytest.raises(CommandTimeout):
        sh.run("while :; do :; done", timeout=0.2)
    with pytest.raises(DeltaBoxError, match="ended with exit code -9"):
        sh.run("echo x")


def test_turns(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("n=0")
    threads = [
        threading.Thread(target=sh.run, args=("m=$n; sleep 0.01; n=$((m + 1))",)) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sh.run("echo $n").stdout == "10\n"


def test_nul_and_wrong_types(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    with pytest.raises(ValueError, match="NUL"):
        sh.run("a\0b")
    with pytest.raises(TypeError, match="is a str"):
        sh.run(["echo"])  # type: ignore[arg-type]


def test_close(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.close()
    for _ in range(100):
        if not sandbox.processes():
            break
        time.sleep(0.01)
    assert sandbox.processes() == []
