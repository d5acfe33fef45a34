"""tmux: a server without a terminal of its own, one pty for each pane, a client on ours."""

from __future__ import annotations

import time

from deltabox import Process, Sandbox

TMUX = ["tmux", "-f", "/dev/null"]
ENVIRONMENT = {"PS1": "pane> ", "ENV": "", "SHELL": "/bin/sh", "TERM": "screen"}


def tmux(sandbox: Sandbox, *words: str) -> str:
    return sandbox.run([*TMUX, *words], check=True, timeout=20).stdout


def shows(sandbox: Sandbox, pane: int, text: str) -> str:
    """Wait until a pane shows this; what it shows then."""
    until = time.monotonic() + 20
    while text not in (shown := tmux(sandbox, "capture-pane", "-p", "-t", f"w:0.{pane}")):
        assert time.monotonic() < until, f"{text!r} is not in pane {pane}:\n{shown}"
        time.sleep(0.02)
    return shown


def client(sandbox: Sandbox) -> Process:
    """A session with two shells and an editor, and a client that shows it."""
    sandbox.files.write_text("/tmp/text", "".join(f"number {n}\n" for n in range(100)))
    p = sandbox.spawn([*TMUX, "new-session", "-s", "w", "sh"], tty=(40, 120), env=ENVIRONMENT)
    p.stdout.read_until("pane> ", timeout=20)
    tmux(sandbox, "split-window", "-t", "w", "sh")
    tmux(sandbox, "split-window", "-h", "-t", "w", "vim -u NONE -i NONE /tmp/text")
    shows(sandbox, 0, "pane>")
    shows(sandbox, 1, "pane>")
    shows(sandbox, 2, "number 3")
    return p


def test_three_panes(sandbox: Sandbox) -> None:
    p = client(sandbox)
    tmux(sandbox, "send-keys", "-t", "w:0.0", "x=41; sleep 1000", "Enter")
    tmux(sandbox, "send-keys", "-t", "w:0.1", "y=7; tty", "Enter")
    tmux(sandbox, "send-keys", "-t", "w:0.2", "ggOinserted")
    tty = shows(sandbox, 1, "/dev/pts/")
    shows(sandbox, 2, "inserted")
    shows(sandbox, 0, "sleep 1000")
    checkpoint = sandbox.checkpoint()

    def check(box: Sandbox, viewer: Process) -> None:
        assert shows(box, 1, "/dev/pts/") == tty
        tmux(box, "send-keys", "-t", "w:0.0", "C-c")
        tmux(box, "send-keys", "-t", "w:0.0", "echo x is $((x + 1))", "Enter")
        shows(box, 0, "x is 42")
        tmux(box, "send-keys", "-t", "w:0.1", "echo y is $y; y=0", "Enter")
        shows(box, 1, "y is 7")
        tmux(box, "send-keys", "-t", "w:0.2", " more", "Escape", ":w", "Enter")
        shows(box, 2, "written")
        assert box.files.read_text("/tmp/text").startswith("inserted more\nnumber 0\n")
        tmux(box, "select-pane", "-t", "w:0.1")
        viewer.stdin.write("echo typed $((1 + 1))\r")
        viewer.stdout.read_until("typed 2", timeout=20)
        viewer.resize(50, 130)
        until = time.monotonic() + 20
        while "130x50" not in tmux(box, "list-clients", "-F", "#{client_width}x#{client_height}"):
            assert time.monotonic() < until
            time.sleep(0.02)

    for _ in range(3):
        check(sandbox, p)
        sandbox.rollback(checkpoint)
    with sandbox.fork(at=checkpoint) as fork, fork.fork() as grandchild:
        check(grandchild, grandchild.counterpart(p))
    check(sandbox, p)
    tmux(sandbox, "kill-server")
    assert p.wait(timeout=20) in (0, 1)
