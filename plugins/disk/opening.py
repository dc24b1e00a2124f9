"""What is done once, before a directory's records are served. Blocking; run in a thread."""

from __future__ import annotations

import logging
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_async.memory.header import MAX_RECORD_BYTES
from lmcache_async.plugins.disk.direct import detect_direct
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.plugins.disk.index import DiskIndex
from lmcache_async.plugins.disk.io import RecordFiles
from lmcache_async.plugins.disk.quarantine import Quarantine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_async.plugins.disk.config import DiskConfig
    from lmcache_async.plugins.disk.reading import SharedReads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class OpenDirectory:
    """A directory that was taken over.

    Attributes:
        index: Of what is there.
        corrupt: Files that no record can be, by cause; they were set aside.
    """

    directory: RecordDirectory
    files: RecordFiles
    index: DiskIndex
    corrupt: Mapping[str, int]


def open_directory(config: DiskConfig, reads: SharedReads) -> OpenDirectory:
    """Take the directory, sweep, list, and drop what is too much or broken.

    Raises:
        ConfigError: Direct I/O is wanted and refused.
        TierUnavailableError: Another process has the directory.
        OSError: It cannot be used.
    """
    directory = RecordDirectory(config.root)
    try:
        return _take_over(directory, config, reads)
    except BaseException:
        directory.close()
        raise


def _take_over(directory: RecordDirectory, config: DiskConfig, reads: SharedReads) -> OpenDirectory:
    found = directory.open()
    _warn_if_shared(directory)
    direct = detect_direct(directory, config.odirect)
    quarantine = Quarantine(directory, config.max_quarantine_bytes) if config.quarantine else None
    files = RecordFiles(directory, direct=direct, fsync=config.fsync, quarantine=quarantine, reads=reads)
    whole = [record for record in found if record.whole_pages and record.nbytes <= MAX_RECORD_BYTES]
    kept = {record.key for record in whole}
    broken = [record.key for record in found if record.key not in kept]
    for key in broken:
        if (error := files.reject(key, "length")) is not None:
            raise error
    if quarantine is not None:
        quarantine.trim()
    if broken:
        logger.warning("%s: %d files were no whole records and were set aside", config.root, len(broken))
    index = DiskIndex(config.max_bytes)
    _, failure = files.unlink(index.load(whole))
    if failure is not None:
        raise failure
    return OpenDirectory(directory, files, index, {"length": len(broken)} if broken else {})


def _warn_if_shared(directory: RecordDirectory) -> None:
    mode = stat.S_IMODE(directory.status().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        logger.warning(
            "%s has mode %o: whoever may write to it can plant records; chmod 700 unless it is meant so",
            directory.root,
            mode,
        )
