"""What one does without a time machine: copy the files and run everything again.

To be back in the state of a node this copies the pristine tree, starts a shell and a Python
process, builds the set up again and replays every edit on the way, on the host itself without
any sandbox, and without the test runs between. That is the least work by which the same state
can be reached.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import IO

from deltabox.demo import live
from deltabox.demo.proposals import FILE, Proposal

_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def measure(pristine: Path, scratch: Path, path: tuple[Proposal, ...]) -> float:
    """Seconds to reach the state after the changes of `path`, by copy and re-execution."""
    began = time.perf_counter()
    root = scratch / "copy"
    shutil.copytree(pristine, root, symlinks=True)
    bash = _start(["bash", "--norc", "--noprofile"], root)
    python = _start(["python3", "-B", "-u", "-c", live.DRIVER], root / "boltons")
    try:
        _ask(bash, live.SHELL.format(root=root) + f"printf '{live.END}\\n'\n")
        _ask(python, live.line(live.BUILD))
        for proposal in path:
            edited = proposal.apply((root / "boltons" / FILE).read_text())
            assert edited is not None
            (root / "boltons" / FILE).write_text(edited)
            _ask(python, live.line(live.TAKE_OVER))
            _ask(bash, f"tried=\"$tried {proposal.name}\"; printf '{live.END}\\n'\n")
        return time.perf_counter() - began
    finally:
        _ask(bash, f"kill %1; wait; printf '{live.END}\\n'\n")
        for process in (bash, python):
            process.kill()
            process.communicate()
        shutil.rmtree(root)


def _start(command: list[str], directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=directory,
        env=_ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    )


def _ask(process: subprocess.Popen[str], text: str) -> str:
    stdin, stdout = _streams(process)
    stdin.write(text)
    stdin.flush()
    answer = ""
    for line in stdout:
        if line.startswith(live.END):
            break
        answer += line
    return answer


def _streams(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout
