"""What a PID 1 asks the keeper to make while it builds a tree: message queues.

It writes to its socket of requests and waits for the answer; who it is the kernel says (unix(7),
SCM_CREDENTIALS).  Its program may fail before it asks; then that is its answer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

from .model import Capture
from .objects import mqueues
from .peer import Peer, ProgramFailed, Run

_CREDENTIALS = struct.Struct("iII")
_PATIENCE = 10.0  # seconds, as for an answer


class Asked:
    """One restore's questions. Made before its program is sent."""

    def __init__(self, peer: Peer, owner: int, capture: Capture) -> None:
        self._peer = peer
        self._requests = requests = peer.sock
        self._owner = owner
        self._queues = capture.queues
        if self._queues.linked:
            requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def serve(self, run: Run) -> None:
        """Answer what is asked, if anything will be. OSError when it could not be made."""
        if not self._queues.linked:
            return
        poller = select.poll()
        poller.register(self._requests, select.POLLIN)
        if not poller.poll(_PATIENCE * 1000):
            return  # whoever waits for the answer finds that there is none
        _, control, _, _ = self._requests.recvmsg(8, socket.CMSG_SPACE(_CREDENTIALS.size))
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        run.check()
        pid = next(
            _CREDENTIALS.unpack(data)[0]
            for level, kind, data in control
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        )
        try:
            mqueues.make(pid, self._owner, self._queues)
        except OSError:
            run.give_up()
            self._requests.send(bytes(8))
            with contextlib.suppress(ProgramFailed):
                self._peer.answer(run)
            raise
        self._requests.send(bytes(8))
