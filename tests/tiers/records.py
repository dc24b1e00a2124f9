"""The records of the public kit, by the name that our own tests know them by."""

from lmcache_async.testing.records import (
    FORMAT,
    SLAB_BYTES,
    check_record,
    chunk_of,
    key_of,
    payload_of,
    record,
    write_record,
)

__all__ = [
    "FORMAT",
    "SLAB_BYTES",
    "check_record",
    "chunk_of",
    "key_of",
    "payload_of",
    "record",
    "write_record",
]
