"""`/v1/files`: uploads, by multipart form or as the raw body."""

import hashlib
import mimetypes
import re
from datetime import datetime
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal
from urllib.parse import quote

from litestar import Response, delete, get, post
from litestar.datastructures import UploadFile
from litestar.di import NamedDependency
from litestar.enums import RequestEncodingType
from litestar.exceptions import HTTPException
from litestar.params import FromPath, QueryParameter
from msgspec import Meta, Struct

from app.auth import Principal
from app.errors import InvalidField, InvalidRequest, MediaTypeRefused, NotAvailable
from app.http_json import ApiRequest, check_no_encoding
from app.idempotency import once
from app.pagination import Page, PageQuery, both_forms, make_page
from app.resources import Resources
from db import files
from db.files import StoredFile
from db.ids import parse_id, public
from providers.cleaning import clean_text
from providers.types import JsonObject

MAX_NAME = 255
MAX_IDS = 100
DEFAULT_MEDIA_TYPE = "application/octet-stream"
_MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]{1,60}/[a-z0-9!#$&^_.+-]{1,60}")

FileName = Annotated[
    str | None,
    QueryParameter(name="filename", max_length=MAX_NAME, description="Name of a file sent as the raw body."),
]
Ids = Annotated[
    list[str] | None, QueryParameter(name="ids", max_items=MAX_IDS, description="Only these files.")
]
BracketIds = Annotated[
    list[str] | None, QueryParameter(name="ids[]", max_items=MAX_IDS, description="The same as `ids`.")
]
ScopeId = Annotated[
    str | None, QueryParameter(name="scope_id", description="Only files of this session, by its id.")
]

UPLOAD: JsonObject = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file"],
            "properties": {"file": {"type": "string", "contentMediaType": DEFAULT_MEDIA_TYPE}},
        }
    },
    DEFAULT_MEDIA_TYPE: {"schema": {"type": "string", "contentMediaType": DEFAULT_MEDIA_TYPE}},
}
CONTENT: JsonObject = {"*/*": {"schema": {"type": "string", "contentMediaType": DEFAULT_MEDIA_TYPE}}}


class FileScope(Struct, frozen=True, kw_only=True):
    """The session that a file belongs to."""

    type: Literal["session"] = "session"
    id: str


class FileView(Struct, frozen=True, kw_only=True):
    """A file without its bytes, which are at `/v1/files/{id}/content`."""

    id: str
    type: Literal["file"] = "file"
    filename: str
    mime_type: str
    size_bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(description="Of the content, in hexadecimal.")]
    downloadable: bool = True
    scope: FileScope | None
    created_at: datetime


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["file_deleted"] = "file_deleted"


class Upload(Struct, frozen=True, kw_only=True):
    """A file as it arrived."""

    name: str
    media_type: str
    content: bytes


@post("/v1/files", tags=["Files"], opt={"request_content": UPLOAD})
async def upload_file(
    request: ApiRequest,
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    filename: FileName = None,
) -> FileView:
    """Stores a file: the part `file` of a multipart form, or the whole body."""
    upload = await _read_upload(request, filename)
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            file_id = await files.create_file(
                tx, name=upload.name, media_type=upload.media_type, content=upload.content
            )
            return {"file_id": public("file", file_id)}

        made = await once(tx, request, make, content=_fingerprint(upload))
        return view_file(await files.get_file(tx, parse_id("file", made["file_id"])))


@get("/v1/files", tags=["Files"])
async def list_files(  # noqa: PLR0917 (injected by name)
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    page_query: NamedDependency[PageQuery],
    scope_id: ScopeId = None,
    ids: Ids = None,
    bracket_ids: BracketIds = None,
) -> Page[FileView]:
    """Lists files, newest first."""
    wanted = both_forms(ids, bracket_ids)
    async with resources.database.transaction(principal.tenant_id) as tx:
        found = await files.list_files(
            tx,
            limit=page_query.fetch,
            before=page_query.before,
            session_id=None if scope_id is None else parse_id("sess", scope_id),
            ids=[parse_id("file", file_id) for file_id in wanted] if wanted else None,
        )
    return make_page(found, page_query, view_file, lambda file: (file.created_at, file.id))


