"""Child processes that cannot outlive us, and the user that they run as.

On Linux a child gets a signal from the kernel when the thread that made it ends, so children are made by the
main thread only: a child made by a pool thread would be stopped as soon as that thread is done.
"""

import ctypes
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.embedded.errors import FolderUnusable, NoUnprivilegedUser

# linux/prctl.h and linux/capability.h
_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

# Servers get nothing of our environment: it may hold keys, and LC_* or PG* would change how they behave.
SERVER_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "HOME": "/"}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The user that a server runs as when we are root, since Postgres refuses to run as root.

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


def spawn(
    argv: Sequence[str],
    *,
    death_signal: signal.Signals,
    log: IO[bytes] | None = None,
    identity: Identity | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a direct child in a session of its own (Ctrl-C reaches us, not it).

    `death_signal` is what it gets when we die. `log` takes both outputs (None: ours). `environment` None
    passes ours on.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("children are started by the main thread: theirs must not end before them")
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        env=None if environment is None else dict(environment),
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=_before_exec(death_signal, identity),  # noqa: PLW1509  (supervisors have one thread)
    )


def run_as(
    argv: Sequence[str], *, identity: Identity | None, stdin: bytes = b"", cwd: Path
) -> subprocess.CompletedProcess[bytes]:
    """Runs a short command to its end as `identity`; both outputs are in `stdout`."""
    return subprocess.run(
        argv,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=SERVER_ENVIRONMENT,
        cwd=cwd,
        check=False,
        preexec_fn=_before_exec(signal.SIGKILL, identity),
    )


def _before_exec(death_signal: signal.Signals, identity: Identity | None) -> Callable[[], None]:
    parent_id = os.getpid()

    def prepare() -> None:
        if identity is not None:
            _become(identity)
        # After the change of user: that change clears the death signal.
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent_id:
            os._exit(1)  # the parent died before the kernel knew whom to tell

    return prepare


def _become(identity: Identity) -> None:
    keep = identity.may_cross_folders and _libc is not None
    if keep and _libc is not None:
        _libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(identity.group_id)
    os.setuid(identity.user_id)
    if keep and _libc is not None:
        mask = 1 << _CAP_DAC_OVERRIDE
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        # Effective, permitted, inheritable: the low words of each, then the high words.
        sets = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
        if _libc.capset(header, sets) or _libc.prctl(
            _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0
        ):
            raise OSError(ctypes.get_errno(), "the folder is closed to the server's user")


def stop_process(process: subprocess.Popen[bytes], *signals: tuple[signal.Signals, float]) -> None:
    """Sends each signal in turn and waits its seconds; kills at the end. Safe for an ended process."""
    for number, wait_s in signals:
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is None:
        process.kill()
        process.wait()
