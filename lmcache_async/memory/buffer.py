"""Slabs of a memory region, and their leases as memoryview, array and tensor."""

from __future__ import annotations

import math
import sys
import sysconfig
import weakref
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_async.memory.region import Region

if TYPE_CHECKING:
    import torch

PAGE = 4096
"""Alignment of addresses and lengths for direct I/O, in bytes."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


def pages(nbytes: int) -> int:
    """Round `nbytes` up to whole pages, the unit of slabs, of direct I/O and of record files."""
    return -(-nbytes // PAGE) * PAGE


class SlabOwner(Protocol):
    """Receives the events of slabs."""

    def lease_ended(self, slab: Slab) -> None:
        """A lease was released. Other leases of the slab may remain."""

    def slab_idle(self, slab: Slab) -> None:
        """No lease and no view of the slab is left. Called from any thread, also by the garbage collector."""


class Slab:
    """Fixed piece of a region, with a lease count.

    Args:
        index: Number of the slab, chosen by the owner.
        offset: Byte offset in the region; None for consecutive slabs of one size.
        common: The memory has readers other than the leases, such as other processes.
    """

    __slots__ = (
        *("__weakref__", "_bytes", "_guard"),
        *("common", "index", "leases", "nbytes", "offset", "owner", "region"),
    )

    def __init__(
        self,
        region: Region,
        index: int,
        nbytes: int,
        owner: SlabOwner,
        *,
        offset: int | None = None,
        common: bool = False,
    ) -> None:
        self.index = index
        self.nbytes = nbytes
        self.offset = index * nbytes if offset is None else offset
        self.common = common
        self.leases = 0
        self.region = region
        self.owner = owner
        self._bytes: Bytes | None = None
        self._guard: weakref.ref[Bytes] | None = None

    @property
    def address(self) -> int:
        return self.region.address + self.offset

    @property
    def bytes(self) -> Bytes:
        """All bytes of the slab; uint8 of shape (nbytes,). Every derived view keeps this array alive.

        The end of the last view is detected through the references to the array, because
        `memoryview.release()` does not fail while slices of the view exist, and torch does not lock the buffer.
        """
        if self._bytes is None:
            self._bytes = np.frombuffer(
                self.region.view, dtype=np.uint8, count=self.nbytes, offset=self.offset
            )
        return self._bytes

    def last_lease_ended(self) -> None:
        """Report the slab as idle, now or when its last view is gone."""
        if self._bytes is None:
            self.owner.slab_idle(self)
        elif not self.common and sys.getrefcount(self._bytes) == _NO_VIEWS:
            self.owner.slab_idle(self)  # the array is used again by the next lease
        else:
            self._guard = weakref.ref(self._bytes, self._views_gone)
            self._bytes = None  # calls `_views_gone` now, or when the last view is gone

    def forget_bytes(self) -> None:
        """Drop the array of an idle slab, which keeps the region mapped."""
        self._bytes = None

    def _views_gone(self, guard: weakref.ref[Bytes]) -> None:
        del guard
        self.owner.slab_idle(self)


def _count_own_references() -> int:
    """Return `sys.getrefcount` of the array of a slab without views, counted as in `Slab.last_lease_ended`.

    Without the GIL the count is not exact. The result is then -1, which never equals a count.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return -1

    class Holder:
        __slots__ = ("_bytes",)

        def __init__(self) -> None:
            self._bytes = np.empty(0, np.uint8)

        def count(self) -> int:
            return sys.getrefcount(self._bytes)

    return Holder().count()


_NO_VIEWS = _count_own_references()


class LeaseOwner(Protocol):
    """Owner that releases leases in place of their users."""

    def retained(self, lease: Buffer) -> None:
        """`lease` was created by `retain` of a lease of this owner."""


