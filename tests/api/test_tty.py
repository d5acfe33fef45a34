"""`tty=`: programs and shells on a terminal whose other side we hold."""

from __future__ import annotations

import re

import pytest

from deltabox import CommandTimeout, DeltaBoxError, Process, Sandbox, UnsupportedState

SIZE = "import os; print(os.get_terminal_size(), [os.isatty(n) for n in (0, 1, 2)])"


def bash(sandbox: Sandbox, **options: object) -> Process:
    """An interactive bash that has shown its first prompt."""
    shell = sandbox.spawn(
        ["bash", "--norc", "--noprofile", "-i"],
        tty=True,
        env={"PS1": "ready> ", "TERM": "dumb"},
    )
    shell.stdout.read_until("ready> ", timeout=20)
    return shell


def said(shell: Process, line: str) -> str:
    """What the terminal shows between a line and the next prompt, without the echoed line."""
    shell.stdin.write(line + "\n")
    shown = shell.stdout.read_until("ready> ", timeout=20)
    return shown.removesuffix("ready> ").partition("\r\n")[2]


def test_a_program_has_a_terminal(sandbox: Sandbox) -> None:
    p = sandbox.spawn(["python3", "-c", SIZE], tty=True)
    assert p.stdout.read(timeout=20) == (
        "os.terminal_size(columns=80, lines=24) [True, True, True]\r\n"
    )
    assert p.stderr.read(timeout=20) == ""
    assert p.wait(timeout=20) == 0


def test_size_type_and_owner(sandbox: Sandbox) -> None:
    p = sandbox.spawn("stty size; echo $TERM; stat -c '%U %G %a' $(tty)", tty=(50, 132))
    assert p.stdout.read(timeout=20).split("\r\n") == [
        "50 132", "xterm-256color", "root tty 620", ""
    ]  # fmt: skip
    p = sandbox.spawn(
        "echo $TERM; stat -c %U $(tty)", tty=True, user="nobody", env={"TERM": "vt100"}
    )
    assert p.stdout.read(timeout=20) == "vt100\r\nnobody\r\n"


def test_resize(sandbox: Sandbox) -> None:
    p = sandbox.spawn("trap 'stty size' WINCH; echo up; while :; do sleep 0.05; done", tty=True)
    p.stdout.read_until("up\r\n", timeout=20)
    checkpoint = sandbox.checkpoint()
    p.resize(30, 90)
    p.stdout.read_until("30 90\r\n", timeout=20)
    sandbox.rollback(checkpoint)
    p.resize(31, 91)
    p.stdout.read_until("31 91\r\n", timeout=20)
    with pytest.raises(DeltaBoxError, match="no terminal"):
        sandbox.spawn("sleep 100").resize(1, 1)
    with pytest.raises(ValueError, match="0 rows"):
        p.resize(0, 80)


def test_end_of_input_is_typed(sandbox: Sandbox) -> None:
    p = sandbox.spawn("cat; echo between; cat", tty=True)
    p.stdin.write("one\n")
    p.stdout.read_until("one\r\none\r\n", timeout=20)
    p.stdin.close()
    p.stdout.read_until("between\r\n", timeout=20)
    p.stdin.write("two\n")
    p.stdout.read_until("two\r\ntwo\r\n", timeout=20)
    p.stdin.close()
    assert p.wait(timeout=20) == 0


