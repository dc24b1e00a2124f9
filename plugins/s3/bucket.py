"""Requests for the records of one bucket, the client that sends them, and the conversion of its errors to TierError."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store
from pydantic import SecretStr

from lmcache_async.config.files import read_bounded, read_secret_file
from lmcache_async.errors import ConfigError, TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import run_shielded, wait_done
from lmcache_async.plugins.s3.config import S3Config
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, ObjectMeta
    from obstore.store import ObjectStore, S3Credential

T = TypeVar("T")

_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{30})")
_UNUSED_PREFIX = "-"  # no record has this prefix, so a list of it is short
_PAGE = 1000  # names in one response, the maximum of the stores
_MAX_CERTIFICATE_BYTES = 16 << 20
_STATUS = re.compile(r"status code: (\d{3})[^:]*:?")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_CAUSE = re.compile(
    r'(?:message|error): "([^"]*)"|InvalidCertificate\(\s*(\w+)|\b(TimedOut|IncompleteMessage|InvalidContentType)\b'
)
"""Cause of a failed request, in the client's debug text of an HttpError."""
_METADATA = re.compile(r"Error performing \w+ \S+/latest/(?:api/token|meta-data/)")
"""Request to the metadata service of a machine at AWS, which the client sends if no credentials are set."""
_QUERY = re.compile(r"\?[^\s\"'<>]*")
_MAX_LENGTH = 300

