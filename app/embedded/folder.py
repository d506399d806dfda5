"""The data folder: its lock, its state file, its socket folder.

<data>/lock            held by the supervisor for as long as it lives
<data>/<server>.lock   held by every process of that server, through a descriptor that they inherit
<data>/state.json      the DSNs; it exists only while the servers are ready
<data>/run             the Unix sockets; a link into /tmp where the path would be too long
<data>/postgres, redis the data
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from app.embedded.errors import DiskFull, FolderUnusable, LockHeld, NotRunning, ServerFailed
from app.embedded.identity import Identity

SOCKET_NAMES = (".s.PGSQL.5432", "redis.sock")
MAX_SOCKET_PATH_BYTES = 103  # sun_path holds 108 bytes on Linux and 104 on macOS, one of them the NUL
PROBE_S = 1.0  # a process that only looks whether the lock is held takes it for an instant
ATTACH_S = 90.0  # a first start, with initdb, on a slow machine
FRESH_BYTES = 128 << 20
RUNNING_BYTES = 24 << 20


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where the running servers are. `supervisor_pid` is the process that stops them at SIGTERM."""

    database_url: str
    redis_url: str
    supervisor_pid: int


@contextlib.contextmanager
def explain_os_errors(data: Path) -> Iterator[None]:
    """Turns what the operating system says about `data` into one of our errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no space left on the disk of {data}") from error
        raise FolderUnusable(
            f"the data folder {data} cannot be used: {error.strerror} ({error.filename}); "
            "set ARMILLARY_DATA_DIR to a folder that can be written"
        ) from error


def make_folder(data: Path) -> None:
    """Makes the data folder, closed to other users as far as a server of another user allows."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.geteuid() == 0:
        data.chmod(0o711)


def check_space(data: Path, *, is_fresh: bool, free_bytes: int | None = None) -> None:
    """Raises DiskFull before a server would stop half-way through a write."""
    free = shutil.disk_usage(data).free if free_bytes is None else free_bytes
    needed = FRESH_BYTES if is_fresh else RUNNING_BYTES
    if free < needed:
        raise DiskFull(f"the disk of {data} has {free >> 20} MiB free, {needed >> 20} MiB are needed")


def take_lock(data: Path) -> int:
    """The descriptor of the held lock. Closing it, or dying, lets go.

    Raises: LockHeld.
    """
    return _lock(data / "lock", wait_s=PROBE_S)


def take_server_lock(data: Path, server: str, *, wait_s: float) -> int:
    """A lock to be inherited by a server: while it can be had, no process of the one before is alive.

    Raises: ServerFailed.
    """
    try:
        return _lock(data / f"{server}.lock", wait_s=wait_s)
    except LockHeld as error:
        raise ServerFailed(
            f"a {server} of an earlier start still runs on {data} after {wait_s:.0f} s: stop it and try again"
        ) from error


def _lock(path: Path, *, wait_s: float) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise LockHeld(
                    f"another process runs the servers of {path.parent} ({path} is locked):"
                    " stop it, or set ARMILLARY_DATA_DIR to another folder"
                ) from None
            time.sleep(0.02)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            return descriptor


def is_supervised(data: Path) -> bool:
    """True while a supervisor holds the lock."""
    try:
        os.close(_lock(data / "lock", wait_s=0))
    except FileNotFoundError:
        return False
    except LockHeld:
        return True
    return False


def write_state(data: Path, endpoints: Endpoints) -> None:
    """Publishes the DSNs, whole or not at all."""
    draft = data / "state.json.draft"
    draft.write_bytes(msgspec.json.encode(endpoints))
    draft.chmod(0o600)
    draft.replace(data / "state.json")


def remove_state(data: Path) -> None:
    (data / "state.json").unlink(missing_ok=True)


def attach(data: Path, *, wait_s: float = ATTACH_S) -> Endpoints:
    """The servers that another process supervises, waiting for those that are just starting.

    Raises: NotRunning.
    """
    deadline = time.monotonic() + wait_s
    while is_supervised(data):
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode((data / "state.json").read_bytes(), type=Endpoints)
        if time.monotonic() > deadline:
            raise NotRunning(f"the servers of {data} did not become ready within {wait_s:.0f} s")
        time.sleep(0.02)
    raise NotRunning(f"no servers run on {data}: start them with `armillary serve`")


def make_socket_folder(data: Path, identity: Identity | None) -> Path:
    """An empty folder for the sockets, short enough for sun_path, closed to other users."""
    run = data / "run"
    remove_socket_folder(data)
    longest = max(len(os.fsencode(run.absolute() / name)) for name in SOCKET_NAMES)
    if longest > MAX_SOCKET_PATH_BYTES:
        folder = Path(tempfile.mkdtemp(prefix="armillary-", dir="/tmp"))
        run.symlink_to(folder)
    else:
        folder = run.absolute()
        folder.mkdir(mode=0o700)
    if identity is not None:
        identity.own(folder, 0o700)
    return folder


def remove_socket_folder(data: Path) -> None:
    run = data / "run"
    if run.is_symlink():
        shutil.rmtree(run.readlink(), ignore_errors=True)
        run.unlink()
    else:
        shutil.rmtree(run, ignore_errors=True)