def test_python_prompt_across_rollbacks_and_forks(sandbox: Sandbox) -> None:
    p = sandbox.spawn(["python3", "-q"], tty=True, env={"TERM": "dumb"})
    p.stdout.read_until(">>> ", timeout=20)
    p.stdin.write("x = 41\n")
    p.stdout.read_until(">>> ", timeout=20)
    checkpoint = sandbox.checkpoint()
    for _ in range(5):
        p.stdin.write("x += 1; print('x is', x)\n")
        assert "x is 42" in p.stdout.read_until(">>> ", timeout=20)
        sandbox.rollback(checkpoint)
    with sandbox.fork(at=checkpoint) as one, sandbox.fork(at=checkpoint) as two:
        for number, fork in enumerate((one, two)):
            q = fork.counterpart(p)
            q.stdin.write(f"print('fork', x + {number})\n")
            assert f"fork {41 + number}" in q.stdout.read_until(">>> ", timeout=20)
        with one.fork() as three:
            q = three.counterpart(p)
            q.stdin.write("import os; print(os.ttyname(0), os.get_terminal_size().lines)\n")
            assert "/dev/pts/0 24" in q.stdout.read_until(">>> ", timeout=20)
    p.stdin.write("print('still', x)\n")
    assert "still 41" in p.stdout.read_until(">>> ", timeout=20)


def test_unread_output_belongs_to_the_state(sandbox: Sandbox) -> None:
    p = sandbox.spawn("printf 'one\\ntwo\\nthree\\n'; sleep 100", tty=True)
    assert p.stdout.readline(timeout=20) == "one\r\n"
    sandbox.run("sleep 0.2")
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        assert p.stdout.readline(timeout=20) == "two\r\n"
        assert p.stdout.readline(timeout=20) == "three\r\n"
        sandbox.rollback(checkpoint)


def test_unread_input_belongs_to_the_state(sandbox: Sandbox) -> None:
    p = sandbox.spawn("echo up; sleep 2; cat; echo end; sleep 100", tty=True)
    p.stdout.read_until("up\r\n", timeout=20)
    p.stdin.write("first\nsecond\nunfini")
    p.stdout.read_until("unfini", timeout=20)
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        p.stdin.write("shed\n")
        p.stdin.close()
        assert p.stdout.read_until("end\r\n", timeout=20) == (
            "shed\r\nfirst\r\nsecond\r\nunfinished\r\nend\r\n"
        )
        sandbox.rollback(checkpoint)


def test_more_input_than_a_terminal_holds(sandbox: Sandbox) -> None:
    text = "".join(f"line {number}\n" for number in range(4000))
    p = sandbox.spawn("stty -echo; echo up; sleep 3; cat; echo end; sleep 100", tty=True)
    p.stdout.read_until("up\r\n", timeout=20)
    p.stdin.write(text)
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        p.stdin.close()
        assert p.stdout.read_until("end\r\n", timeout=60) == (text + "end\n").replace("\n", "\r\n")
        sandbox.rollback(checkpoint)


def test_job_control_across_rollbacks(sandbox: Sandbox) -> None:
    shell = bash(sandbox)
    assert said(shell, "x=1") == ""
    shell.stdin.write("sleep 1000\n")
    shell.stdout.read_until("sleep 1000\r\n", timeout=20)
    while not any(p.cmdline[:1] == ("sleep",) for p in sandbox.processes()):
        pass
    running = sandbox.checkpoint("running")  # a job has the foreground
    for _ in range(3):
        shell.stdin.write("\x03")
        shell.stdout.read_until("ready> ", timeout=20)
        assert said(shell, "echo $?") == "130\r\n"
        sandbox.rollback(running)
    shell.stdin.write("\x1a")
    assert "Stopped" in shell.stdout.read_until("ready> ", timeout=20)
    stopped = sandbox.checkpoint("stopped")
    for _ in range(3):
        assert "Running" in said(shell, "bg >/dev/null; jobs")
        sandbox.rollback(stopped)
        assert "Stopped" in said(shell, "jobs")
        shell.stdin.write("fg\n")
        shell.stdout.read_until("sleep 1000\r\n", timeout=20)
        # bash hands the terminal over before it lets the job go on
        while any(p.state == "T" for p in sandbox.processes()):
            pass
        shell.stdin.write("\x03")
        shell.stdout.read_until("ready> ", timeout=20)
        sandbox.rollback(stopped)
    with sandbox.fork(at=running) as fork:
        copy = fork.counterpart(shell)
        copy.stdin.write("\x03")
        copy.stdout.read_until("ready> ", timeout=20)
        assert said(copy, "echo $x") == "1\r\n"
    assert "Stopped" in said(shell, "jobs")


