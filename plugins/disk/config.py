"""Options of the disk tier."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from lmcache_async.config.values import Count, Flag, Size, parse_flag
from lmcache_async.tiers.base import TierConfig


def parse_path(value: object) -> Path:
    """A path, plain or as a `file://` URL."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected a path, plain or as file:///path")
    text = value.strip()
    if not text.startswith("file:"):
        return Path(text).expanduser()
    url = urlsplit(text)
    if url.netloc not in {"", "localhost"} or not url.path.startswith("/") or url.query or url.fragment:
        raise ValueError("expected a file URL without a host, such as file:///var/cache/kv")
    return Path(unquote(url.path))


def parse_direct(value: object) -> object:
    """`auto`, or a boolean as people write it."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return parse_flag(value)
    except ValueError:
        raise ValueError("expected auto, true or false") from None


def check_subdirectory(value: str) -> str:
    """It stays inside `path`."""
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("expected a relative path without '..'")
    return value


class DiskConfig(TierConfig):
    """Options of the disk tier.

    Attributes:
        path: The directory; made if it is not there. One process at a time owns it.
        max_bytes: Most bytes of all record files together, those being written included.
        odirect: Whether reads and writes go around the page cache; `auto`: where the file system can.
        io_threads: Records read or written at the same time.
        fsync: Whether a put ends only when the record would survive a power failure. Without it, one
            that did not survive is found out by its checksum and is a miss.
        subdirectory: Appended to `path`; the engine sets `rank-<n>` when there are several ranks.
    """

    path: Annotated[Path, BeforeValidator(parse_path)]
    max_bytes: Size
    odirect: Annotated[Literal["auto"] | bool, BeforeValidator(parse_direct)] = "auto"
    io_threads: Annotated[Count, Field(le=64)] = 4
    fsync: Flag = False
    subdirectory: Annotated[str, AfterValidator(check_subdirectory)] = ""

    @property
    def root(self) -> Path:
        return self.path / self.subdirectory
