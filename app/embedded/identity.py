"""The user that the servers run as when we are root, since Postgres refuses to run as root."""

import ctypes
import os
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.embedded.errors import FolderUnusable, NoUnprivilegedUser
from app.processes import libc

# linux/prctl.h and linux/capability.h
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True, kw_only=True)
class Identity:
    """An existing user without privileges.

    `may_cross_folders`: the child keeps the one capability to pass folders that are closed to it, such as a
    checkout under /root. Without it such a folder would have to be opened to everybody.
    """

    name: str
    user_id: int
    group_id: int
    may_cross_folders: bool = False

    def own(self, path: Path, mode: int) -> None:
        """Gives `path` to this user."""
        os.chown(path, self.user_id, self.group_id)
        path.chmod(mode)

    def become(self) -> None:
        """Turns the calling process into this user for good. Raises: OSError."""
        kept = libc if self.may_cross_folders else None
        if kept is not None:
            kept.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(self.group_id)
        os.setuid(self.user_id)
        if kept is not None:
            mask = 1 << _CAP_DAC_OVERRIDE
            header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
            # Effective, permitted, inheritable: the low words of each, then the high words.
            sets = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
            if kept.capset(header, sets) or kept.prctl(
                _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0
            ):
                raise OSError(ctypes.get_errno(), "the folder is closed to the server's user")


def choose_identity(data: Path, must_reach: Sequence[Path]) -> Identity | None:
    """The user to run servers as, or None to run them as ourselves.

    `data` keeps its owner; a fresh one goes to `postgres` or `nobody`. `must_reach`: files and folders that
    the servers need to get to.

    Raises: NoUnprivilegedUser, FolderUnusable (data of another user, and we are not root).
    """
    owner_id = data.stat().st_uid if data.exists() else None
    if os.geteuid() != 0:
        if owner_id not in (None, os.geteuid()):
            raise FolderUnusable(f"{data} belongs to user id {owner_id}: run as that user or as root")
        return None
    user = _entry(owner_id)
    return Identity(
        name=user.pw_name,
        user_id=user.pw_uid,
        group_id=user.pw_gid,
        may_cross_folders=not all(_is_open_to(user, path) for path in must_reach),
    )


def _entry(owner_id: int | None) -> pwd.struct_passwd:
    wanted: list[Callable[[], pwd.struct_passwd]] = [
        lambda: pwd.getpwnam("postgres"),
        lambda: pwd.getpwnam("nobody"),
    ]
    if owner_id:
        wanted = [lambda: pwd.getpwuid(owner_id)]
    for look_up in wanted:
        try:
            return look_up()
        except KeyError:
            continue
    if owner_id:
        return pwd.struct_passwd((str(owner_id), "x", owner_id, owner_id, "", "/", ""))
    raise NoUnprivilegedUser(
        "Postgres does not run as root and there is neither a user postgres nor nobody: "
        "run as an ordinary user, or set ARMILLARY_DATABASE_URL and ARMILLARY_REDIS_URL"
    )


def _is_open_to(user: pwd.struct_passwd, path: Path) -> bool:
    """True when `user` can pass every folder above `path`."""
    for folder in path.absolute().parents:
        status = folder.stat()
        if status.st_uid == user.pw_uid:
            bit = 0o100
        elif status.st_gid == user.pw_gid:
            bit = 0o010
        else:
            bit = 0o001
        if not status.st_mode & bit:
            return False
    return True
