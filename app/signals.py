"""Waiting for signals in the main thread, without doing any work inside a signal handler."""

import contextlib
import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Self

STOPPING = frozenset({signal.SIGTERM, signal.SIGINT})


class SignalInbox:
    """Collects SIGTERM, SIGINT and SIGCHLD while the block runs; none is lost between two waits."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOPPING, signal.SIGCHLD):
            self._previous[number] = signal.signal(number, _ignore)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float | None, *also: int) -> frozenset[signal.Signals]:
        """The signals since the last call; returns early when a descriptor in `also` is readable."""
        select.select([self._reader.fileno(), *also], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            return frozenset(signal.Signals(number) for number in self._reader.recv(4096))
        return frozenset()


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has told already."""
