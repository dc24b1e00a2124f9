"""Options of the disk tier."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from lmcache_async.config.values import Count, Flag, FlagText, Size, Wait, expand_home, parse_flag
from lmcache_async.tiers.base import TierConfig


def parse_path(value: object) -> Path:
    """Parse a plain path or a `file://` URL."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected a path, plain or as file:///path")
    text = value.strip()
    if not text.startswith("file:") and "://" not in text:
        return expand_home(text)
    try:
        url = urlsplit(text)
        is_right = url.scheme == "file" and url.netloc in {"", "localhost"} and url.path.startswith("/")
    except ValueError:  # brackets without an IPv6 address
        is_right = False
    if not is_right or url.query or url.fragment:
        raise ValueError("expected a file URL without a host, such as file:///var/cache/kv")
    return expand_home(unquote(url.path))


def parse_direct(value: object) -> object:
    """Parse `auto` or a boolean."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return parse_flag(value)
    except ValueError:
        raise ValueError("expected auto, true or false") from None


def check_subdirectory(value: str) -> str:
    """Refuse a subdirectory outside of `path`."""
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("expected a relative path without '..'")
    return value


class DiskConfig(TierConfig):
    """Options of the disk tier.

    Attributes:
        path: Directory; created if it does not exist. One process at a time owns it.
        max_bytes: Maximum bytes of all record files, including those being written.
        odirect: Whether to use direct I/O, which bypasses the page cache; `auto`: if the file system supports it.
        io_threads: Threads that read records, and as many others that write them.
        fsync: Whether a put returns only when the record survives a power failure. Without it, a record that
            did not survive fails its checksum and is a miss.
        quarantine: Whether corrupt records are moved to the folder `quarantine` instead of deleted.
        max_quarantine_bytes: Maximum bytes of that folder, not counted in `max_bytes`; the oldest are deleted.
        scrub_interval_s: Seconds between the end of a scrub, which reads and verifies all records in the
            background, and the start of the next; 0 is never.
        scrub_max_bytes_per_s: Maximum bytes per second that a scrub reads.
        subdirectory: Appended to `path`. The engine sets `rank-<n>` when there are several ranks, `dp<n>` in
            data-parallel replicas except the first, and `dp<n>-rank-<n>` with both.
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

    def for_process(self, *, rank: int | None, replica: int = 0) -> Self:
        """Return the options with a subdirectory for the process.

        A configured `subdirectory` replaces that of the process in replica 0, and contains it in the other replicas.
        """
        given = self.subdirectory
        own = "" if rank is None else f"rank-{rank}"
        if replica:
            own = f"dp{replica}-{own}" if own else f"dp{replica}"
            own = f"{given}/{own}" if given else own
        else:
            own = given or own
        return self.model_copy(update={"subdirectory": own})

    @property
    def root(self) -> Path:
        return self.path / self.subdirectory
