"""The host's end of the program that holds an environment (`_environment.py`).

A request and its answer are a line each, msgpack in it: no pickle, so that what runs inside cannot
run anything here. Each request has a number and its answer says it. A caller who is interrupted, or
whose time is over, leaves an answer behind that will come; the next request drops it. There is
nothing else to be remembered here, so a rollback cannot make it wrong.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

import msgspec

from ..errors import CommandTimeout, DeltaBoxError
from ..process import BytesProcess
from ..sandbox import Sandbox
from ._msgpack import from_line, to_line
from ._values import NotData, lift, lower

PARTS: Final = ("_msgpack", "_values", "_spaces", "_environment")  # each needs only those before
TAIL: Final = 2000  # characters of what was printed, for an error
LOOK: Final = 1.0  # seconds; so often a program that does not answer is looked at
TO_END: Final = 5.0  # seconds a program has to end by itself

# Standard input and output are put aside first: anything that is imported may print.
BOOTSTRAP: Final = """
import json, os, sys, types
requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
told = json.loads(requests.readline())
nothing = os.open(os.devnull, os.O_RDONLY)
log = os.open(told["log"], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(nothing, 0), os.dup2(log, 1), os.dup2(log, 2), os.close(nothing), os.close(log)
sys.stdout.reconfigure(line_buffering=True)
package = types.ModuleType("deltabox_inside")
package.__path__ = []
sys.modules["deltabox_inside"] = package
for name, text in told["parts"]:
    module = types.ModuleType("deltabox_inside." + name)
    module.__package__ = "deltabox_inside"
    sys.modules[module.__name__] = module
    exec(compile(text, "deltabox/integrations/" + name + ".py", "exec"), module.__dict__)
module.main(requests, answers)
"""

WHERE: Final = (
    "A sandbox over / shows the host's files, but nothing below /tmp and /run, and nothing of "
    "another mount. Pass python= a Python that is inside and has gymnasium and numpy, or "
    "env={'PYTHONPATH': ...}, or sandbox= one in which they were installed (docs/gymnasium.md)"
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode


class EnvironmentFailed(DeltaBoxError):
    """The environment has raised an error, or said what cannot be told. It lives on.

    `kind` is the name of the error's class inside, such as `builtins.ValueError` or
    `gymnasium.error.ResetNeeded`; `traceback` its traceback inside, as text, which is also shown
    below this error's own.
    """

    @property
    def kind(self) -> str | None:
        """The name of the class of the error inside, with its module unless it is built in."""
        value: str | None = self.attributes.get("kind")
        return value

    @property
    def traceback(self) -> str | None:
        """The traceback inside."""
        value: str | None = self.attributes.get("traceback")
        return value


class EnvironmentDied(DeltaBoxError):
    """The process of the environment has ended: exited, crashed or killed.

    `exit_code` as of a `Process`, None if it is not known. Going back to a state from before makes
    it live again.
    """

    @property
    def exit_code(self) -> int | None:
        """How it ended; negative for a signal."""
        value: int | None = self.attributes.get("exit_code")
        return value


class Program:
    """One of them, in one sandbox. Not thread-safe."""

    def __init__(self, process: BytesProcess, log: str, title: str) -> None:
        self.process = process
        self._log = log
        self._title = title
        self._asked = 0
        self._at_rest = True

    @classmethod
    def start(
        cls, sandbox: Sandbox, title: str, *, python: str, env: Mapping[str, str], cwd: str
    ) -> Program:
        """Start it. `FileNotFoundError` where `python` or `cwd` does not exist inside."""
        log = f"/tmp/environment-{uuid.uuid4().hex}.log"
        texts = resources.files(__package__)
        parts = [(name, (texts / f"{name}.py").read_text("utf-8")) for name in PARTS]
        try:
            process = sandbox.spawn([python, "-c", BOOTSTRAP], cwd=cwd, env=env, text=False)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{title} cannot be started: {error}. {WHERE}") from error
        process.stdin.write(json.dumps({"log": log, "parts": parts}).encode() + b"\n")
        return cls(process, log, title)

    def of(self, sandbox: Sandbox) -> Program:
        """The same in another sandbox of the tree."""
        return Program(sandbox.counterpart(self.process), self._log, self._title)

    def is_that_of(self, process: BytesProcess) -> bool:
        """Whether a handle stands for this program, in whatever sandbox of the tree."""
        return self.process._number == process._number

    def ask(self, request: str, *arguments: Any, timeout: float | None) -> Any:
        """Have it do something: the answer.

        timeout: seconds, None for as long as it takes. Then `CommandTimeout`; the program goes on
            with what it does, and what is asked next is done after that.

        Raises `EnvironmentFailed`, `EnvironmentDied`, `_values.NotData` for arguments that cannot
        be told, and what `Stream.readline` raises.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        number = self._asked + 1
        line = to_line(_encode([number, request, lower(arguments)]))
        self._asked = number
        self._at_rest = False
        try:
            self.process.stdin.write(line)
        except BrokenPipeError:
            raise self._died(request) from None
        while True:
            answer = self._hear(request, deadline)
            if answer[0] == number:
                break
        self._at_rest = True
        try:
            if answer[1] == "ok":
                return lift(answer[2])
            kind, text, traceback = map(str, answer[2:])
        except (NotData, IndexError, ValueError, RecursionError) as error:
            raise self._nonsense(request, error) from error
        failed = EnvironmentFailed(
            f"{self._title}: {request}() raised {kind} inside the sandbox: {text}",
            kind=kind,
            traceback=traceback,
        )
        failed.add_note(f"Inside the sandbox:\n{traceback.rstrip()}")
        raise failed

    def settle(self, *, timeout: float | None) -> None:
        """Wait until it does nothing any more, after a call that was interrupted."""
        if not self._at_rest:
            self.ask("nothing", timeout=timeout)

    def went_back(self) -> None:
        """It is now as it was between two requests."""
        self._at_rest = True

    def output(self) -> str:
        """What the environment has printed: the end of it, if it is much."""
        try:
            text = self.process.sandbox.files.read(self._log).decode("utf-8", errors="replace")
        except FileNotFoundError:  # it has not come so far
            text = self.process.stderr.read_available().decode("utf-8", errors="replace")
        return text

    def end(self, *, ask: bool) -> None:
        """End it in a sandbox that lives on; if asked it may close what it holds itself."""
        try:
            if ask:
                self.ask("close", timeout=TO_END)
        except DeltaBoxError:
            pass  # it need not come to an end by itself: it is ended now
        finally:
            try:
                self.process.kill()
                self.process.wait(timeout=TO_END)
                self.process.sandbox.files.remove(self._log)
            except (DeltaBoxError, FileNotFoundError):
                pass  # not there any more: the sandbox was closed, or taken back to before it

    def _hear(self, request: str, deadline: float | None) -> list[Any]:
        """The next answer, whatever it answers."""
        ended = False
        while True:
            patience = 0.0 if ended else LOOK
            if deadline is not None:
                patience = min(patience, max(0.0, deadline - time.monotonic()))
            try:
                line = self.process.stdout.readline(timeout=patience)
                break
            except CommandTimeout:
                # its children may hold the pipe open, so that there is no end of it
                if ended:
                    raise self._died(request) from None
                ended = self.process.exit_code is not None
                if not ended and deadline is not None and time.monotonic() >= deadline:
                    raise CommandTimeout(
                        f"{self._title}: no answer to {request}() in time; it is still at it"
                    ) from None
        if not line.endswith(b"\n"):
            raise self._died(request)
        try:
            answer = _decode(from_line(line))
            if len(answer) < 3:
                raise msgspec.ValidationError(f"{len(answer)} parts instead of at least 3")
            return answer
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._nonsense(request, error) from error

    def _nonsense(self, request: str, error: Exception) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self._title}: what came from inside the sandbox is no answer to {request}() "
            f"({error}); something else there writes to the environment's pipe"
        )

    def _died(self, request: str) -> EnvironmentDied | ModuleNotFoundError:
        try:
            code = self.process.wait(timeout=TO_END)
        except CommandTimeout:  # it has closed its pipes, and will never answer again
            self.process.kill()
            code = None
        printed = self.output()
        missing = re.search(r"ModuleNotFoundError: No module named '(numpy|gymnasium)['.]", printed)
        if request == "make" and missing:
            name = missing[1]
            return ModuleNotFoundError(
                f"{self._title} cannot be made: the Python inside has no {name}. {WHERE}",
                name=name,
            )
        if code is None:
            how = "has closed its pipes, and was killed,"
        else:
            how = f"exited with {code}" if code >= 0 else f"was killed by signal {-code}"
        died = EnvironmentDied(
            f"{self._title}: its process {how} in {request}(). restore_state() goes back to a "
            "state from before, close() frees what is left",
            exit_code=code,
        )
        if printed.strip():
            died.add_note(f"It had printed:\n{printed[-TAIL:].rstrip()}")
        return died
