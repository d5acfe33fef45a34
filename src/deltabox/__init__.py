"""DeltaBox: live Linux sandboxes that can be checkpointed, rolled back and forked in milliseconds.

>>> from deltabox import Sandbox
>>> with Sandbox.create() as sb:                            # doctest: +SKIP
...     cp = sb.checkpoint()
...     sb.run("rm -rf /usr /etc")
...     sb.rollback(cp)
"""

from .branch import Branch
from .checkpoint import Change, Checkpoint, Stats, Usage
from .errors import (
    BranchError,
    BranchStale,
    CheckpointError,
    CommandFailed,
    CommandTimeout,
    DeltaBoxError,
    ForkError,
    HostUnsupported,
    MergeConflict,
    NoSpace,
    RollbackError,
    RolledBack,
    SandboxClosed,
    StaleHandle,
    UnknownCheckpoint,
    UnsupportedState,
)
from .files import Files, FileStat
from .process import BytesProcess, BytesResult, Process, ProcessInfo, Result
from .retention import KeepAll, KeepFitting, KeepLast, KeepReachable
from .sandbox import Sandbox
from .shell import Shell

__all__ = [
    "Branch",
    "BranchError",
    "BranchStale",
    "BytesProcess",
    "BytesResult",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CommandFailed",
    "CommandTimeout",
    "DeltaBoxError",
    "FileStat",
    "Files",
    "ForkError",
    "HostUnsupported",
    "KeepAll",
    "KeepFitting",
    "KeepLast",
    "KeepReachable",
    "MergeConflict",
    "NoSpace",
    "Process",
    "ProcessInfo",
    "Result",
    "RollbackError",
    "RolledBack",
    "Sandbox",
    "SandboxClosed",
    "Shell",
    "StaleHandle",
    "Stats",
    "UnknownCheckpoint",
    "UnsupportedState",
    "Usage",
]
