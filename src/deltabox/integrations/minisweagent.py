"""mini-swe-agent in a sandbox: an environment with a checkpoint at every step.

It is what mini-swe-agent's own environments are (`minisweagent/environments/docker.py` and
`local.py` of its release 2.4): the same configuration where it means the same, each command in a
fresh `bash -lc`, output and errors in one stream, the same three keys in what `execute` returns,
the same answer to a timeout, the same end (`Submitted`). Three things differ, and are why one takes
it:

- a command is over when its own process is, so a server it has left in the background is no reason
  to wait, and still runs in the next step;
- every step can be gone back to, or forked, with all its files and processes;
- nothing of the host is changed, and nothing of its environment variables leaks in.

An agent that is sent back must forget as well. Its messages are cut where the step's observation
ends: `rewind` does both, `branch` does both for a copy of the agent, `resume` lets it go on.
Messages and steps are matched by the action itself, the very object that the agent handed to
`execute`: to count would be wrong, since an action can be refused by the user, or follow one that
ended the run.
"""

from __future__ import annotations

import copy
import logging
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Annotated, Any, Final

from ..errors import CommandTimeout, RolledBack, SandboxClosed
from ..retention import KEEP_ALL, KeepLast, Policy, described, rebuilt
from ..sandbox import Sandbox
from .trail import Step, Trail

try:
    from minisweagent.exceptions import FormatError, InterruptAgentFlow, Submitted
    from minisweagent.utils.serialize import recursive_merge
    from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer
except ImportError as error:
    raise ImportError(
        "deltabox.integrations.minisweagent needs mini-swe-agent: pip install 'deltabox[swe]'"
    ) from error

__all__ = ["DeltaBoxEnvironment", "DeltaBoxEnvironmentConfig", "branch", "resume", "rewind"]

_SUBMITTED: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what mini-swe-agent's prompts ask for
# one stream, in the order in which things were written; the interpreter takes sh's place
_JOINED: Final = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")


def _policy(value: Any) -> Any:
    """What to keep, as a configuration file can say it: 20, or `{kind: fitting}`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return KeepLast(value)
    if isinstance(value, Mapping):
        try:
            return rebuilt(dict(value))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"keep is a number of steps, or a map such as {{kind: last, count: 20}} with the "
                f"kinds all, last, reachable, fitting; not {dict(value)!r}"
            ) from error
    return value


class DeltaBoxEnvironmentConfig(BaseModel):
    """What `environment:` of a configuration may say. Anything else is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    cwd: str = "/"
    """Where commands run."""
    env: dict[str, str] = {}
    """Variables for commands."""
    forward_env: list[str] = []
    """Variables of the host to hand on, where they are set there; `env` takes precedence."""
    timeout: int = 30
    """Seconds for each command."""
    interpreter: list[str] = ["bash", "-lc"]
    """What runs a command, which is its last argument."""
    keep: Annotated[Policy, BeforeValidator(_policy), PlainSerializer(described)] = KEEP_ALL
    """Which states are kept: a policy, or a number (of the newest checkpoints), or a map as
    `{kind: last, count: 20}`. The start and the present always are."""
    sandbox: dict[str, Any] = {}
    """More of `Sandbox.create`: base, network, memory_limit, hostname, ..."""


