"""UDP sockets (udp(7)): in work."""

from __future__ import annotations

import socket

from ..model import Description
from ..subject import Refused, Subject


def capture(subject: Subject, sock: socket.socket) -> Description:
    raise Refused("a UDP socket")
