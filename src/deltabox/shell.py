"""A live bash: directory, variables, functions and jobs last from one command to the next.

The shell is a process of the sandbox like any other, so all of this is part of its state: a
rollback brings back the variables, a fork has its own copy of the shell.
"""

from __future__ import annotations

import time

from .errors import CommandFailed, CommandTimeout
from .process import AnyResult, Handle, Result, convert, readable


class Shell(Handle):
    """Made by `Sandbox.shell`.

    >>> sh = sandbox.shell()                                # doctest: +SKIP
    >>> sh.run("cd /tmp; x=41; sleep 1000 &").exit_code     # doctest: +SKIP
    0
    >>> sh.run("echo $((x + 1)) in $PWD").stdout            # doctest: +SKIP
    '42 in /tmp\\n'
    """

    def run(self, command: str, *, timeout: float | None = None, check: bool = False) -> Result:
        """Run a command line in the shell itself and return its result.

        Its standard input is /dev/null. One command runs at a time; calls from other threads wait
        for their turn. What background jobs write shows up in the result of the command that runs
        then, or of the next one.

        `timeout` in seconds, counted from the call: then everything the command has started is
        killed (and the shell as well when it does not come back), and `CommandTimeout` raised.
        `check=True` raises `CommandFailed` for an exit code that is not 0.
        """
        if not isinstance(command, str):
            raise TypeError(f"a shell command is a str, not {type(command).__name__}")
        started = time.monotonic()
        try:
            answer = self._call(
                "shell_run",
                command=command.encode("utf-8", errors="surrogateescape"),
                timeout=timeout,
            )
        except CommandTimeout as error:
            raise readable(error, text=True) from None
        result = Result(
            exit_code=answer["exit_code"],
            stdout=convert(answer["stdout"], text=True),
            stderr=convert(answer["stderr"], text=True),
            duration=time.monotonic() - started,
            truncated=answer["truncated"],
        )
        if check and result.exit_code != 0:
            raise CommandFailed(failure(command, result), result=result)
        return result

    def close(self) -> None:
        """Kill the shell. Its background jobs live on."""
        self._call("kill", signal=9)


def failure(command: object, result: AnyResult[str] | AnyResult[bytes]) -> str:
    """The sentence of a `CommandFailed`."""
    said = result.stderr
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    lines = text.strip().splitlines()
    tail = f": {lines[-1]}" if lines else ""
    return f"{command!r} ended with exit code {result.exit_code}{tail}"
