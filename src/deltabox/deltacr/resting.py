"""Whether a tree is still in the state that was captured last, told without stopping it.

What was captured while everybody waited is good for any checkpoint that is asked for until somebody
moves, and a second checkpoint of one state can share everything with the first (keeper/taking.py).

A process is as it was if each of its threads has slept since it went on after the stop, in the call
that it was stopped in, and has written nothing; told.py says what that rests on.  All that is read
is of one instant or a later one: who is found not to have moved had not moved at the instant
before, either.  So nobody has to be stopped for a state of all at once.

A state that changes without anybody's doing is none of this kind: timers run, timeouts of blocked
calls become shorter, and packets come in.
"""

from __future__ import annotations

import time

from ..linux.stop import tasks
from .live import Live
from .model import Capture
from .template import Template
from .told import activities

# A restored thread makes its call again when it gets a processor; what is spared is far dearer.
_ON_THE_WAY = (0.0005, 0.001, 0.002, 0.004, 0.008)


def may_rest(capture: Capture, *, network: str) -> bool:
    """Whether a captured state stays as it is while no process does anything."""
    if any(process.timers or any(map(any, process.itimers)) for process in capture.processes):
        return False
    kinds = {"timerfd", "udp", "netlink"}
    if network == "host":  # whoever likes may send something, by abstract unix sockets too
        kinds |= {"tcp", "unix socket"}
    return not any(
        d.kind in kinds or (d.kind == "tcp" and d.state.phase not in ("fresh", "listening"))
        for d in capture.descriptions
    )


def is_likely(live: Live, *, network: str) -> bool:
    """Whether everybody waits for something that may come at any time, or never."""
    last = None if live.base is None else live.base.capture
    if last is not None and not may_rest(last, network=network):
        return False
    tids = [tid for pid, tid in tasks(live.group) if pid != live.init]
    return all(one.waits and not one.ends for one in activities(tids).values())


def state_of(live: Live, *, patience: bool = False) -> Template | None:
    """The template that holds the present state of a running tree, if the one filled last does.

    With `patience` it is looked at again while threads are on their way back into the call that
    they were stopped in. OSError if the tree cannot be looked at.
    """
    template = live.rested
    if template is None or template.closed:
        return None
    for delay in (*(_ON_THE_WAY if patience else ()), 0.0):
        with live.ahead.excluded():
            found: dict[int, list[int]] = {}
            for pid, tid in tasks(live.group):
                if pid != live.init:
                    found.setdefault(pid, []).append(tid)
            if found.keys() != live.spaces.keys():
                return None
            now = activities([tid for tids in found.values() for tid in tids])
            own = {host: {tid: now[tid] for tid in found[host] if tid in now} for host in found}
            if all(space.rests(own[host]) for host, space in live.spaces.items()):
                return template
            if not any(space.is_on_its_way(own[host]) for host, space in live.spaces.items()):
                return None
        time.sleep(delay)
    return None


def never_left(live: Live, *, network: str) -> bool:
    """Whether a restored tree is still in the state that it was restored to.

    Nobody has seen it stop, so there is no witness. But where every thread was blocked, in a call
    without a timeout, and no timer ran, nothing happens that does not come from outside: no
    request has, and all of them are blocked in these calls. OSError as for `state_of`.
    """
    capture = None if live.cloned_from is None else live.cloned_from.capture
    if live.asked or capture is None or not may_rest(capture, network=network):
        return False
    blocked = [thread.blocked for process in capture.processes for thread in process.threads]
    places = sorted((then.rsp, then.rip) for then in blocked if then is not None)
    if len(places) != len(blocked):
        return False
    for delay in (*_ON_THE_WAY, None):
        now = activities([tid for pid, tid in tasks(live.group) if pid != live.init]).values()
        # at another place they may still wait to be let go
        if all(one.waits and not one.ends for one in now) and (
            sorted(one.place for one in now) == places
        ):
            return True
        if delay is not None:
            time.sleep(delay)
    return False
