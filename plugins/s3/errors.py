"""What an object store's failures are to us: what failed, where, why, and what to do."""

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
    """The cause in one line, without the client's own debug text and without queries, which may be signed."""
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
    """The HTTP status that the store answered with; None where it did not answer."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def translated(error: BaseException, what: str) -> TierError:
    """The error to raise instead.

    Args:
        error: The client's.
        what: What could not be done, and where.
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
