"""What a PID 1 asks the keeper to make while it builds a tree: message queues.

It writes to its socket of requests and waits for the answer; who it is the kernel says (unix(7),
SCM_CREDENTIALS).  Its program may fail before it asks; then the door answers instead.
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

    def __init__(
        self, requests: socket.socket, door: Peer, owner: int, capture: Capture | None
    ) -> None:
        self._requests = requests
        self._door = door
        self._owner = owner
        self._queues = mqueues.Queues() if capture is None else capture.queues
        if self._queues.linked:
            requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def serve(self, run: Run) -> None:
        """Answer what is asked, if anything will be. OSError when it could not be made."""
        if not self._queues.linked:
            return
        poller = select.poll()
        for sock in (self._requests, self._door.sock):
            poller.register(sock, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(_PATIENCE * 1000)]
        if self._requests.fileno() not in ready:
            return  # the door's answer says why
        _, control, _, _ = self._requests.recvmsg(8, socket.CMSG_SPACE(_CREDENTIALS.size))
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
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
                self._door.answer(run)
            raise
        self._requests.send(bytes(8))
