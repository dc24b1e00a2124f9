"""A lease of one slab of the arena, as memoryview, array and tensor."""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from lmcache_async.memory.region import Region

PAGE = 4096
"""What direct I/O wants addresses and lengths to be multiples of."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


class SlabOwner(Protocol):
    """Who is told when leases end."""

    def lease_ended(self, slab: Slab) -> None:
        """A lease was given back; others of the slab may be left."""

    def slab_idle(self, slab: Slab) -> None:
        """No lease and no view of the slab is left. Called from any thread, also by the collector."""


class Slab:
    """A fixed piece of the region, and how many leases it has.

    Args:
        region: Where it lies.
        index: What its owner calls it.
        nbytes: Its length.
        owner: Told when leases end.
        offset: In the region, in bytes; None for slabs of one size, one behind the other.
        common: Whether others than our leases read the memory: other processes, say.
    """

    __slots__ = (
        *("__weakref__", "_bytes", "_guard", "_owner", "_region"),
        *("common", "index", "leases", "nbytes", "offset"),
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
        self._region = region
        self._owner = owner
        self._bytes: Bytes | None = None
        self._guard: weakref.ref[Bytes] | None = None

    @property
    def address(self) -> int:
        return self._region.address + self.offset

    @property
    def bytes(self) -> Bytes:
        """All of the slab. Every view that anybody derives from it keeps this one array alive.

        That is how we know when the last view is gone: `memoryview.release()` says nothing of
        slices of the view, and torch takes no buffer lock at all.
        """
        if self._bytes is None:
            self._bytes = np.frombuffer(
                self._region.view, dtype=np.uint8, count=self.nbytes, offset=self.offset
            )
            self._guard = weakref.ref(self._bytes, self._views_gone)
        return self._bytes

    def drop(self) -> None:
        """End one lease."""
        self.leases -= 1
        if self.leases == 0:
            if self._bytes is None:
                self._owner.slab_idle(self)
            else:
                self._bytes = None  # `_views_gone` follows at once, or when the last view is gone
        self._owner.lease_ended(self)

    def _views_gone(self, guard: weakref.ref[Bytes]) -> None:
        del guard
        self._owner.slab_idle(self)


class LeaseOwner(Protocol):
    """Ends leases in place of whoever uses them."""

    def retained(self, lease: Buffer) -> None:
        """`lease` was taken with `retain` of a lease that belongs to this owner."""


class Buffer:
    """One lease of one slab, to be released exactly once. Used on the arena's thread.

    Workers may read and write its views elsewhere. The slab is used again only when its last lease
    is released *and* the last view (slice, array, tensor) taken from any of them is gone: a view
    that outlives its lease costs a slab, never someone else's bytes.

    A lease can be read-only, and it can belong to an owner that ends it. A tier's buffers are both or
    one of these: see `lmcache_async.tiers.border`.

    Attributes:
        readonly: Whether the views and arrays of this lease refuse writes, and its tensors are copies.
        owner: Releases the lease. A release by anyone else is optional, and may be repeated.
    """

    __slots__ = ("__weakref__", "_nbytes", "_released", "_slab", "_views", "owner", "readonly")

    def __init__(self, slab: Slab, nbytes: int) -> None:
        _check_size(nbytes, slab)
        slab.leases += 1
        self._slab = slab
        self._nbytes = nbytes
        self._released = False
        self._views: dict[int, memoryview] | None = None  # most leases have none
        self.readonly = False
        self.owner: LeaseOwner | None = None

    @property
    def nbytes(self) -> int:
        """The length asked for, or given to `resize`; at most the slab's."""
        return self._nbytes

    @property
    def released(self) -> bool:
        return self._released

    @property
    def shared(self) -> bool:
        """Whether others than this lease read the slab: it must not be written to then."""
        self._check_leased()
        return self._slab.common or self._slab.leases > 1

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 4096."""
        return self._slab.address

    @property
    def view(self) -> memoryview:
        """The bytes; writable unless the lease is read-only. Unusable (ValueError) after the release."""
        return self._view(self._nbytes)

    @property
    def padded_view(self) -> memoryview:
        """`view` and what is left of its last 4096 bytes, for direct I/O."""
        return self._view(-(-self._nbytes // PAGE) * PAGE)

    @property
    def array(self) -> Bytes:
        """The bytes as uint8 of shape (nbytes,), without a copy.

        Of a read-only lease it is an array that cannot be made writable.
        """
        return self._bytes()[: self._nbytes]

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """The bytes from `offset` on as a tensor, without a copy.

        PyTorch has no read-only tensors: of a read-only lease it is a copy.

        Raises:
            ValueError: They reach beyond `nbytes`.
        """
        import torch

        stop = offset + math.prod(shape) * dtype.itemsize
        if not 0 <= offset <= stop <= self._nbytes:
            raise ValueError(f"bytes {offset} to {stop} are not all within the {self._nbytes} of the buffer")
        array = self._bytes()[offset:stop]
        return torch.from_numpy(array.copy() if self.readonly else array).view(dtype).view(shape)

    def retain(self) -> Buffer:
        """A further lease of the same slab, with a length and a release of its own; read-only as this one."""
        self._check_leased()
        lease = Buffer(self._slab, self._nbytes)
        lease.readonly = self.readonly
        if self.owner is not None:
            self.owner.retained(lease)
        return lease

    def lend(self, owner: LeaseOwner) -> Buffer:
        """A further lease of the same slab, read-only and the owner's."""
        self._check_leased()
        lease = Buffer(self._slab, self._nbytes)
        lease.readonly = True
        lease.owner = owner
        return lease

    def take_over(self) -> Buffer:
        """This lease as a new buffer, writable and without an owner; this buffer counts as released.

        Whoever still has this buffer can neither use nor end the lease any more.
        """
        self._check_leased()
        lease = Buffer.__new__(Buffer)
        lease._slab = self._slab
        lease._nbytes = self._nbytes
        lease._released = False
        lease._views = None
        lease.readonly = False
        lease.owner = None
        self._released = True
        if self._views is not None:
            self._end_views(self._views)
        return lease

    def resize(self, nbytes: int) -> None:
        """Set the true length, where it is known only after a read."""
        self._check_leased()
        _check_size(nbytes, self._slab)
        self._nbytes = nbytes

    def release(self) -> None:
        """Give the lease back; its views become unusable.

        Raises:
            RuntimeError: It was given back before, and has no owner.
        """
        if self._released:
            if self.owner is not None:
                return
            raise RuntimeError(f"the lease of slab {self._slab.index} was given back twice")
        self._released = True
        if self._views is not None:
            self._end_views(self._views)
        self._slab.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self._slab.leases} leases"
        return f"<Buffer of {self._nbytes} bytes in slab {self._slab.index}, {state}>"

    def _bytes(self) -> Bytes:
        self._check_leased()
        if self.readonly:  # over a read-only view, so that the flag of the array cannot be set again
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
            # An array or a pending read uses the view: the slab waits for it.
            with contextlib.suppress(BufferError):
                view.release()
        self._views = None

    def _check_leased(self) -> None:
        if self._released:
            raise ValueError(f"the lease of slab {self._slab.index} was released")


def _check_size(nbytes: int, slab: Slab) -> None:
    if not 0 <= nbytes <= slab.nbytes:
        raise ValueError(f"a slab has {slab.nbytes} bytes, not {nbytes}")
