"""Ends background tasks for sure."""

import asyncio

AGAIN_S = 0.1


async def end(*tasks: "asyncio.Task[None]") -> list[Exception]:
    """Cancels `tasks` until each of them has ended; what they failed with.

    Once is not enough: redis-py writes under `asyncio.wait_for`, which in Python 3.11 loses a cancel that
    comes in the moment that the write is done. A loop around it would then go on for ever.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_S)
    failures = [task.exception() for task in tasks if not task.cancelled()]
    return [failure for failure in failures if isinstance(failure, Exception)]
