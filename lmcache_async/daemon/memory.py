"""The memory that the daemon owns and its clients map: a file without a name, whose length is sealed."""

from __future__ import annotations

import fcntl
import os

from lmcache_async.errors import ConfigError
from lmcache_async.memory.region import Region


class SharedMemory:
    """`nbytes` of zeroed memory and a descriptor of it, which may be sent to other processes.

    Nobody who has the descriptor can change the file's length: cut short, it would kill whoever reads
    behind its end. The memory is there as long as any process maps it.

    Args:
        nbytes: A multiple of the page size.
        huge_pages: Ask for huge pages, where the kernel gives them to shared memory.
        prefault: Take all of it from the system in the background, so that no first write pays for that.

    Raises:
        ConfigError: The memory is not to be had.
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
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"max_bytes: {nbytes} bytes of shared memory are not to be had") from error
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def view(self) -> memoryview:
        return self._region.view

    def close(self) -> None:
        """Give up the descriptor and our mapping; who maps it still, keeps it."""
        os.close(self.fd)
        self._region.close()