def test_a_hang_up_ends_the_session(sandbox: Sandbox) -> None:
    shell = bash(sandbox)
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    said(shell, "trap 'touch /tmp/hung-up' EXIT")
    shell.stdin.write("exit\n")
    assert shell.wait(timeout=20) == 0
    assert "exit" in shell.stdout.read(timeout=20)
    with pytest.raises(BrokenPipeError):
        shell.stdin.write("x")
    sandbox.rollback(checkpoint)
    assert said(shell, "ls /tmp/hung-up 2>/dev/null") == ""


@pytest.mark.parametrize("editor", [["vim", "-u", "NONE", "-i", "NONE"], ["less"]])
def test_full_screen_programs(sandbox: Sandbox, editor: list[str]) -> None:
    sandbox.files.write_text("/tmp/text", "".join(f"number {n}\n" for n in range(500)))
    p = sandbox.spawn([*editor, "/tmp/text"], tty=True)
    p.stdout.read_until("number 20", timeout=20)
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        p.stdin.write("/number 321\r")
        p.stdout.read_until("321", timeout=20)
        sandbox.rollback(checkpoint)
    if editor[0] == "vim":
        p.stdin.write("ggcwchanged\x1b:wq\r")
        assert p.wait(timeout=20) == 0
        assert sandbox.run("head -1 /tmp/text").stdout == "changed 0\n"


def test_a_flood_of_output(sandbox: Sandbox) -> None:
    """The program waits while nobody reads, and goes on exactly where it was."""
    p = sandbox.spawn(["seq", "1", "400000"], tty=True)
    assert p.stdout.readline(timeout=20) == "1\r\n"
    sandbox.run("sleep 0.3")
    checkpoint = sandbox.checkpoint()
    expected = "".join(f"{n}\r\n" for n in range(2, 400001))
    for _ in range(2):
        assert p.stdout.read(timeout=60) == expected
        assert p.wait(timeout=20) == 0
        sandbox.rollback(checkpoint)
    with sandbox.fork(at=checkpoint) as fork:
        assert fork.counterpart(p).stdout.read(timeout=60) == expected


def test_a_program_that_has_closed_its_terminal(sandbox: Sandbox) -> None:
    """It is still controlled by it, opens it again, and is not told to hang up."""
    p = sandbox.spawn(
        "exec 3>/tmp/log </dev/null >/dev/null 2>&1; sleep 1; cut -d' ' -f 7 /proc/$$/stat >&3;"
        "echo again >/dev/tty && echo opened >&3; exec sleep 100",
        tty=True,
    )
    sandbox.run("sleep 0.3")
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        sandbox.run("until grep -q opened /tmp/log; do sleep 0.05; done", timeout=20)
        assert sandbox.files.read_text("/tmp/log") == "34816\nopened\n"
        assert p.exit_code is None
        sandbox.rollback(checkpoint)
    p.kill()
    assert p.wait(timeout=20) == -9


def test_background_jobs_outlive_the_program(sandbox: Sandbox) -> None:
    p = sandbox.spawn(
        "setsid sh -c 'touch /tmp/up; sleep 1; echo late; sleep 100' &"
        "until [ -e /tmp/up ]; do sleep 0.05; done; echo early",
        tty=True,
    )
    assert p.stdout.readline(timeout=20) == "early\r\n"
    assert p.wait(timeout=20) == 0
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert p.stdout.readline(timeout=20) == "late\r\n"
        sandbox.rollback(checkpoint)


def test_stopped_output_is_refused(sandbox: Sandbox) -> None:
    p = sandbox.spawn("stty -echo; echo up; cat", tty=True)
    p.stdout.read_until("up\r\n", timeout=20)
    p.stdin.write("\x13")
    sandbox.run("sleep 0.2")
    with pytest.raises(UnsupportedState, match="Ctrl-Q"):
        sandbox.checkpoint()
    p.stdin.write("\x11more\n")
    p.stdout.read_until("more\r\n", timeout=20)
    sandbox.rollback(sandbox.checkpoint())
    p.stdin.write("and more\n")
    p.stdout.read_until("and more\r\n", timeout=20)


