"""Options of the disk tier."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from lmcache_async.config.values import Count, Flag, FlagText, Size, Wait, expand_home, parse_flag
from lmcache_async.tiers.base import TierConfig


def parse_path(value: object) -> Path:
    """A path, plain or as a `file://` URL."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected a path, plain or as file:///path")
    text = value.strip()
    if not text.startswith("file:"):
        return expand_home(text)
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
        quarantine: Whether records found broken are moved to the folder `quarantine`, not deleted.
        max_quarantine_bytes: Most bytes of that folder, beside `max_bytes`; the oldest go first.
        scrub_interval_s: Seconds between the end of one reading of all records and the start of the
            next, in the background, that proves them; 0 is never.
        scrub_max_bytes_per_s: Most bytes a second that are read for that.
        subdirectory: Appended to `path`. The engine sets `rank-<n>` when there are several ranks, `dp<n>` in
            data-parallel replicas but the first, and `dp<n>-rank-<n>` with both.
    """

    path: Annotated[Path, BeforeValidator(parse_path)]
    max_bytes: Size
    odirect: Annotated[
        Literal["auto"] | bool,
        BeforeValidator(parse_direct, json_schema_input_type=Literal["auto"] | FlagText | bool),
    ] = "auto"
    io_threads: Annotated[Count, Field(le=64)] = 4
    fsync: Flag = False
    quarantine: Flag = False
    max_quarantine_bytes: Size = 1 << 30
    scrub_interval_s: Wait = 0.0
    scrub_max_bytes_per_s: Size = 32 << 20
    subdirectory: Annotated[str, AfterValidator(check_subdirectory)] = ""

    @property
    def root(self) -> Path:
        return self.path / self.subdirectory
