"""Environments that misbehave, or are more than a process. They run inside a sandbox."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

HELPER = """
import os, sys
total = 0
with open(sys.argv[1], "a") as book:
    for line in sys.stdin:
        total += int(line)
        book.write(f"{total}\\n")
        book.flush()
        print(total, flush=True)
"""


class Small(gymnasium.Env[Any, Any]):
    """What the others have in common: it counts its steps."""

    observation_space: spaces.Space[Any] = spaces.Box(-(2**40), 2**40, (2,), np.int64)
    action_space: spaces.Space[Any] = spaces.Discrete(8)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.seen(), {}

    def seen(self) -> Any:
        return np.array([self.steps, 0])

    def step(self, action: Any) -> Any:
        self.steps += 1
        info = self.act(int(action)) or {}
        return self.seen(), 1.0, False, False, info

    def act(self, action: int) -> dict[Any, Any] | None:
        raise NotImplementedError


class Accounts(Small):
    """A simulator that is a process of its own, and keeps a book in a file."""

    def __init__(self, book: str = "/tmp/book") -> None:
        super().__init__()
        self.total = 0
        self.book = Path(book)
        self.helper = subprocess.Popen(
            [sys.executable, "-c", HELPER, book],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def act(self, action: int) -> dict[Any, Any]:
        pipes = self.helper
        assert pipes.stdin is not None and pipes.stdout is not None
        pipes.stdin.write(f"{action}\n")
        pipes.stdin.flush()
        self.total = int(pipes.stdout.readline())
        return {"book": self.book.read_text(), "pid": pipes.pid}

    def seen(self) -> Any:
        return np.array([self.steps, self.total])

    def close(self) -> None:
        assert self.helper.stdin is not None
        self.helper.stdin.close()
        self.helper.wait()


class Talker(Small):
    """Prints in every way there is, and reads what nobody types."""

    def act(self, action: int) -> dict[Any, Any]:
        print("printed", action)
        print("to stderr", file=sys.stderr)
        sys.__stdout__.write("no newline")  # type: ignore[union-attr]
        os.write(1, b"\x1b\xff\n bytes\n")
        os.system("echo by a shell")
        if action == 7:
            print("much " * 600_000)
        if os.fork() == 0:
            os.write(1, b"by a child\n")
            os._exit(0)
        os.wait()
        return {"read": sys.stdin.read()}


def scribble(line: bytes) -> None:
    """Write a line into every pipe there is."""
    for fd in range(3, 20):
        try:
            os.write(fd, line)
        except OSError:
            continue  # none, or one that is read from


class Broken(Small):
    """Raises, in several ways."""

    def act(self, action: int) -> dict[Any, Any] | None:
        if action == 1:
            raise ValueError("not \udc80 that \n way")
        if action == 2:
            sys.exit(3)
        if action == 3:
            return {"inner": [0, {"it": object()}]}
        if action >= 4:
            scribble([b"scribbled\n", b"\x91\x01\n"][action - 4])
        return None


class Mortal(Small):
    """Ends, in several ways."""

    def act(self, action: int) -> None:
        print("last words", flush=True)
        if action == 1:
            os._exit(3)
        if action == 2:
            ctypes.string_at(0)
        if action == 3:  # a child of C, which keeps our pipes open
            if ctypes.CDLL(None).fork() == 0:
                time.sleep(1000)
            os._exit(4)


class Slow(Small):
    """Does not end its step before somebody has made a file."""

    def act(self, action: int) -> None:
        Path("/tmp/began").touch()
        while action and not Path("/tmp/go").exists():
            time.sleep(0.01)


class Odd(Small):
    """Has a space of its own."""

    class Space(spaces.Discrete):
        pass

    action_space = Space(3)

    def act(self, action: int) -> None:
        pass


class Nested(Small):
    """Says everything that can be said."""

    observation_space = spaces.Dict(
        z=spaces.Tuple([spaces.Discrete(3), spaces.Text(5)]),
        a=spaces.Sequence(spaces.Box(0, 1, (2,))),
        g=spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(4)),
        o=spaces.OneOf([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])]),
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.seen(), {"options": options}

    def seen(self) -> Any:
        return self.observation_space.sample()

    def act(self, action: int) -> dict[Any, Any]:
        return {
            (1, "key"): {"set", 2},
            "big": 1 << 200,
            "numpy": np.float32(0.1),
            "when": np.datetime64("2024-01-01"),
            "names": np.array(["a", "\N{SNOWMAN}"]),
            "nan": float("nan"),
            "complex": 1 + 2j,
            "none": None,
        }
