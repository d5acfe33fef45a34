"""Search over live sandboxes: best-of-N, depth-first, beam, UCT, tournament, reflexion.

>>> from deltabox import Sandbox, explore
>>> found = explore.beam(sb, Repair(), width=4, depth=5, goal=1.0)  # doctest: +SKIP
>>> found.commit()                                                  # doctest: +SKIP
"""

from .events import (
    AnyEvent,
    Began,
    Dropped,
    Ended,
    Failed,
    Listener,
    Noted,
    Proposed,
    Stepped,
    Trace,
    replay,
)
from .picture import LiveTree, Picture
from .problem import Problem, State
from .search import Budget, Found, Node, Over, Search
from .strategies import beam, best_of, depth_first, explore, reflexion, tournament, uct

__all__ = [
    "AnyEvent",
    "Began",
    "Budget",
    "Dropped",
    "Ended",
    "Failed",
    "Found",
    "Listener",
    "LiveTree",
    "Node",
    "Noted",
    "Over",
    "Picture",
    "Problem",
    "Proposed",
    "Search",
    "State",
    "Stepped",
    "Trace",
    "beam",
    "best_of",
    "depth_first",
    "explore",
    "reflexion",
    "replay",
    "tournament",
    "uct",
]
