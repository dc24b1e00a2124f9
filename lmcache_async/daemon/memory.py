"""Shared memory of the daemon: an anonymous file with a sealed length, which clients map."""

from __future__ import annotations

import fcntl
import os

from lmcache_async.errors import ConfigError
from lmcache_async.memory.region import Region


class SharedMemory:
    """`nbytes` of zeroed memory and its descriptor, which can be sent to other processes.

    The file's length is sealed, because access beyond the end of a truncated file kills the process. The
    memory exists as long as a process maps it.

    Args:
        nbytes: A multiple of the page size.
        huge_pages: Request huge pages, if the kernel has them for shared memory.
        prefault: Touch all pages in the background, so that first writes cause no page faults.

    Raises:
        ConfigError: The memory cannot be allocated.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True, prefault: bool = True) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("lmcache-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._region = Region(
                nbytes,
                grain_bytes=nbytes,
                pin=False,
                pin_device=None,
                huge_pages=huge_pages,
                prefault=prefault,
                fd=self.fd,
            )
        except BaseException as error:
            os.close(self.fd)
            if isinstance(error, OSError):
                raise ConfigError(f"max_bytes: cannot allocate {nbytes} bytes of shared memory") from error
            raise

    @property
    def view(self) -> memoryview:
        return self._region.view

    def close(self) -> None:
        """Close the descriptor and unmap the memory in this process."""
        os.close(self.fd)
        self._region.close()
