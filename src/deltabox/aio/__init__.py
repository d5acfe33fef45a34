"""DeltaBox for coroutines, under asyncio and trio: the same names, awaited.

>>> from deltabox import aio                                # doctest: +SKIP
>>> async with aio.Sandbox.create() as sb:                  # doctest: +SKIP
...     cp = await sb.checkpoint()
...     await sb.run("rm -rf /usr /etc")
...     await sb.rollback(cp)

Everything that asks the engine is awaited: all methods, and the properties `Sandbox.head`,
`.checkpoints`, `.usage`, `Process.exit_code`, `Checkpoint.parent`, `.children`, `.stats` and
`Stats.changed_files`. What makes a sandbox can be awaited or be entered with `async with`. A
cancelled call is given up as one that is interrupted by Ctrl-C: a command is killed, a checkpoint,
rollback, fork or commit is waited for. `on_stdout` may be a coroutine function.

There is no code here that knows what a sandbox is. The classes are made of the synchronous ones:
each holds one of those and passes everything on (mirror.py), in a way that can be awaited
(bridge.py). For type checkers and editors `__init__.pyi` says the same; tools/mirror makes it.
"""

from __future__ import annotations

try:
    import anyio  # noqa: F401
    import greenlet  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"deltabox.aio needs {error.name}: pip install 'deltabox[aio]'", name=error.name
    ) from None

import deltabox

from .mirror import MIRRORS, awaited

__all__ = [*deltabox.__all__, "awaited"]
globals().update({name: MIRRORS.get(name) or getattr(deltabox, name) for name in deltabox.__all__})