_REFUSED = (
    "check the credentials, their permissions to read, write, delete and list, and the clock of this machine;"
    " without the permission to list, some stores answer 403 for missing objects"
)
_NO_BUCKET = "the bucket does not exist: create it, or check url, region and endpoint"
_REDIRECTED = "the bucket is in another region or at another endpoint: check region and endpoint"
_BAD_REQUEST = (
    "the temporary credentials are not valid any more, or the bucket is in another region or at another endpoint: check the"
    " credentials, region and endpoint"
)
_EXPIRED = (
    "the temporary credentials are not valid any more: renew access_key_id, the secret and session_token"
)
_NO_CREDENTIALS = (
    "no credentials are set, and the machine provides none: set access_key_id and secret_key_file, or the variables"
    " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
_ADVICE = {401: _REFUSED, 403: _REFUSED, 404: _NO_BUCKET, **dict.fromkeys((301, 307, 400), _REDIRECTED)}
"""Advice for error responses, by status."""


def name_of(key: ChunkKey) -> str:
    """Return the object's name under the prefix. Stores spread the load by the 256 groups of names."""
    name = key.hex()
    return f"{name[:2]}/{name}"


class Bucket:
    """Access to one bucket. Used on one event loop.

    Every request ends within the config's `request_timeout_s`. If cancelled, a request that reads is dropped;
    a request that writes or deletes is awaited, so it has no effect after the call.
    """

    def __init__(self, config: S3Config, store: ObjectStore) -> None:
        self._store = store
        self._url = config.url
        self._at = f" at {config.endpoint}" if config.endpoint else ""
        self._timeout_s = config.request_timeout_s
        self._slots = asyncio.Semaphore(config.concurrency)
        self._lookup_slots = asyncio.Semaphore(config.concurrency)  # a lookup does not wait for queued reads

    async def check(self) -> None:
        """Raise TierError if the bucket does not exist, refuses the credentials or does not answer."""
        async with self._request(f"use {self._url}"):
            await obstore.list(self._store, prefix=_UNUSED_PREFIX, chunk_size=_PAGE).collect_async()

    async def find(self, key: ChunkKey) -> ObjectMeta | None:
        """Return the metadata of the object, with its length and version; None if it does not exist."""
        async with self._request("find", key, self._lookup_slots):
            with contextlib.suppress(FileNotFoundError):
                return await obstore.head_async(self._store, name_of(key))
        return None

    async def read(self, key: ChunkKey, max_bytes: int) -> Bytes | ObjectMeta | None:
        """Return the content of the object; its metadata if it is longer than `max_bytes`; None if it does not exist."""
        async with self._request("read", key):
            try:
                answer = await obstore.get_async(self._store, name_of(key))
            except FileNotFoundError:
                return None
            if answer.meta["size"] > max_bytes:
                return answer.meta
            return await answer.bytes_async()

    async def read_part(self, key: ChunkKey, found: ObjectMeta, start: int, stop: int) -> Bytes | None:
        """Return the bytes `start` to `stop` of the found version; None if that does not exist any more."""
        options: GetOptions = {"range": (start, stop)}
        if found["e_tag"] is not None:
            options["if_match"] = found["e_tag"]
        async with self._request("read", key):
            try:
                answer = await obstore.get_async(self._store, name_of(key), options=options)
            except (FileNotFoundError, PreconditionError):
                return None
            return await answer.bytes_async()

    async def write(self, key: ChunkKey, buffer: Buffer) -> None:
        """Put the object in one request. It exists as a whole or not at all."""
        async with self._request("write", key):
            await run_shielded(self._send(key, buffer))

    async def delete(self, key: ChunkKey) -> None:
        """Delete the object if it exists."""
        async with self._request("delete", key):
            await run_shielded(self._delete(key))

    async def delete_all(self) -> int:
        """Delete every record. Return the number of records."""
        count = 0
        async for keys in self.pages():
            async with self._request(f"delete records of {self._url}"):
                complete = await run_shielded(self._delete(*keys))
            if not complete:
                await concurrently([self.delete(key) for key in keys])
            count += len(keys)
        return count

    async def pages(self) -> AsyncIterator[list[ChunkKey]]:
        """Yield the keys of all records in batches. Objects with other names are skipped."""
        listing = obstore.list(self._store, chunk_size=_PAGE)
        while True:
            async with self._request(f"list {self._url}"):
                page = await anext(listing, None)
            if page is None:
                return
            matches = [_NAME.fullmatch(entry["path"]) for entry in page]
            yield [ChunkKey(bytes.fromhex(match[2])) for match in matches if match]

    async def _send(self, key: ChunkKey, buffer: Buffer) -> None:
        """Put the object, and wait until the client does not use the memory of the record any more.

        The client sends directly from the memory, in threads of its own, and may read it even after the put has
        returned. Meanwhile it keeps a reference to the array, so a weak reference reports when the memory is unused. The
        slab is not reused while the array exists.
        """
        loop, unused = asyncio.get_running_loop(), asyncio.Event()

        def note(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(unused.set)

        lent = [buffer.array]
        guard = weakref.ref(lent[0], note)
        try:
            await obstore.put_async(self._store, name_of(key), lent.pop(), use_multipart=False)
        finally:
            lent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await unused.wait()
        if guard() is not None:  # clients of real servers release it with their connection
            raise TierUnavailableError(
                f"the client still uses the memory of a record {self._timeout_s} s after it was put to {self._url}"
            )

    async def _delete(self, *keys: ChunkKey) -> bool:
        """Delete objects. Return False if one did not exist: most stores except S3 then delete no further ones."""
        try:
            await obstore.delete_async(self._store, list(map(name_of, keys)))
        except FileNotFoundError:
            return False
        return True

    @contextlib.asynccontextmanager
    async def _request(
        self, verb: str, key: ChunkKey | None = None, slots: asyncio.Semaphore | None = None
    ) -> AsyncIterator[None]:
        async with slots or self._slots:
            try:
                yield
            except (BaseError, OSError, ValueError) as error:
                what = verb if key is None else f"{verb} {self._url}/{name_of(key)}"
                raise tier_error(error, f"{what}{self._at}") from error


async def concurrently(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the calls concurrently and return their results in order. The first failure cancels the others.

    Not a TaskGroup: before Python 3.13, a group with a failed task leaves the calling task marked as cancelled.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task.done()]  # all of them, unless one has failed
    finally:
        for task in tasks:
            task.cancel()
        await wait_done(*tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it
        # Break the reference cycle of an error and this frame, which would keep the buffers in use.
        del task, tasks


def open_store(config: S3Config) -> ObjectStore:
    """Create a client, without connecting."""
    location = config.location
    client: Any
    further: dict[str, Any] = {}
    options: dict[str, Any] = {"skip_signature": config.anonymous}
    match location.kind:
        case "gs":
            client, file = GCSStore, config.service_account_file
            options |= {"base_url": config.endpoint, "service_account": file and str(file)}
        case "az":
            client = AzureStore
            options |= {"endpoint": config.endpoint, "account_name": config.account}
            options["account_key"] = _secret(config)
        case _:
            client, token = S3Store, config.session_token
            key_id, secret = config.access_key_id, _secret(config)
            _check_s3_values(config)
            if token is None and key_id is not None and secret is not None:
                # Without this, the client sends AWS_SESSION_TOKEN, which belongs to another key.
                further["credential_provider"] = partial(_static_credentials, key_id, secret)
            options |= {
                "endpoint": config.endpoint,
                "region": config.region,
                "access_key_id": key_id,
                "secret_access_key": secret,
                "session_token": token and token.get_secret_value(),
                "unsigned_payload": not config.sign_payload,
                "virtual_hosted_style_request": not config.path_style,
                "disable_bulk_delete": True,  # not supported by all S3-compatible stores
            }
    client_options = _client_options(config)
    try:
        store: ObjectStore = client(
            location.bucket,
            prefix=location.prefix or None,
            config={name: value for name, value in options.items() if value is not None},
            client_options=client_options,
            # The retry layer retries, so the client does not.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=config.request_timeout_s)},
            **further,
        )
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f"{config.url}: {reason(error)}") from None  # its text may contain a secret
    return store


def _check_s3_values(config: S3Config) -> None:
    """Raise ConfigError for an option or a variable with a control character, with which the client panics."""
    texts = {
        name: getattr(config, name) for name in ("access_key_id", "secret_key", "session_token", "region")
    }
    values = {name: text for name, text in texts.items() if text is not None}
    variables = [] if config.access_key_id else ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"]
    variables += [] if config.region else ["REGION", "DEFAULT_REGION"]
    values |= {f"the variable AWS_{name}": os.environ.get(f"AWS_{name}", "") for name in variables}
    for name, value in values.items():
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if not text.isprintable():
            raise ConfigError(
                f"{config.url}: {name} contains a line break or another control character; remove it"
            )


def _static_credentials(key_id: str, secret: str) -> S3Credential:
    return {"access_key_id": key_id, "secret_access_key": secret, "token": None, "expires_at": None}


def _client_options(config: S3Config) -> dict[str, Any]:
    options: dict[str, Any] = {
        "allow_http": config.allow_http,
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "timeout": timedelta(seconds=config.request_timeout_s),
        "user_agent": "lmcache-async",
    }
    if config.ca_file is not None:
        try:
            content, _ = read_bounded(config.ca_file, _MAX_CERTIFICATE_BYTES)
        except OSError as error:
            raise ConfigError(f"ca_file: {config.ca_file} cannot be read: {error.strerror}") from None
        options["root_certificate"] = content.decode("utf-8", "replace")
    return options


def _secret(config: S3Config) -> str | None:
    if config.secret_key is not None:
        return config.secret_key.get_secret_value()
    if config.secret_key_file is None:
        return None
    return read_secret_file(config.secret_key_file, "secret_key_file").decode("utf-8", "replace").strip()


def reason(error: BaseException) -> str:
    """Return the cause in one line, without queries with signatures; of the client's debug text, only the cause."""
    text, _, debug = str(error).partition("\n\nDebug source")
    status = status_of(error)
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if status is not None:
        said = [match[1].strip() for match in (code, message) if match]
        text = ": ".join([f"HTTP {status}", *said])
    else:
        text = text.rsplit(" - ", 1)[-1].strip()
        causes = ["".join(groups) for groups in _CAUSE.findall(debug.partition("HttpError")[2])]
        text = ": ".join([text, *causes[-1:]])
    text = " ".join(_QUERY.sub("", text).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the response; None if there was no response."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def tier_error(error: BaseException, what: str) -> TierError:
    """Return the TierError for an error of the client while it tried to do `what`."""
    status = status_of(error)
    if status is None and isinstance(error, FileNotFoundError):
        status = 404
    elif "redirect without LOCATION" in str(error):
        status = 301
    text = f"cannot {what}: {reason(error)}"
    code = _CODE.search(str(error))
    match code and code[1]:  # of responses with status 400
        case "ExpiredToken" | "InvalidToken":
            return TierError(f"{text}; {_EXPIRED}")
        case "RequestTimeout":  # the upload was too slow
            return TierUnavailableError(text)
        case None if status == 400:  # the answer to a lookup has no code
            return TierError(f"{text}; {_BAD_REQUEST}")
    if _METADATA.search(str(error)):
        return TierUnavailableError(f"{text}; {_NO_CREDENTIALS}")
    return TierError(f"{text}; {_ADVICE[status]}") if status in _ADVICE else TierUnavailableError(text)
