"""Which restored trees may wait at their barrier for long, and what they take while they do.

Nearly everything a restore makes stays as it is until the tree is let go: clocks are set going
after the release (objects/timers.py), what programs write lies in files and pipes of their own.
"""

from __future__ import annotations

from .template import Template

# Estimated from the kernel's structures: a tree's namespaces, mounts and control memory; a process
# with its tables and mappings; a thread with its stack.
_TREE, _PROCESS, _THREAD = 1 << 20, 1 << 18, 1 << 15


def may_wait(template: Template, *, network: str) -> bool:
    """Whether a tree restored from it stays as it is while it waits.

    A connection that is being made gives up after a while, a text of /proc was made when it was
    positioned, and the host's ports are taken by the tree that runs.
    """
    capture = template.capture
    return (
        capture is not None
        and network != "host"
        and not any(
            (d.kind == "tcp" and d.state.phase in ("connecting", "unaccepted"))
            or (d.kind in ("kernel", "proc") and d.position)
            for d in capture.descriptions
        )
    )


def waiting_bytes(template: Template) -> int:
    """What a tree restored from it takes of its own while it waits, about: page tables, what its
    tasks need in the kernel, and shared memory, which has no copy-on-write.
    """
    capture, stash = template.capture, template.stash
    if capture is None or stash is None or not template.compiled:
        return 0
    shared: int = sum(one.table.size for one in capture.shared)
    threads = sum(len(process.threads) for process in capture.processes)
    tables = sum(stash.sizes().values()) // 512
    fixed = _TREE + len(capture.processes) * _PROCESS + threads * _THREAD
    return fixed + tables + shared + len(template.sealed.content)
