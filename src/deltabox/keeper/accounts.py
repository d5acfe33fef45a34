"""Who a command runs as: users and groups by the sandbox's own /etc/passwd and /etc/group.

The host's own databases (nss, ldap) say nothing about what is inside, and the files inside belong
to programs that may be hostile, so they are read as data: a line that makes no sense is skipped, an
id outside of the sandbox's range is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..deltafs.inside import Inside

IDS = 65536
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Account:
    """What a command runs as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def environment(self) -> dict[str, str]:
        """The clean environment every command starts with; nothing of the host's leaks in."""
        return {
            "PATH": PATH,
            "HOME": self.home,
            "USER": self.name,
            "LOGNAME": self.name,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }


ROOT = Account("root", 0, 0, (0,), "/root")


def _lines(inside: Inside, path: str, fields: int) -> list[list[str]]:
    try:
        text = inside.read(path).decode(errors="replace")
    except OSError:
        return []
    return [parts for line in text.splitlines() if len(parts := line.split(":")) >= fields]


def look_up(inside: Inside, user: str | int) -> Account:
    """The account of a user's name or uid. `ValueError` for a name that is not there."""
    if isinstance(user, int) and not 0 <= user < IDS:
        raise ValueError(f"a uid inside a sandbox is between 0 and {IDS - 1}, not {user}")
    for name, _, uid, gid, _, home, *_ in _lines(inside, "/etc/passwd", 7):
        if not (uid.isascii() and uid.isdigit() and gid.isascii() and gid.isdigit()):
            continue
        if name == user or int(uid) == user:
            if int(uid) >= IDS or int(gid) >= IDS:
                raise ValueError(f"the ids of user {name!r} are beyond the sandbox's range")
            groups = {int(gid)}
            for _, _, number, members in (parts[:4] for parts in _lines(inside, "/etc/group", 4)):
                if name in members.split(",") and number.isascii() and number.isdigit():
                    groups.add(int(number))
            allowed = tuple(sorted(group for group in groups if group < IDS))
            return Account(name, int(uid), int(gid), allowed, home or "/")
    if isinstance(user, int):
        return Account(str(user), user, user, (user,), "/")
    raise ValueError(f"there is no user {user!r} in the sandbox's /etc/passwd")
