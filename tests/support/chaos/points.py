"""Fault points inside a process: at an armed passage it asks the harness, and stands still until it is told.

What happens at a point is the harness's to do, which can kill or stop the process while it asks.
"""

import socket
import threading
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import Struct

SOCKET = "control.sock"
ARMED = "armed.json"
REQUESTS = "requests.log"
ANSWER_S = 30.0

COMMIT_KINDS = ("open_request", "answer", "tool_result", "close", "wait", "memory", "other")
WORKER_POINTS = (
    *(f"commit.{kind}.{place}" for kind in COMMIT_KINDS for place in ("before", "inside", "after")),
    *("claim.before", "claim.inside", "claim.after", "renewal.before", "renewal.inside"),
    *("publish.before", "publish.after", "request.before", "request.streaming", "request.after"),
    *("tool.before", "tool.after", "sweep.before", "sweep.inside", "handover.inside"),
)
API_POINTS = ("admit.before", "admit.inside", "announce.before", "announce.after", "wake.before")


class ArmedFault(Struct, frozen=True, kw_only=True):
    """`id` fires at the `nth` passage of `point` in one process; `member` None: in any of them."""

    id: int
    point: str
    nth: int
    member: str | None = None


class Points:
    """The points of this process, which the harness knows as `member`."""

    def __init__(self, folder: Path, member: str) -> None:
        self._socket = str(folder / SOCKET)
        self._armed = folder / ARMED
        self._member = member
        self._passages: Counter[int] = Counter()
        self._lock = threading.Lock()  # the lease is renewed by a thread of its own

    def passed(self, point: str) -> str:
        """What the harness says about this passage: `go`, or something that the point itself must do."""
        with self._lock:
            due = self._due(point)
        return "go" if due is None else self._ask(due)

    def _due(self, point: str) -> int | None:
        found = None
        for fault in self._read():
            if fault.point == point and fault.member in {None, self._member}:
                self._passages[fault.id] += 1
                if self._passages[fault.id] == fault.nth:
                    found = fault.id
        return found

    def _read(self) -> list[ArmedFault]:
        # Each time: two changes of a file may bear the same time.
        return msgspec.json.decode(self._armed.read_bytes(), type=list[ArmedFault])

    def _ask(self, fault_id: int) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(self._socket)
            connection.sendall(f"{fault_id} {self._member}\n".encode())
            return connection.recv(64).decode().strip() or "go"
