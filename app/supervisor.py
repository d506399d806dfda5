"""The runs of one worker process: takes them, works on them, drops those that it has lost."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from agents.config import AgentConfig
from agents.errors import HandOver, HoldLost
from agents.events import StopReason
from agents.hooks import NO_HOOKS, HookChain
from agents.loop import run_agent
from agents.targets import Target
from agents.types import Snapshot
from app.holding import DatabaseClock, HoldInbox, HoldSink
from app.lease import Lease, Renewal
from app.queue import WakeUps
from app.streaming.publisher import Publisher
from app.telemetry import current_run
from db.engine import Database, Transaction
from db.errors import DatabaseAway, DatabaseBusy, DatabaseError
from db.holds import Claim, Hold, claim_next
from db.ids import to_uuid
from db.snapshots import find_image, load_snapshot
from db.sweeping import Swept, fail_run, hand_over
from providers.errors import UnknownModel
from providers.registry import Registry
from providers.retry import RetryPolicy
from providers.types import Base64Source, Usage
from tools.registry import ToolRegistry

STUCK_COMMIT_S = 10.0  # a commit that takes so long while the lease is renewed will not end by itself
CLAIM_PAUSES_S = (0.005, 0.01, 0.02, 0.04, 0.08)  # an api has a session locked for milliseconds
LOAD_S = 10.0  # how long a run that was taken is tried to be read while the database is away
LOAD_PAUSE_S = 0.2
END_GRACE_S = 2.0  # for tasks to end that were cancelled at shutdown

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Active:
    """A run that this process works on. `began_s` is when its claim had been committed."""

    hold: Hold
    sink: HoldSink
    inbox: HoldInbox
    began_s: float
    task: asyncio.Task[None] | None = field(default=None)


class Supervisor:
    """Keeps up to `slots` runs going. Everything it decides is decided again by the database."""

    def __init__(
        self,
        *,
        worker_id: str,
        slots: int,
        database: Database,
        publisher: Publisher,
        wake_ups: WakeUps,
        models: Registry,
        tools: ToolRegistry,
        retry: RetryPolicy,
        hooks: HookChain = NO_HOOKS,
        stuck_commit_s: float = STUCK_COMMIT_S,
    ) -> None:
        self._worker_id = worker_id
        self._slots = slots
        self._database = database
        self._publisher = publisher
        self._wake_ups = wake_ups
        self._models = models
        self._tools = tools
        self._retry = retry
        self._hooks = hooks
        self._active: dict[str, _Active] = {}  # by session
        self._stuck_commit_s = stuck_commit_s
        self._claims: dict[asyncio.Task[None], float] = {}  # those in progress, and when they began
        self._suspected: dict[Hold, float] = {}  # runs in our name without a task, and when they were seen
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self.lease: Lease | None = None

    # -- taking -----------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """True when a run may be taken now."""
        is_live = self.lease is not None and self.lease.is_live
        return is_live and not self._is_draining and len(self._active) + len(self._claims) < self._slots

    async def take(self) -> None:
        """Takes the next run, if there is room and there is one."""
        if not self.has_room():
            return
        # A task of its own, so that a caller that is cancelled does not leave a run behind that is claimed.
        claiming = self._keep(self._claim())
        self._claims[claiming] = time.monotonic()
        claiming.add_done_callback(self._claims.pop)
        await asyncio.wait([claiming])

    async def _claim(self) -> None:
        claim = None
        for pause_s in (*CLAIM_PAUSES_S, None):
            try:
                claim = await claim_next(self._database, worker_id=self._worker_id)
                break
            except DatabaseBusy:
                # Something is coming in just there; the wake-up would be lost on it.
                if pause_s is None:
                    return
                await asyncio.sleep(pause_s)
            except DatabaseError as error:
                _log.warning("no run could be taken: %s", error)
                return
        if claim is None:
            return
        if self._is_draining:
            await self._hand_over(claim.hold, takeover=False)
        else:
            self._begin(claim)

    async def take_all(self) -> None:
        """Takes runs until there is no room or nothing to take."""
        before = -1
        while self.has_room() and before != len(self._active):
            before = len(self._active)
            await self.take()

    def _begin(self, claim: Claim) -> None:
        hold = claim.hold
        voice = self._publisher.hold(session_id=hold.session_id, epoch=hold.epoch, base_seq=claim.last_seq)
        sink = HoldSink(
            database=self._database,
            hold=hold,
            commit_no=claim.commit_no,
            last_seq=claim.last_seq,
            publisher=voice,
        )
        assert self.lease is not None
        inbox = HoldInbox(
            database=self._database,
            hold=hold,
            wait_for_lease=self.lease.wait_until_live,
            is_draining=lambda: self._is_draining,
        )
        active = _Active(hold=hold, sink=sink, inbox=inbox, began_s=time.monotonic())
        self._active[hold.session_id] = active

        async def work() -> None:
            try:
                await self._work(claim, active)
            finally:
                if self._active.get(hold.session_id) is active:
                    del self._active[hold.session_id]
                    self._keep(self.take())
                await voice.aclose()

        active.task = self._keep(work())

    # -- working ----------------------------------------------------------------------------------------

    async def _work(self, claim: Claim, active: _Active) -> None:
        hold = claim.hold
        clock = DatabaseClock(claim.now)
        current_run.set({"session_id": hold.session_id, "run_id": hold.run_id})
        try:
            # After the claim's transaction: a run that cannot be read fails alone and does not block others.
            snapshot = await self._load(hold)
            await run_agent(
                snapshot,
                targets=self._targets_of(snapshot.agent, clock.now),
                tools=self._tools,
                sink=active.sink,
                inbox=active.inbox,
                clock=clock,
                load_image=lambda file_id: self._load_image(claim.tenant_id, file_id),
                retry=self._retry,
                hooks=self._hooks,
            )
        except HoldLost:
            _log.info("the hold was lost")
        except HandOver:
            await self._hand_over(hold, takeover=False)
        except (DatabaseAway, DatabaseBusy) as error:
            _log.warning("the run is given back: %s", error)
            await self._hand_over(hold, takeover=True)
        except UnknownModel as error:
            _log.error("the model cannot be used: %s", error.message)
            text = "No configured provider offers this model."
            await self._fail(hold, StopReason(type="error", code=error.code, message=text))
        except Exception:  # noqa: BLE001 - one run must not take the worker down
            _log.exception("the run failed")
            text = "The server failed while it worked on this run."
            await self._fail(hold, StopReason(type="error", code="internal_error", message=text))

    async def _load(self, hold: Hold) -> Snapshot:
        """Raises: HoldLost, DatabaseAway, DatabaseBusy."""
        until_s = time.monotonic() + LOAD_S
        while True:
            try:
                async with self._database.statements() as tx:
                    return await load_snapshot(tx, hold)
            except (DatabaseAway, DatabaseBusy):
                if time.monotonic() > until_s:
                    raise
            await asyncio.sleep(LOAD_PAUSE_S)

    def _targets_of(self, agent: AgentConfig, now: Callable[[], datetime]) -> list[Target]:
        """The agent's model and its fallback models, without those that cannot be used here any more.

        Raises: UnknownModel, for the first, when none is left.
        """
        targets: list[Target] = []
        unknown: list[UnknownModel] = []
        for name in (agent.model.id, *agent.fallback_models):
            try:
                targets.append(self._target(name, now))
            except UnknownModel as error:
                _log.warning("model is left out: %s", error)
                unknown.append(error)
        if not targets:
            raise unknown[0]
        return targets

    def _target(self, name: str, now: Callable[[], datetime]) -> Target:
        """Raises: UnknownModel."""
        model = self._models.resolve(name)

        def price(usage: Usage) -> tuple[Decimal | None, str | None]:
            found = self._models.price(model.vendor, model.model, usage, now())
            return found.cost_usd, found.source

        return Target(
            vendor=model.vendor,
            model=model.model,
            provider=model.provider,
            capabilities=model.capabilities,
            price=price,
        )

    async def _load_image(self, tenant_id: UUID, file_id: str) -> Base64Source | None:
        async with self._database.transaction(tenant_id) as tx:
            return await find_image(tx, file_id)

    async def _hand_over(self, hold: Hold, *, takeover: bool) -> None:
        await self._settle(
            lambda tx: hand_over(
                tx,
                session_id=to_uuid(hold.session_id),
                epoch=hold.epoch,
                worker_id=to_uuid(self._worker_id),
                takeover=takeover,
            )
        )

    async def _fail(self, hold: Hold, stop: StopReason) -> None:
        await self._settle(
            lambda tx: fail_run(
                tx,
                session_id=to_uuid(hold.session_id),
                epoch=hold.epoch,
                worker_id=to_uuid(self._worker_id),
                stop=stop,
            )
        )

    async def _settle(self, change: Callable[[Transaction], Awaitable[Swept | None]]) -> None:
        """Makes a change to a run from outside its loop. If it cannot be made, the sweepers will."""
        try:
            async with self._database.transaction() as tx:
                swept = await change(tx)
        except DatabaseError as error:
            _log.warning("a run was left to the sweepers: %s", error)
            return
        await announce_swept(swept, publisher=self._publisher, wake_ups=self._wake_ups)

    # -- hearing ----------------------------------------------------------------------------------------

    def cancel(self, session_id: str) -> None:
        """Somebody has asked to stop the session's run."""
        active = self._active.get(session_id)
        if active is not None:
            active.inbox.cancel()

    def renewed(self, renewal: Renewal) -> None:
        """Compares what the database says we hold with what we work on."""
        for session_id in renewal.cancelled:
            self.cancel(session_id)
        held = set(renewal.holds)
        for active in list(self._active.values()):
            # A claim that was committed after the renewal looked is not in its answer.
            if active.began_s < renewal.began_s and active.hold not in held:
                self._lose(active)
            elif self._is_stuck(active.sink, renewal):
                _log.error("a commit is stuck", extra={"run_id": active.hold.run_id})
                self._drop(active)
        self._requeue_orphans(held)

    def _lose(self, active: _Active) -> None:
        """Drops a run that is not ours any more, unless it is just ending.

        A commit under way may be the one that ends the hold; if it is not, the fence tells it.
        """
        active.inbox.lose()
        if not active.sink.has_left and active.sink.committing_since_s is None:
            _log.warning("the run was taken over", extra={"run_id": active.hold.run_id})
            self._drop(active)

    def _is_stuck(self, sink: HoldSink, renewal: Renewal) -> bool:
        """True when a commit does not end though the database has been there all the time."""
        if sink.committing_since_s is None:
            return False
        since_s = max(sink.committing_since_s, renewal.reachable_since_s)
        return time.monotonic() - since_s > self._stuck_commit_s

    def _requeue_orphans(self, held: set[Hold]) -> None:
        """Gives back runs that stand in our name and that nobody here works on.

        Seen twice in a row, since a run may have ended while the renewal looked; and not before all claims
        have ended that might be what made the hold.
        """
        working = {active.hold for active in self._active.values()}
        now_s = time.monotonic()
        suspected = {hold: self._suspected.get(hold, now_s) for hold in held - working}
        for hold in suspected.keys() & self._suspected.keys():
            if all(began_s > suspected[hold] for began_s in self._claims.values()):
                self._keep(self._hand_over(hold, takeover=True))
        self._suspected = suspected

    def _drop(self, active: _Active) -> None:
        del self._active[active.hold.session_id]
        if active.task is not None:
            active.task.cancel()

    # -- ending -----------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, lets turns reach their next commit, and hands back what is left."""
        self._is_draining = True
        working = [active.task for active in self._active.values() if active.task is not None]
        # With the claims in progress: what they take is handed back by themselves.
        if pending := [*working, *self._claims]:
            await asyncio.wait(pending, timeout=timeout_s)
        left = list(self._active.values())
        for active in left:
            self._drop(active)
        await asyncio.gather(*(self._hand_over(active.hold, takeover=False) for active in left))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_GRACE_S)

    def _keep(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """A task with an owner: what it raises is logged."""
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of the worker failed", exc_info=task.exception())


async def announce_swept(swept: Swept | None, *, publisher: Publisher, wake_ups: WakeUps) -> None:
    """Tells readers and workers what was done to a session from outside its loop."""
    if swept is None:
        return
    await publisher.announce(swept.session_id, swept.events, epoch=swept.epoch)
    if swept.is_queued:
        await wake_ups.wake()
