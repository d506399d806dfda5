"""What clients send into a session: the events they may POST, checked and turned into admissions.

Shared types ignore unknown fields, since they are also read from storage; the structs here refuse them.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from agents.config import RunOverrides
from agents.events import CancelMode, Confirmation, Delivery, UserContent
from app.auth import Principal
from app.errors import InvalidField, NotAvailable
from app.resources import Resources
from app.routes.override_inputs import Overridable, to_overrides
from db.admission import AnswerInput, ConfirmationInput, Input, InterruptInput, PromptInput, SystemInput
from db.agents import get_agent
from db.engine import Transaction
from db.ids import parse_id
from db.sessions import get_session
from db.transcript import require_files
from providers.types import Base64Source, FileSource, ImageBlock, TextBlock, UrlSource

MAX_EVENTS = 50  # of one POST: they are stored under one lock
MAX_BLOCKS = 200
IMAGE_MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")


class TextParam(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str


class Base64Param(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="base64", tag_field="type"
):
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    data: Annotated[str, Meta(min_length=1, description="The image in standard base64.")]


class UrlParam(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="url", tag_field="type"):
    url: Annotated[str, Meta(pattern="^https?://[^/]", max_length=8192)]


class FileParam(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="file", tag_field="type"):
    file_id: Annotated[str, Meta(max_length=64, description="A file of yours, from `/v1/files`.")]


class ImageParam(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="image", tag_field="type"
):
    """An image, for models that can see."""

    source: Base64Param | UrlParam | FileParam


ContentParam = TextParam | ImageParam
Content = Annotated[tuple[ContentParam, ...], Meta(min_length=1, max_length=MAX_BLOCKS)]

_LATER = Meta(description="Not available yet: refused with `not_available`.")


DELIVERY = Meta(
    description="What it does to a busy session. Null, `queue`: a run of its own follows. `steer`: the run in"
    " progress takes it up before its next request. `interrupt`: stops the run and takes its place. `reject`:"
    " refused with 409 `session_busy`."
)
CANCEL_MODE = Meta(
    description="`now`: at once. `after_turn`: when the model request in progress and its calls are done."
)


class UserMessageParam(
    Overridable, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="user.message", tag_field="type"
):
    """A prompt. Those of one request go together: they have one delivery, and one run takes them up.

    What it changes of the agent holds for its run, and stands on the first prompt of the request.
    """

    content: Content
    delivery: Annotated[Delivery | None, DELIVERY] = None


class UserInterruptParam(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="user.interrupt", tag_field="type"
):
    """Stops the open run; what it has is kept. Prompts that wait behind it stay."""

    mode: Annotated[CancelMode, CANCEL_MODE] = "now"
    reason: Annotated[str, Meta(max_length=1000)] | None = None
    session_thread_id: Annotated[Any, _LATER] = UNSET


class UserCustomToolResultParam(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="user.custom_tool_result",
    tag_field="type",
):
    """The result of a tool that you run. The same answer again is taken as a repetition, another refused."""

    custom_tool_use_id: Annotated[
        str, Meta(max_length=64, description="The id of the `agent.custom_tool_use` event.")
    ]
    content: Annotated[tuple[ContentParam, ...], Meta(max_length=MAX_BLOCKS)] = ()
    is_error: bool | None = None


class UserToolConfirmationParam(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="user.tool_confirmation",
    tag_field="type",
):
    """Allows or denies a call that waits for approval. The same answer again is taken as a repetition."""

    tool_use_id: Annotated[str, Meta(max_length=64, description="The id of the `agent.tool_use` event.")]
    result: Confirmation
    deny_message: (
        Annotated[str, Meta(max_length=10_000, description="Why, for the model. Only with `deny`.")] | None
    ) = None


class ToolResultParam(Struct, frozen=True, tag="user.tool_result", tag_field="type"):
    """Not available: refused with `not_available`."""


class DefineOutcomeParam(Struct, frozen=True, tag="user.define_outcome", tag_field="type"):
    """Not available: refused with `not_available`."""


class SystemMessageParam(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="system.message", tag_field="type"
):
    """Instructions for the conversation from here on. It starts no run: the next request takes it up.

    `section`: its name; a later message of the same section replaces it.
    """

    content: Annotated[tuple[TextParam, ...], Meta(min_length=1, max_length=MAX_BLOCKS)]
    section: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class CustomMessageParam(Struct, frozen=True, tag="custom.message", tag_field="type"):
    """Not available yet: refused with `not_available`."""


EventParam = (
    UserMessageParam
    | UserInterruptParam
    | UserCustomToolResultParam
    | UserToolConfirmationParam
    | ToolResultParam
    | DefineOutcomeParam
    | SystemMessageParam
    | CustomMessageParam
)


def to_inputs(
    events: Sequence[EventParam], resources: Resources, *, field: str = "events"
) -> tuple[Input, ...]:
    """What is to be admitted, in order. `field` names the list in errors.

    Raises: NotAvailable, InvalidField.
    """
    inputs = tuple(_input(event, resources, f"{field}[{index}]") for index, event in enumerate(events))
    deliveries: set[Delivery] = set()
    for index, item in enumerate(inputs):
        if isinstance(item, PromptInput):
            if deliveries and item.overrides != RunOverrides():
                name = f"{field}[{index}]"
                raise InvalidField(
                    f"{name}: what holds for the run stands on the first prompt of a request.", field=name
                )
            deliveries.add(item.delivery or "queue")
            if len(deliveries) > 1:
                name = f"{field}[{index}].delivery"
                raise InvalidField(
                    f"{name}: prompts of one request go together and need one delivery.", field=name
                )
    return inputs


def _input(event: EventParam, resources: Resources, field: str) -> Input:
    match event:
        case UserMessageParam():
            overrides = to_overrides(event, resources, field=f"{field}.")
            content = to_prompt(event.content, field=f"{field}.content")
            return to_prompt_input(content, event.delivery, overrides, field=f"{field}.")
        case UserInterruptParam():
            if event.session_thread_id not in (UNSET, None):
                raise NotAvailable("There are no session threads.", field=f"{field}.session_thread_id")
            return InterruptInput(mode=event.mode, reason=event.reason)
        case SystemMessageParam():
            return _system(event, field)
        case UserCustomToolResultParam():
            return AnswerInput(
                custom_tool_use_id=event.custom_tool_use_id,
                content=to_content(event.content, field=f"{field}.content"),
                is_error=bool(event.is_error),
            )
        case UserToolConfirmationParam():
            if event.deny_message is not None and event.result != "deny":
                message = f"{field}.deny_message: goes with `deny` only."
                raise InvalidField(message, field=f"{field}.deny_message")
            return ConfirmationInput(
                tool_use_id=event.tool_use_id, result=event.result, deny_message=event.deny_message or None
            )
        case _:
            raise NotAvailable(
                f"Events of type `{event.__struct_config__.tag}` are not available.", field=f"{field}.type"
            )


def _system(event: SystemMessageParam, field: str) -> SystemInput:
    if not any(block.text.strip() for block in event.content):
        raise InvalidField(f"{field}.content: the message is empty.", field=f"{field}.content")
    return SystemInput(
        content=tuple(TextBlock(text=block.text) for block in event.content), section=event.section
    )


def to_prompt_input(
    content: tuple[UserContent, ...], delivery: Delivery | None, overrides: RunOverrides, *, field: str = ""
) -> PromptInput:
    """A prompt with what it changes for its run. Raises: InvalidField, when it has no run of its own."""
    if overrides != RunOverrides():
        if delivery == "steer":
            name = f"{field}delivery"
            raise InvalidField(
                f"{name}: `steer` joins a run in progress, which nothing can be changed of.", field=name
            )
        delivery = delivery or "queue"  # it is no answer to a question
    return PromptInput(content=content, delivery=delivery, overrides=overrides)


def to_prompt(content: Sequence[ContentParam], *, field: str) -> tuple[UserContent, ...]:
    """As `to_content`, for what a user says: it must say something. Raises: InvalidField."""
    blocks = to_content(content, field=field)
    if not any(isinstance(block, ImageBlock) or block.text.strip() for block in blocks):
        raise InvalidField(f"{field}: the prompt is empty.", field=field)
    return blocks


def to_content(content: Sequence[ContentParam], *, field: str) -> tuple[UserContent, ...]:
    """The blocks as they are stored. Raises: InvalidField, for an image that is not base64."""
    return tuple(_block(block, f"{field}[{index}]") for index, block in enumerate(content))


def _block(block: ContentParam, field: str) -> UserContent:
    if isinstance(block, TextParam):
        return TextBlock(text=block.text)
    match block.source:
        case Base64Param(media_type=media_type, data=data):
            try:
                base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError) as error:
                raise InvalidField(
                    f"{field}.source.data: not base64.", field=f"{field}.source.data"
                ) from error
            return ImageBlock(source=Base64Source(media_type=media_type, data=data))
        case UrlParam(url=url):
            return ImageBlock(source=UrlSource(url=url))
        case FileParam(file_id=file_id):
            return ImageBlock(source=FileSource(file_id=file_id))


async def require_image_files(tx: Transaction, inputs: Iterable[Input]) -> None:
    """Returns when every file that an image names is this tenant's. Raises: NotFound."""
    sources = [image.source for item in inputs for image in images_of(item)]
    await require_files(tx, [source.file_id for source in sources if isinstance(source, FileSource)])


