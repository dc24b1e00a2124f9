"""Translation of errors of object stores: what failed, where, why, and what to do."""

from __future__ import annotations

import re

from lmcache_async.errors import TierError, TierUnavailableError

_STATUS = re.compile(r"status code: (\d{3})[^:]*:?")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_QUERY = re.compile(r"\?[^\s\"'<>]*")
_MAX_LENGTH = 300

_REFUSED = (
    "see whether the credentials are right and may read, write, delete and list there;"
    " without the right to list, some stores refuse what they do not have"
)
_NO_BUCKET = "there is no such bucket: create it, or see whether url, region and endpoint are right"
_REDIRECTED = "the bucket is in another region or at another endpoint: set region and endpoint to its own"


def reason(error: BaseException) -> str:
    """Return the cause in one line, without the client's debug text and without queries with signatures."""
    text = str(error).split("\n\nDebug source", 1)[0]
    status = status_of(error)
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if status is not None:
        said = [match[1].strip() for match in (code, message) if match]
        text = ": ".join([f"HTTP {status}", *said])
    else:
        text = text.rsplit(" - ", 1)[-1]
    text = " ".join(_QUERY.sub("", text).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the response; None if there was no response."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def translated(error: BaseException, what: str) -> TierError:
    """Return the TierError for an error of the client.

    Args:
        error: The client's error.
        what: The failed operation and its place, for the message.
    """
    status = status_of(error)
    text = f"cannot {what}: {reason(error)}"
    if status in {401, 403}:
        return TierError(f"{text}; {_REFUSED}")
    if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
        return TierError(f"{text}; {_NO_BUCKET}")
    if status in {301, 307, 400}:
        return TierError(f"{text}; {_REDIRECTED}")
    return TierUnavailableError(text)
