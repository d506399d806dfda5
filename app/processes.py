"""Child processes that cannot outlive us.

On Linux a child gets a signal from the kernel when the thread that made it ends, so children are made by the
main thread only: a child made by a pool thread would be stopped as soon as that thread is done.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Become = Callable[[], None]
"""Changes the user of the process that calls it; raises OSError."""


def spawn(
    argv: Sequence[str],
    *,
    death_signal: signal.Signals,
    log: IO[bytes] | None = None,
    become: Become | None = None,
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
        preexec_fn=_before_exec(death_signal, become),  # noqa: PLW1509  (supervisors have one thread)
    )


def run_to_end(
    argv: Sequence[str],
    *,
    become: Become | None,
    environment: Mapping[str, str],
    stdin: bytes = b"",
    cwd: Path,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a short command; both outputs are in `stdout`. It is killed when we die."""
    return subprocess.run(
        argv,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        cwd=cwd,
        check=False,
        preexec_fn=_before_exec(signal.SIGKILL, become),
    )


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


def _before_exec(death_signal: signal.Signals, become: Become | None) -> Callable[[], None]:
    parent_id = os.getpid()

    def prepare() -> None:
        if become is not None:
            become()
        # After the change of user: that change clears the death signal.
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent_id:
            os._exit(1)  # the parent died before the kernel knew whom to tell

    return prepare