async def require_sight(
    resources: Resources, inputs: Iterable[Input], find_model: Callable[[], Awaitable[str]]
) -> None:
    """Returns when the model can see the images of prompts, if there are any.

    Images in answers to tool calls may go to a model that cannot see: it is told what was left out.
    Raises: InvalidField, UnknownModel.
    """
    seen = [item for item in inputs if isinstance(item, PromptInput)]
    if not any(images_of(item) for item in seen):
        return
    chosen = seen[0].overrides.model
    model = await find_model() if chosen is None else chosen.id
    if not resources.providers.capabilities(model).images:
        await resources.providers.discover()  # its server may know better than the tables
    if not resources.providers.capabilities(model).images:
        raise InvalidField(f"The model {model!r} cannot see images; use one that can, or send text.")


def images_of(item: Input) -> list[ImageBlock]:
    blocks = item.content if isinstance(item, PromptInput | AnswerInput) else ()
    return [block for block in blocks if isinstance(block, ImageBlock)]


async def model_of_session(resources: Resources, principal: Principal, session_id: str) -> str:
    """The name of the model that the session runs with. Raises: NotFound."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        return (await get_session(tx, session_id)).agent.model.id


async def model_of_agent(
    resources: Resources, principal: Principal, agent_id: str, version: int | None = None
) -> str:
    """The name of the model of an agent. Raises: NotFound."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        agent = await get_agent(tx, parse_id("agent", agent_id), version=version)
    return agent.config.model.id