class DeltaBoxEnvironment:
    """An environment for mini-swe-agent's agents; in a configuration file:

        environment:
          environment_class: deltabox.integrations.minisweagent.DeltaBoxEnvironment
          cwd: /home/me/project
          keep: 50

    Ended by `cleanup`, by the end of a `with` block, and when nothing refers to it any more.
    """

    _trail: Trail | None = None  # until it is made

    def __init__(
        self,
        *,
        config_class: type = DeltaBoxEnvironmentConfig,
        logger: logging.Logger | None = None,
        **kwargs: Any,
    ) -> None:
        """Make a sandbox. `kwargs` are the fields of the configuration.

        Raises what `Sandbox.create` does, `TypeError` for an option it does not have, and
        pydantic's `ValidationError`.
        """
        self.logger = logger or logging.getLogger("minisweagent.environment")
        self.config = config_class(**kwargs)
        sandbox = Sandbox.create(keep=self.config.keep, **self.config.sandbox)
        try:
            self._trail = Trail(sandbox)
        except BaseException:
            sandbox.close()
            raise
        self.logger.info("made %r", sandbox)

    # -- mini-swe-agent's protocol -----------------------------------------------------------

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
    ) -> dict[str, Any]:
        """Run `action["command"]`: output, returncode (negative for a signal), exception_info.

        timeout: seconds; then the command and its descendants are killed.

        Raises `Submitted` when the command says that the task is done. A command that could not be
        run, or took too long, is an output with returncode -1; a sandbox that has ended is not,
        since no command would ever run again: `SandboxClosed`.
        """
        run = partial(
            self._run,
            action.get("command", ""),
            cwd or self.config.cwd,
            timeout or self.config.timeout,
        )
        output = self._way().do(action, run)
        lines = output["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == _SUBMITTED and output["returncode"] == 0:
            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        return output

    def _run(self, command: str, cwd: str, timeout: float) -> dict[str, Any]:
        host = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        try:
            result = self.sandbox.run(
                [*_JOINED, *self.config.interpreter, command],
                cwd=cwd,
                env=host | self.config.env,
                timeout=timeout,
            )
        except (SandboxClosed, RolledBack):
            raise
        except CommandTimeout as error:
            # the exception that the other environments report, in the words that prompts know
            return _failed(
                subprocess.TimeoutExpired(command, timeout), _lines(str(error.stdout or ""))
            )
        except Exception as error:
            return _failed(error, "")
        output = {
            "output": _lines(result.stdout),
            "returncode": result.exit_code,
            "exception_info": "",
        }
        if result.truncated:
            output["extra"] = {"truncated": True}
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What prompts may use: the configuration, uname(2), `kwargs`."""
        merged: dict[str, Any] = recursive_merge(
            self.config.model_dump(), platform.uname()._asdict(), kwargs
        )
        return merged

    def serialize(self) -> dict[str, Any]:
        """What a trajectory says about it; `info.deltabox.steps` is ours. Waits for nothing."""
        steps = [
            {
                "step": step.number,
                "checkpoint": None if (taken := step.taken) is None else taken.id,
                "problem": step.problem,
            }
            for step in self.steps
        ]
        kind = type(self)
        return {
            "info": {
                "config": {
                    "environment": self.config.model_dump(mode="json"),
                    "environment_type": f"{kind.__module__}.{kind.__name__}",
                },
                "deltabox": {"steps": steps},
            }
        }

    def cleanup(self) -> None:
        """End the sandbox. Twice is no error."""
        if self._trail is not None:
            self._trail.close()

    # -- steps -------------------------------------------------------------------------------

    @property
    def sandbox(self) -> Sandbox:
        """Where commands run. To go back use `rollback` here, which knows the steps."""
        return self._way().sandbox

    @property
    def steps(self) -> list[Step]:
        """What was done, from the start (step 0, no action) to the present."""
        return self._way().steps

    def rollback(self, step: Step | int) -> Step:
        """Go back to the state after a step; see `Trail.rollback` for what it raises.

        The agent does not know: `rewind` tells it.
        """
        return self._way().rollback(step)

    def fork(self, step: Step | int | None = None) -> DeltaBoxEnvironment:
        """Another environment, a live copy of the state after a step, by default the last one.

        Raises what `Trail.fork` does.
        """
        trail = self._way().fork(step)
        made = object.__new__(type(self))
        made.logger, made.config, made._trail = self.logger, self.config, trail
        return made

    def _way(self) -> Trail:
        if self._trail is None:
            raise SandboxClosed("the environment has no sandbox: it could not be made")
        return self._trail

    def __enter__(self) -> DeltaBoxEnvironment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cleanup()

    def __del__(self) -> None:
        try:
            self.cleanup()
        except Exception:
            pass  # at the interpreter's end; the engine closes what this process leaves


def _lines(text: str) -> str:
    """Lines that end as Python's text streams end them, which the other environments read."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _failed(error: Exception, output: str) -> dict[str, Any]:
    """What a command that did not come to its end is answered with."""
    return {
        "output": output,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {error}",
        "extra": {"exception_type": type(error).__name__, "exception": str(error)},
    }


# -- agents ------------------------------------------------------------------------------------


def rewind(agent: Any, step: Step | int) -> None:
    """Take an agent back to where it had seen a step's output: its environment and its messages.

    What it has spent (calls, cost) stays spent. `resume` lets it go on.

    Raises `ValueError` when the step is one of several of one message, or the messages are not the
    ones that led to the steps, and what `rollback` raises; nothing has changed then.
    """
    messages = _messages_until(agent, step)
    agent.env.rollback(step)
    agent.messages = messages


def branch(agent: Any, step: Step | int) -> Any:
    """Another agent, at a step of this one, in a fork of its environment; the model is the same.

    Raises what `rewind` does. The new agent's environment is to be cleaned up, too.
    """
    messages = _messages_until(agent, step)
    other = copy.copy(agent)
    other.env = agent.env.fork(step)
    other.messages = messages
    other.extra_template_vars = dict(agent.extra_template_vars)
    return other


def resume(agent: Any) -> dict[str, Any]:
    """Let an agent go on from its messages, where `agent.run` would begin anew; as that, its end.

    Returns `exit_status` and `submission`, raises what the agent's steps do.
    """
    format_errors = 0
    while agent.messages[-1].get("role") != "exit":
        try:
            agent.step()
            format_errors = 0
        except FormatError as error:
            agent.cost += error.messages[0].get("extra", {}).get("cost", 0.0)
            agent.add_messages(*error.messages)
            format_errors += 1
            if format_errors == agent.config.max_consecutive_format_errors:
                status = {"exit_status": "RepeatedFormatError", "submission": ""}
                agent.add_messages(
                    {"role": "exit", "content": "RepeatedFormatError", "extra": status}
                )
        except InterruptAgentFlow as error:
            agent.add_messages(*error.messages)
        except Exception as error:
            agent.handle_uncaught_exception(error)
            raise
        finally:
            agent.save(agent.config.output_path)
    result: dict[str, Any] = agent.messages[-1].get("extra", {})
    return result


def _messages_until(agent: Any, step: Step | int) -> list[dict[str, Any]]:
    """An agent's messages up to the one that asked for the step after `step`."""
    steps: list[Step] = agent.env.steps
    number = step.number if isinstance(step, Step) else step
    if not 0 <= number < len(steps):
        raise IndexError(f"there is no step {number} on this way: it has 0 to {len(steps) - 1}")
    if isinstance(step, Step) and steps[number] is not step:
        raise ValueError(
            f"step {number} is of another way: the messages that led to it are not this agent's; "
            f"the environment alone can go there, by rollback()"
        )
    asked = _asked_in(agent.messages, steps)
    before = max((index for of, index in asked.items() if of <= number), default=-1)
    after = min((index for of, index in asked.items() if of > number), default=None)
    if after is None:
        if len(asked) == 0 and len(steps) > 1 and any(_actions(m) for m in agent.messages):
            raise ValueError(
                "the agent's messages are not the ones that led to its environment's steps: "
                "were they copied, or loaded from a file?"
            )
        kept = list(agent.messages)
        while kept and kept[-1].get("role") == "exit":
            kept.pop()
        if before == len(kept) - 1 >= 0:  # what it asked for last was never answered
            raise ValueError(
                f"step {number} ended the run, there is nothing after it: go before it"
            )
        return kept
    if after == before:
        together = [of for of, index in asked.items() if index == after]
        raise ValueError(
            f"step {number} is in the middle of one message, which asked for steps "
            f"{together[0]} to {together[-1]}: go to {together[0] - 1} or {together[-1]}"
        )
    return list(agent.messages[:after])


def _asked_in(messages: list[dict[str, Any]], steps: list[Step]) -> dict[int, int]:
    """For each step's number the index of the message that asked for it, if there is one."""
    asked: dict[int, int] = {}
    actions = [(i, action) for i, message in enumerate(messages) for action in _actions(message)]
    for step in steps[1:]:
        at = next((n for n, (_, action) in enumerate(actions) if action is step.action), None)
        if at is not None:
            asked[step.number] = actions[at][0]
            del actions[: at + 1]  # one action may be the same object as a later one
    return asked


def _actions(message: dict[str, Any]) -> list[Any]:
    actions: list[Any] = message.get("extra", {}).get("actions", [])
    return actions
