"""A tool by which the model itself asks for a memory of the conversation."""

from tools.schema import tool


@tool(label="Make room", idempotent=True)
async def compact_memory() -> str:
    """Replace the older part of this conversation by notes, so that there is room for what is to come.

    Use it when a piece of work is done and its details are not needed any more. The notes are written before
    your next message.
    """
    return "The notes are written now."
