"""A step while it is being put together."""

from datetime import datetime
from typing import Any, TypeVar

from agents.events import Event
from agents.types import (
    CloseRun,
    Memory,
    RequestClosed,
    RequestOpened,
    RequeueRun,
    Step,
    StoredMessage,
    ToolCall,
    WaitForClient,
)
from providers.ids import new_id
from providers.types import Message

E = TypeVar("E", bound=Event)


class Draft:
    """Collects events, messages and changes of one run, all of the same moment, into one `Step`."""

    def __init__(
        self,
        *,
        session_id: str,
        run_id: str | None,
        now: datetime,
        next_position: int,
        turn: int | None = None,
    ) -> None:
        self._session_id = session_id
        self._run_id = run_id
        self._now = now
        self._turn = turn
        self._next_position = next_position
        self._events: list[Event] = []
        self._messages: list[StoredMessage] = []
        self._calls: dict[str, ToolCall] = {}
        self._applied: tuple[str, ...] = ()
        self._withdrawn: list[str] = []
        self.opened: RequestOpened | None = None
        self.closed: RequestClosed | None = None
        self.memory: Memory | None = None
        self.turns: int | None = None
        self.ending: CloseRun | WaitForClient | RequeueRun | None = None

    def event(
        self, kind: type[E], *, event_id: str | None = None, processed: bool = True, **fields: Any
    ) -> E:
        """Adds an event of `kind`; a preview's id is passed on as `event_id`.

        `processed` False leaves `processed_at` null, for what no run has taken up yet.
        """
        event = kind(
            id=event_id or new_id("evt"),
            session_id=self._session_id,
            run_id=self._run_id,
            turn=self._turn,
            created_at=self._now,
            processed_at=self._now if processed else None,
            **fields,
        )
        self._events.append(event)
        return event

    def message(self, message: Message) -> StoredMessage:
        """Appends to the transcript."""
        stored = StoredMessage(id=new_id("msg"), position=self._next_position, message=message)
        self._next_position += 1
        self._messages.append(stored)
        return stored

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to store."""
        return self.build() == Step()

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The new states so far."""
        return tuple(self._calls.values())

    def call(self, call: ToolCall) -> None:
        """Stores the new state of a call."""
        self._calls[call.id] = call

    def apply_prompts(self, prompt_ids: tuple[str, ...]) -> None:
        self._applied += prompt_ids

    def withdraw_prompt(self, prompt_id: str) -> None:
        self._withdrawn.append(prompt_id)

    def build(self) -> Step:
        return Step(
            events=tuple(self._events),
            messages=tuple(self._messages),
            calls=self.calls,
            applied=self._applied,
            withdrawn=tuple(self._withdrawn),
            opened=self.opened,
            closed=self.closed,
            memory=self.memory,
            turns=self.turns,
            ending=self.ending,
        )