class Buffer:
    """Lease of one slab, to be released exactly once. Used on the thread of the arena.

    Worker threads may read and write its views. A slab is reused only after its last lease is released *and*
    the last view (slice, array, tensor) of any lease is gone. A view that outlives its lease delays the reuse
    of the slab; it never shows the bytes of another lease.

    A lease can be read-only, and it can have an owner that releases it. Leases that are passed to tiers are
    one or both: see `lmcache_async.tiers.handle`.

    Attributes:
        nbytes: Requested length in bytes, or that of `resize`; at most the length of the slab. Read-only.
        released: Whether the lease was released. Read-only.
        readonly: Views and arrays of this lease reject writes, and its tensors are copies.
        owner: Releases the lease. Other code need not release it, and may release it repeatedly.
    """

    __slots__ = ("__weakref__", "_slab", "_views", "nbytes", "owner", "readonly", "released")

    def __init__(
        self, slab: Slab, nbytes: int, readonly: bool = False, owner: LeaseOwner | None = None
    ) -> None:
        if not 0 <= nbytes <= slab.nbytes:
            raise _wrong_size(nbytes, slab)
        slab.leases += 1
        self._slab = slab
        self.nbytes = nbytes
        self.released = False
        self._views: dict[int, memoryview] | None = None  # None for most leases
        self.readonly = readonly
        self.owner = owner

    @property
    def shared(self) -> bool:
        """Whether the slab has readers other than this lease. It must not be written to then."""
        self._check_leased()
        return self._slab.common or self._slab.leases > 1

    def is_of(self, owner: object) -> bool:
        """Whether this is a lease of one of the slabs of `owner`."""
        return self._slab.owner is owner

    @property
    def address(self) -> int:
        """Address of the first byte; a multiple of 4096."""
        return self._slab.address

    @property
    def view(self) -> memoryview:
        """All `nbytes` bytes; writable unless the lease is read-only. Raises ValueError after the release."""
        if self._views is None and not (self.released or self.readonly):
            view = self._slab.bytes.data[: self.nbytes]
            self._views = {self.nbytes: view}
            return view
        return self._view(self.nbytes)

    @property
    def padded_view(self) -> memoryview:
        """`view`, extended to a multiple of 4096 bytes for direct I/O."""
        return self._view(pages(self.nbytes))

    @property
    def array(self) -> Bytes:
        """All bytes as uint8 of shape (nbytes,), without a copy.

        The array of a read-only lease cannot be made writable.
        """
        return self._bytes()[: self.nbytes]

    def array_from(self, offset: int) -> Bytes:
        """Return `array[offset:]`."""
        found = self._slab.bytes if not (self.released or self.readonly) else self._bytes()
        return found[offset : self.nbytes]

    def read(self, nbytes: int) -> bytes:
        """Return a copy of the first `nbytes` bytes, or of all if there are fewer. Raises ValueError after the release.

        Faster than through `view`, because no view is kept.
        """
        self._check_leased()
        slab = self._slab
        return slab.region.view[slab.offset : slab.offset + min(nbytes, self.nbytes)].tobytes()

    def write(self, data: bytes | bytearray) -> None:
        """Copy `data` to the start of the buffer. Faster than through `view`, because no view is made.

        Raises:
            ValueError: The lease was released or is read-only, or the buffer is smaller.
        """
        slab, nbytes = self._slab, len(data)
        if self.released or self.readonly or nbytes > self.nbytes:
            self._check_leased()
            raise ValueError(
                f"cannot write {nbytes} bytes to a {'read-only ' * self.readonly}buffer of {self.nbytes} bytes"
            )
        slab.region.view[slab.offset : slab.offset + nbytes] = data

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """Return the bytes from `offset` on as a tensor, without a copy.

        PyTorch has no read-only tensors, so the tensor of a read-only lease is a copy.

        Args:
            dtype: Element type of the tensor.
            shape: Shape of the tensor.
            offset: Byte offset of its first element.

        Raises:
            ValueError: The tensor exceeds `nbytes`.
        """
        import torch

        stop = offset + math.prod(shape) * dtype.itemsize
        if not 0 <= offset <= stop <= self.nbytes:
            raise ValueError(f"bytes {offset} to {stop} are not all within the {self.nbytes} of the buffer")
        array = self._bytes()[offset:stop]
        return torch.from_numpy(array.copy() if self.readonly else array).view(dtype).view(shape)

    def retain(self) -> Buffer:
        """Return another lease of the same slab, to be released separately.

        It has its own length and is read-only if this lease is.
        """
        if self.released:
            self._check_leased()
        lease = Buffer(self._slab, self.nbytes, self.readonly)
        if self.owner is not None:
            self.owner.retained(lease)
        return lease

    def lend(self, owner: LeaseOwner) -> Buffer:
        """Return another lease of the same slab, read-only and released by `owner`."""
        if self.released:
            self._check_leased()
        return Buffer(self._slab, self.nbytes, True, owner)

    def take_over(self) -> Buffer:
        """Move this lease to a new buffer, writable and without an owner.

        This buffer counts as released. Code that still has it can neither use nor release the lease.
        """
        self._check_leased()
        lease = Buffer.__new__(Buffer)
        lease._slab = self._slab
        lease.nbytes = self.nbytes
        lease.released = False
        lease._views = None
        lease.readonly = False
        lease.owner = None
        self.released = True
        if self._views is not None:
            self._end_views(self._views)
        return lease

    def resize(self, nbytes: int) -> None:
        """Set the true length in bytes, if it is known only after a read.

        Raises:
            ValueError: The slab is smaller.
        """
        self._check_leased()
        if not 0 <= nbytes <= self._slab.nbytes:
            raise _wrong_size(nbytes, self._slab)
        self.nbytes = nbytes

    def release(self) -> None:
        """Release the lease. Its views become unusable.

        Raises:
            RuntimeError: The lease was released before and has no owner.
        """
        if self.released:
            if self.owner is not None:
                return
            raise RuntimeError(f"the lease of slab {self._slab.index} was released twice")
        self.released = True
        if self._views is not None:
            self._end_views(self._views)
        slab = self._slab
        slab.leases -= 1
        if slab.leases == 0:
            slab.last_lease_ended()
        slab.owner.lease_ended(slab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self._slab.leases} leases"
        return f"<Buffer of {self.nbytes} bytes in slab {self._slab.index}, {state}>"

    def _bytes(self) -> Bytes:
        self._check_leased()
        if self.readonly:  # from a read-only view, so that the array cannot be made writable
            return np.frombuffer(self._slab.bytes.data.toreadonly(), dtype=np.uint8)
        return self._slab.bytes

    def _view(self, nbytes: int) -> memoryview:
        self._check_leased()
        if self._views is None:
            self._views = {}
        view = self._views.get(nbytes)
        if view is None:
            view = self._slab.bytes.data[:nbytes]
            view = self._views[nbytes] = view.toreadonly() if self.readonly else view
        return view

    def _end_views(self, views: dict[int, memoryview]) -> None:
        for view in views.values():
            try:  # noqa: SIM105  # `suppress` takes as long as the rest of a release
                view.release()
            except BufferError:
                pass  # an array or a pending read uses the view; the slab stays in use until it ends
        self._views = None

    def _check_leased(self) -> None:
        if self.released:
            raise ValueError(f"the lease of slab {self._slab.index} was released")


def _wrong_size(nbytes: int, slab: Slab) -> ValueError:
    return ValueError(f"a length of {nbytes} bytes is not within the {slab.nbytes} bytes of the slab")
