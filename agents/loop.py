"""The agent loop: where a run stands follows from its transcript and its calls, and decides what comes next.

Going on after a crash is the same code as going on: the snapshot is all there is.
"""

from collections.abc import Sequence

from agents.compaction import Compaction
from agents.errors import Stopped
from agents.events import StopReason
from agents.finishing import finish_turn
from agents.hooks import NO_HOOKS, HookChain
from agents.progress import Progress
from agents.requests import ImageLoader, ModelRequests
from agents.stop_watch import StopWatch
from agents.targets import Target, Targets
from agents.tool_calls import ToolCalls
from agents.toolbox import Toolbox
from agents.types import Clock, Inbox, Sink, Snapshot
from providers.retry import RetryPolicy
from tools.registry import ToolRegistry


async def run_agent(
    snapshot: Snapshot,
    *,
    targets: Sequence[Target],
    tools: ToolRegistry,
    sink: Sink,
    inbox: Inbox,
    clock: Clock,
    load_image: ImageLoader,
    retry: RetryPolicy,
    hooks: HookChain = NO_HOOKS,
) -> None:
    """Works on a run until it is closed or waits for the client.

    `targets`: the model, then those that take over when it fails for good, at least one.
    Safe to call again with a newer snapshot after any interruption: finished calls are never repeated.
    Raises: HoldLost (write nothing more), HandOver (give the run back to the queue).
    """
    async with StopWatch(inbox=inbox, clock=clock, deadline_at=snapshot.deadline_at) as stop:
        progress = Progress(snapshot, sink=sink, inbox=inbox, clock=clock, stop=stop, hooks=hooks)
        toolbox = Toolbox(snapshot.agent, tools)
        calls = ToolCalls(progress=progress, toolbox=toolbox, stop=stop)
        models = Targets(
            targets,
            needs_tools=bool(toolbox.specs()),
            needs_output_schema=progress.agent.output_schema is not None,
        )
        compaction = Compaction(progress=progress, stop=stop, targets=models, toolbox=toolbox, retry=retry)
        requests = ModelRequests(
            progress=progress,
            stop=stop,
            targets=models,
            toolbox=toolbox,
            calls=calls,
            compaction=compaction,
            retry=retry,
            load_image=load_image,
        )
        try:
            await stop.guard(progress.tell("run_start"))
            while not progress.has_left:
                await _take_turn(progress, requests, calls, compaction)
        except Stopped:
            # Between two pieces of work. Those that have something to keep close the run themselves.
            await progress.close_stopped()


async def _take_turn(
    progress: Progress, requests: ModelRequests, calls: ToolCalls, compaction: Compaction
) -> None:
    """One decision: settle the open calls, make a memory, ask the model, or close."""
    if progress.calls:
        await calls.settle()
        if not progress.has_left:
            await finish_turn(progress)
    elif progress.stops_after_turn:
        await progress.close_stopped()
    elif progress.expects_answer and progress.turns >= progress.agent.max_turns:
        text = f"The run made {progress.turns} model requests, its limit."
        await progress.close(StopReason(type="max_turns", message=text))
    elif (trigger := compaction.trigger) is not None:
        await compaction.run(trigger)
    elif not progress.expects_answer:
        await progress.end_turn()
    else:
        await requests.next_message()
