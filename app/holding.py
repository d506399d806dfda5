"""A hold on a session, seen from the loop: where its steps go and what comes in."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from agents.errors import HoldLost, InboxChanged
from agents.log import LoggedEvent
from agents.types import CloseRun, InboxView, Preview, Step, WaitForClient
from app.streaming.outgoing import SessionPublisher
from db.engine import Database, Transaction
from db.errors import DatabaseError
from db.holds import Hold
from db.ids import to_uuid
from db.steps import Fence, find_stored, still_holds, store_step
from db.work import load_inbox

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0

_log = logging.getLogger(__name__)


class DatabaseClock:
    """The database's time, carried on from a moment that it told us by a clock that only goes forward."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self._read_s = time.monotonic()

    def now(self) -> datetime:
        return self._now + timedelta(seconds=time.monotonic() - self._read_s)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class HoldSink:
    """Commits the steps of one hold, one at a time, and publishes what was committed.

    `committing_since_s`: the monotonic time since when a step is being committed, its retries included.
    `has_left`: the run has been closed or waits for the client; nothing more comes from this hold.
    """

    def __init__(
        self, *, database: Database, hold: Hold, commit_no: int, last_seq: int, publisher: SessionPublisher
    ) -> None:
        self._database = database
        self._hold = hold
        self._commit_no = commit_no
        self._last_seq = last_seq
        self._publisher = publisher
        self.committing_since_s: float | None = None
        self.has_left = False

    async def commit(self, step: Step, *, seen: int | None = None) -> None:
        """See `agents.types.Sink`. An answer that got lost is looked up, so nothing is written twice."""
        self.committing_since_s = time.monotonic()
        try:
            events = await self._commit(step, seen)
        finally:
            self.committing_since_s = None
        self._commit_no += 1
        self.has_left = isinstance(step.ending, CloseRun | WaitForClient)
        for event in events:
            self._last_seq = max(self._last_seq, event.seq)
            self._publisher.event(event)

    def preview(self, preview: Preview) -> None:
        self._publisher.preview(preview)

    async def _commit(self, step: Step, seen: int | None) -> tuple[LoggedEvent, ...]:
        fence = Fence(
            session_id=self._hold.session_id,
            run_id=self._hold.run_id,
            epoch=self._hold.epoch,
            commit_no=self._commit_no,
            seen=seen,
        )
        pause_s = RETRY_FIRST_S
        while True:
            try:
                async with self._database.one_statement() as tx:
                    events = await store_step(tx, fence, step)
                if events is not None:
                    return events
                async with self._database.transaction() as tx:
                    return await self._after_refusal(tx, fence, step)
            except DatabaseError as error:
                _log.warning("a commit is tried again: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MOST_S)

    async def _after_refusal(self, tx: Transaction, fence: Fence, step: Step) -> tuple[LoggedEvent, ...]:
        """The step's events when an earlier try had got through after all. Raises: HoldLost, InboxChanged."""
        stored = await find_stored(tx, fence, step, after_seq=self._last_seq)
        if stored is not None:
            return stored
        if await still_holds(tx, fence):
            raise InboxChanged
        raise HoldLost


def _stops_now(view: InboxView) -> bool:
    return view.cancel is not None and view.cancel.mode == "now"


class HoldInbox:
    """What comes in for one hold."""

    def __init__(
        self,
        *,
        database: Database,
        hold: Hold,
        wait_for_lease: Callable[[], Awaitable[None]],
        is_draining: Callable[[], bool],
    ) -> None:
        self._database = database
        self._hold = hold
        self._wait_for_lease = wait_for_lease
        self._is_draining = is_draining
        self._signalled = asyncio.Event()
        self._is_lost = False

    async def look(self) -> InboxView:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                async with self._database.statements() as tx:
                    incoming = await load_inbox(
                        tx, to_uuid(self._hold.session_id), to_uuid(self._hold.run_id)
                    )
                break
            except DatabaseError as error:
                _log.warning("the inbox is read again: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MOST_S)
        if incoming.epoch != self._hold.epoch:
            raise HoldLost
        view = incoming.view
        if _stops_now(view):
            self._signalled.set()
        return view

    def cancel(self) -> None:
        """Somebody may have asked to stop the run: signals name a session only, and can come late."""
        self._signalled.set()

    async def cancelled(self) -> None:
        while True:
            await self._signalled.wait()
            self._signalled.clear()
            try:
                view = await self.look()
            except HoldLost:
                return  # whatever it is that this ends, its next step is refused
            if _stops_now(view):
                return

    async def may_start(self) -> bool:
        await self.until_live()
        return not self._is_draining()

    def lose(self) -> None:
        """The session is held by somebody else: nothing starts any more, whatever task is about to."""
        self._is_lost = True

    async def until_live(self) -> None:
        # A worker past its deadline starts nothing. It may be renewed late, with or without this hold.
        await self._wait_for_lease()
        if self._is_lost:
            await asyncio.Event().wait()
