"""Sockets: which file knows the family."""

from __future__ import annotations

import os
import socket

from ..model import Description
from ..subject import Refused, Subject
from . import unix


def capture(subject: Subject) -> Description:
    with subject.taken() as fd, socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family == socket.AF_UNIX:
            return unix.capture(subject, sock)
        raise Refused("a socket")
