"""Real models, asked over plain HTTP: Anthropic's messages, or chat completions as OpenAI has them.

One request for each state: the issue, what was done on the way there and what came of it, and the
wish for some alternatives. Servers that are busy (429, 5xx) or drop the connection are asked again,
four times, after as long as they say or twice as long as the last time. A request can be waited for
for minutes, so requests are tasks of the search's event loop, and `stop` ends them all.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from deltabox.explore import State

from .library import ISSUE, WHERE

RETRIES: Final = 4
PATIENCE: Final = 180.0  # seconds for one answer
LONGEST: Final = 60.0  # seconds between two tries
_WHERE: Final = {
    "anthropic": ("ANTHROPIC_BASE_URL", "https://api.anthropic.com", "claude-sonnet-4-5"),
    "openai": ("OPENAI_BASE_URL", "https://api.openai.com/v1", "gpt-5-mini"),
}
_COMMAND: Final = re.compile(r"```(?:bash|sh)\n(.*?)\n?```", re.DOTALL)

TASK = f"""\
You repair a Python library by shell commands. It lies in {WHERE}, where each command runs in
a fresh bash. There is no network and nobody to ask.

{ISSUE}
Each command is judged by tests that you cannot see. After it you are told its output, and how many
pass. Several commands from different continuations are tried; you see those that led to this state.

Answer with up to {{count}} commands, each in a block of its own that begins with ```bash and ends
with ```. They are alternatives: each is tried on its own, in a copy of this state, so none may rely
on another. The first line of each is a comment of a few words that says what it does. Read before
you edit. Put the likeliest first.
"""


class ModelError(RuntimeError):
    """A model could not be asked; the message says why and what to do."""


class Asked:
    """A model behind an API.

    api: `"anthropic"` or `"openai"`. name: the model's; None: one that the API is known to have.
    url: where the API is; None: its own place, or what `ANTHROPIC_BASE_URL` or `OPENAI_BASE_URL`
    say. pause: seconds before the first of the tries again.
    """

    def __init__(
        self,
        api: str,
        key: str,
        *,
        name: str | None = None,
        url: str | None = None,
        pause: float = 1.0,
    ) -> None:
        variable, place, usual = _WHERE[api]
        self.name = name or usual
        self._api = api
        self._key = key
        self._url = (url or os.environ.get(variable) or place).rstrip("/")
        self._pause = pause
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[str]] = set()
        self._stopped = False

    async def commands(
        self, state: State, told: Sequence[tuple[str, str]], count: int
    ) -> list[str]:
        """Up to `count` commands, alternatives of each other; none: it sees nothing to do.

        Raises `ModelError`.
        """
        task = asyncio.ensure_future(self._answer(told, count))
        with self._lock:
            self._tasks.add(task)
            if self._stopped:
                task.cancel()
        try:
            text = await task
        except asyncio.CancelledError:
            raise ModelError("the model was not waited for") from None
        finally:
            with self._lock:
                self._tasks.discard(task)
        found = [command.strip() for command in _COMMAND.findall(text)]
        return list(dict.fromkeys(command for command in found if command))[:count]

    def stop(self) -> None:
        """Wait for no answer any more; from any thread, and from a signal's handler."""
        self._stopped = True
        for task in list(self._tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _answer(self, told: Sequence[tuple[str, str]], count: int) -> str:
        path, headers, body = self._request(told, TASK.format(count=count))
        pause = self._pause
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            for left in reversed(range(RETRIES + 1)):
                try:
                    answer = await client.post(self._url + path, headers=headers, json=body)
                except httpx.TransportError as error:
                    problem, wanted = f"{type(error).__name__}: {error}", None
                else:
                    if answer.is_success:
                        return self._text(answer)
                    problem, wanted = self._refused(answer), answer.headers.get("retry-after")
                    if answer.status_code not in (408, 409, 429) and answer.status_code < 500:
                        raise ModelError(problem)
                if left:
                    await asyncio.sleep(min(_seconds(wanted) or pause, LONGEST))
                    pause *= 2
        raise ModelError(f"{self._url} was asked {RETRIES + 1} times in vain: {problem}")

    def _request(
        self, told: Sequence[tuple[str, str]], task: str
    ) -> tuple[str, Mapping[str, str], dict[str, Any]]:
        """Path, headers and body."""
        said = [{"role": "user", "content": "Begin."}]
        for command, output in told:
            said.append({"role": "assistant", "content": f"```bash\n{command}\n```"})
            said.append({"role": "user", "content": output})
        if self._api == "anthropic":
            headers = {"x-api-key": self._key, "anthropic-version": "2023-06-01"}
            body = {"model": self.name, "max_tokens": 4096, "system": task, "messages": said}
            return "/v1/messages", headers, body
        headers = {"authorization": f"Bearer {self._key}"}
        said.insert(0, {"role": "system", "content": task})
        return "/chat/completions", headers, {"model": self.name, "messages": said}

    def _text(self, answer: httpx.Response) -> str:
        try:
            body = answer.json()
            if self._api == "anthropic":
                return "".join(part["text"] for part in body["content"] if part["type"] == "text")
            return str(body["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ModelError(
                f"{answer.url} answered something else than the {self._api} API does "
                f"({error!r}): {answer.text[:200]!r}"
            ) from error

    def _refused(self, answer: httpx.Response) -> str:
        hint = {
            401: "; is the key right?",
            403: "; may the key use this model?",
            404: f"; is there a model {self.name!r}, and is the place right?",
        }.get(answer.status_code, "")
        return f"{answer.url} answered {answer.status_code}{hint} {answer.text[:200]!r}"


def _seconds(text: str | None) -> float | None:
    """What a server wishes; None if it says none, or a date."""
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None