@get("/v1/files/{file_id:str}", tags=["Files"])
async def get_file(
    file_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> FileView:
    """Reads what is known of a file."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        return view_file(await files.get_file(tx, parse_id("file", file_id)))


@get("/v1/files/{file_id:str}/content", tags=["Files"], opt={"response_content": CONTENT})
async def get_content(
    file_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> Response[bytes]:
    """Reads the bytes of a file."""
    uuid = parse_id("file", file_id)
    async with resources.database.transaction(principal.tenant_id) as tx:
        file = await files.get_file(tx, uuid)
        content = await files.get_content(tx, uuid)
    return Response(
        content,
        media_type=file.media_type,
        headers={
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
            # Whatever was uploaded, a browser must not run it as a page of this server.
            "content-security-policy": "sandbox; default-src 'none'",
            "x-content-type-options": "nosniff",
        },
    )


@delete("/v1/files/{file_id:str}", tags=["Files"], status_code=200)
async def delete_file(
    file_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> DeletedFile:
    """Deletes a file for ever."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        await files.delete_file(tx, parse_id("file", file_id))
    return DeletedFile(id=file_id)


ROUTES = [upload_file, list_files, get_file, get_content, delete_file]


def view_file(file: StoredFile) -> FileView:
    """A file as clients read it."""
    return FileView(
        id=public("file", file.id),
        filename=file.name,
        mime_type=file.media_type,
        size_bytes=file.size_bytes,
        sha256=file.sha256.hex(),
        scope=None if file.session_id is None else FileScope(id=public("sess", file.session_id)),
        created_at=file.created_at,
    )


async def _read_upload(request: ApiRequest, filename: str | None) -> Upload:
    """Raises: InvalidRequest, InvalidField, NotAvailable, MediaTypeRefused, BodyTooLarge."""
    check_no_encoding(request)
    media_type, _ = request.content_type
    if media_type != RequestEncodingType.MULTI_PART:
        if media_type == RequestEncodingType.URL_ENCODED:
            raise MediaTypeRefused("Send a multipart form, or the file itself as the body.")
        return _upload(filename, media_type, await request.body())
    part = await _file_part(request)
    return _upload(filename or part.filename, part.content_type, await part.read())


async def _file_part(request: ApiRequest) -> UploadFile:
    """The only part of the form, which must be called `file`."""
    try:
        form = await request.form()
    except HTTPException as error:
        if error.status_code != 400:
            raise
        raise InvalidRequest(f"The multipart form cannot be read: {error.detail}") from error
    except (LookupError, ValueError) as error:  # a charset that there is not, or text that is not in it
        raise InvalidRequest(f"The multipart form cannot be read: {error}.") from error
    parts: list[tuple[str, Any]] = list(form.multi_items())
    for name, _ in parts:
        if name == "expires_in_seconds":
            raise NotAvailable("expires_in_seconds: files do not expire here; delete them.", field=name)
        if name != "file":
            raise InvalidField(f"{name[:80]}: there is no such field.", field=name[:80])
    if len(parts) != 1 or not isinstance(parts[0][1], UploadFile):
        raise InvalidField("file: send exactly one file in this part.", field="file")
    return parts[0][1]


def _upload(filename: str | None, media_type: str, content: bytes) -> Upload:
    name = PurePosixPath(PureWindowsPath(filename or "").name).name or "unnamed"
    if clean_text(name) != name:
        raise InvalidField("filename: NUL and lone surrogates cannot be stored.", field="filename")
    if len(name) > MAX_NAME:
        raise InvalidField(f"filename: longer than {MAX_NAME} characters.", field="filename")
    kind = media_type.lower()
    if kind in ("", DEFAULT_MEDIA_TYPE):
        kind = mimetypes.guess_type(name)[0] or DEFAULT_MEDIA_TYPE
    if not _MEDIA_TYPE.fullmatch(kind):
        raise InvalidField("mime_type: not a media type such as `text/plain`.", field="mime_type")
    return Upload(name=name, media_type=kind, content=content)


def _fingerprint(upload: Upload) -> bytes:
    """What makes two uploads the same; the boundary of a form does not."""
    return b"\0".join(
        (upload.name.encode(), upload.media_type.encode(), hashlib.sha256(upload.content).digest())
    )
