"""Hundreds of readers at once, each of which keeps little: the ids that it was shown, and how it was cut.

A `Follower` checks every byte of one reader; a crowd shows what happens to many.
"""

import asyncio
import itertools
import re
from collections.abc import Callable, Sequence
from typing import cast

PATIENCE_S = 60.0
CONNECTING = 100  # at once
RETRY_S = 0.1

_DURABLE_ID = re.compile(rb"^id: ([0-9]+)$", re.MULTILINE)
_TYPE = re.compile(rb"^event: (.*)$", re.MULTILINE)


class CrowdReader:
    """Reads one session and comes back whenever it is cut, over the ports in turn.

    `seqs`: the durable events in the order in which they came. `ends`: how each connection ended.
    """

    def __init__(self, session_id: str, key: str, ports: Sequence[Callable[[], int]]) -> None:
        self.session_id = session_id
        self.seqs: list[int] = []
        self.ends: list[str] = []
        self.closed_runs = 0
        self.began = asyncio.Event()
        self._key = key
        self._ports = itertools.cycle(ports)

    @property
    def last_seq(self) -> int:
        return self.seqs[-1] if self.seqs else 0

    async def follow(self, places: asyncio.Semaphore) -> None:
        """Never ends by itself."""
        while True:
            protocol = _Protocol(self._request(), self._take)
            try:
                if await self._read(protocol, places) != 200:
                    await asyncio.sleep(RETRY_S)
            except OSError:
                await asyncio.sleep(RETRY_S)
            finally:
                await protocol.close()

    async def _read(self, protocol: "_Protocol", places: asyncio.Semaphore) -> int:
        """The status of the answer, when it is over. Raises: OSError."""
        async with places:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: protocol, "127.0.0.1", next(self._ports)())
            status = await protocol.status
        assert status in (200, 503), status
        if status == 200:
            self.began.set()
            await protocol.is_over.wait()
            self.ends.append(protocol.how)
        return status

    def _request(self) -> bytes:
        cursor = f"last-event-id: {self.last_seq}\r\n" if self.seqs else ""
        return (
            f"GET /v1/sessions/{self.session_id}/events/stream?after=0 HTTP/1.1\r\nhost: x\r\n"
            f"authorization: Bearer {self._key}\r\n{cursor}\r\n"
        ).encode()

    def _take(self, frame: bytes) -> None:
        kind = _TYPE.search(frame)
        durable = _DURABLE_ID.search(frame)
        if kind is None or durable is None:
            return
        self.seqs.append(int(durable[1]))
        is_idle = kind[1] == b"session.status_idle"
        self.closed_runs += is_idle and b"requires_action" not in frame


class Crowd:
    """Readers that follow until `leave`."""

    def __init__(self) -> None:
        self.readers: list[CrowdReader] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._places = asyncio.Semaphore(CONNECTING)

    async def join(
        self, session_ids: Sequence[str], key: str, ports: Sequence[Callable[[], int]], *, count: int
    ) -> None:
        """`count` readers, the sessions in turn; all stream when this returns."""
        joined = [
            CrowdReader(session_id, key, ports)
            for _, session_id in zip(range(count), itertools.cycle(session_ids), strict=False)
        ]
        self.readers += joined
        self._tasks += [asyncio.create_task(reader.follow(self._places)) for reader in joined]
        await self.until(lambda: all(reader.began.is_set() for reader in joined), "the crowd reads")

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        """Raises: TimeoutError; whatever a reader has failed with."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not is_true():
                    for task in self._tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise TimeoutError(f"{what}: not within {PATIENCE_S:.0f} s") from error

    async def has_read(self, ends: dict[str, int]) -> None:
        """Returns when every reader is at the end of its log, having missed and repeated nothing."""
        await self.until(
            lambda: all(reader.last_seq >= ends[reader.session_id] for reader in self.readers),
            "all has been read",
        )
        for reader in self.readers:
            assert reader.seqs == list(range(1, ends[reader.session_id] + 1))
            assert "clean" not in reader.ends  # it would look like the end of the stream

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Protocol(asyncio.Protocol):
    """One connection: takes the chunks apart, and tells each frame."""

    def __init__(self, request: bytes, take: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self.status: asyncio.Future[int] = loop.create_future()
        self.is_over = asyncio.Event()
        self.how = ""
        self._request = request
        self._take = take
        self._raw = b""
        self._text = b""
        self._is_clean = False
        self._transport: asyncio.Transport | None = None

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            await self.is_over.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._raw += data
        if not self.status.done():
            head, end, rest = self._raw.partition(b"\r\n\r\n")
            if not end:
                return
            self.status.set_result(int(head.split(b" ", 2)[1]))
            self._raw = rest
        while self._take_chunk():
            pass
        *frames, self._text = self._text.split(b"\n\n")
        for frame in frames:
            self._take(frame)

    def _take_chunk(self) -> bool:
        size_text, end, rest = self._raw.partition(b"\r\n")
        size = int(size_text, 16) if end else 0
        if not end or len(rest) < size + 2:
            return False
        self._is_clean = size == 0
        self._text += rest[:size]
        self._raw = rest[size + 2 :]
        return size > 0

    def connection_lost(self, error: Exception | None) -> None:
        if not self.status.done():
            self.status.set_exception(error or ConnectionResetError("closed before an answer"))
        self.how = "reset" if error is not None else "clean" if self._is_clean else "cut"
        self.is_over.set()