def test_a_terminal_within_a_terminal(sandbox: Sandbox) -> None:
    """What `script`, expect and many agents do: a program that holds the master of another's."""
    inner = "import pty; pty.spawn(['bash', '--norc', '--noprofile', '-i'])"
    p = sandbox.spawn(["python3", "-c", inner], tty=True, env={"PS1": "inner> "})
    p.stdout.read_until("inner> ", timeout=20)
    p.stdin.write("x=7; stty -echo\n")
    p.stdout.read_until("inner> ", timeout=20)
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        p.stdin.write("tty; echo $((x + 1)); x=0\n")
        assert "/dev/pts/1\r\n8\r\n" in p.stdout.read_until("inner> ", timeout=20).replace(
            "\r\r", "\r"
        )
        sandbox.rollback(checkpoint)
    p.stdin.write("yes\n")
    p.stdout.read_until("y", timeout=20)
    flooding = sandbox.checkpoint()
    for _ in range(3):
        p.stdin.write("\x03")
        while "inner> " not in p.stdout.read_available():
            pass
        p.stdin.write("echo $x\n")
        assert "7" in p.stdout.read_until("inner> ", timeout=20)
        sandbox.rollback(flooding)


def test_unread_input_of_both_kinds_survives_many_checkpoints(sandbox: Sandbox) -> None:
    """What is read and put back at each checkpoint is not worn out by it."""
    p = sandbox.spawn("mkfifo /tmp/fifo; stty -echo; echo up; read wait < /tmp/fifo; cat", tty=True)
    p.stdout.read_until("up\r\n", timeout=20)
    p.stdin.write("line\nunfinished")
    for _ in range(10):
        last = sandbox.checkpoint()
    sandbox.rollback(last)
    p.stdin.write("!\n")
    sandbox.run("echo > /tmp/fifo")
    assert p.stdout.read_until("!\r\n", timeout=20) == "line\r\nunfinished!\r\n"


# -- shells --------------------------------------------------------------------------------------


def test_commands_of_a_shell_see_a_terminal(sandbox: Sandbox) -> None:
    sh = sandbox.shell(tty=(33, 99))
    result = sh.run(f'python3 -c "{SIZE}"')
    assert result.stdout == "os.terminal_size(columns=99, lines=33) [True, True, True]\r\n"
    assert (result.stderr, result.exit_code) == ("", 0)
    assert sh.run("echo $0; echo error >&2; (exit 7)").stdout == "bash\r\nerror\r\n"
    assert sh.run("echo $?; ls /proc/self/fd | tr '\\n' ' '").stdout == "7\r\n0 1 2 3 "
    assert re.fullmatch(r"/dev/pts/\d+\r\n", sh.run("tty").stdout)


def test_a_shell_on_a_terminal_across_rollbacks(sandbox: Sandbox) -> None:
    sh = sandbox.shell(tty=True)
    sh.run("x=1; cd /tmp; sleep 1000 &")
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        sh.run("x=2; kill %1; cd /")
        sandbox.rollback(checkpoint)
        assert sh.run("echo $x $PWD; tty; jobs").stdout.startswith("1 /tmp\r\n/dev/pts/0\r\n[1]+")
    with sandbox.fork(at=checkpoint) as fork:
        assert fork.counterpart(sh).run("echo $x; stty size").stdout == "1\r\n24 80\r\n"
    with pytest.raises(CommandTimeout) as caught:
        sh.run("echo begun; cat", timeout=0.5)
    assert str(caught.value.stdout).startswith("begun\r\n")
    assert sh.run("echo $x").stdout == "1\r\n"
    sh.close()


def test_wrong_sizes(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="rows, columns"):
        sandbox.spawn("true", tty="yes")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="-1 rows"):
        sandbox.shell(tty=(-1, 80))
