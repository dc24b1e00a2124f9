"""The engine's verbs for who has tokens and rows, not chunks and keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from lmcache_async.config import EngineConfig
from lmcache_async.device.copier import Fence
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.arguments import Mask, leading_false, row_ids
from lmcache_async.engine.results import LookupResult
from lmcache_async.hashing import ChunkHasher, Namespace, RequestNamespace, TokenIds, as_tokens
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest
from lmcache_async.types import BlockIds, Chunk, ChunkKey, RetrieveReport, StoreReport, Tokens

NO_NAMESPACE = RequestNamespace()


class TokenVerbs(ABC):
    """`lookup`, `store`, `retrieve` and `prefetch` by tokens, built on the verbs for chunks."""

    config: EngineConfig
    namespace: Namespace
    layout: KVLayout

    @abstractmethod
    async def lookup_keys(self, keys: list[ChunkKey], *, lookup_id: str | None = None) -> LookupResult: ...

    @abstractmethod
    async def store_chunks(self, request: StoreRequest) -> StoreReport: ...

    @abstractmethod
    async def retrieve_chunks(self, request: RetrieveRequest) -> RetrieveReport: ...

    @abstractmethod
    async def prefetch_chunks(self, request: RetrieveRequest) -> int: ...

    async def lookup(
        self,
        tokens: TokenIds,
        *,
        namespace: RequestNamespace = NO_NAMESPACE,
        lookup_id: str | None = None,
    ) -> int:
        """How many leading tokens are there.

        Args:
            tokens: Token ids: a list, an array or a tensor of integers.
            namespace: What else the request's KV depends on.
            lookup_id: With one, what is in host memory stays there until `unpin(lookup_id)`.
        """
        chunks = self._chunks(as_tokens(tokens), namespace)
        result = await self.lookup_keys([chunk.key for chunk in chunks], lookup_id=lookup_id)
        return chunks[result.count - 1].stop if result.count else 0

    async def store(
        self,
        tokens: TokenIds,
        rows: Any,
        *,
        mask: Mask | None = None,
        namespace: RequestNamespace = NO_NAMESPACE,
        request_id: str = "",
        fence: Fence | None = None,
    ) -> StoreReport:
        """Store the KV of `tokens` that lies in `rows` of the device's KV cache.

        Args:
            tokens: Token ids of the whole prefix, from position 0 on.
            rows: One row for each `layout.tokens_per_row` tokens: the slot mapping, or block ids.
            mask: Booleans of shape (len(tokens),), as a tensor, an array or a list; leading False tokens are
                not stored.
            namespace: What else the request's KV depends on.
            request_id: For log lines.
            fence: What the copy waits for, taken on the model's thread; by default it is taken here.

        Raises:
            TypeError: A token or a row is no integer, or the mask has other values than booleans.
            ValueError: A token or a row is out of bounds, rows are missing, or the mask has another form.
        """
        ids = as_tokens(tokens)
        return await self.store_chunks(
            StoreRequest(
                request_id=request_id,
                tokens=ids,
                row_ids=self._rows(rows, len(ids), leading_false(mask, len(ids))),
                root=self._root(namespace),
                request_namespace=self._label(namespace),
                fence=self.copier.fence() if fence is None else fence,
            )
        )

    async def retrieve(
        self,
        tokens: TokenIds,
        rows: Any,
        *,
        mask: Mask | None = None,
        namespace: RequestNamespace = NO_NAMESPACE,
        request_id: str = "",
        fence: Fence | None = None,
    ) -> torch.Tensor:
        """Load the longest prefix of `tokens` that is there into `rows`.

        Args and errors: as in `store`; leading False tokens of `mask`, and those of rows of -1, are not
        written. A row is written as a whole or not at all.

        Returns:
            Bool of shape (len(tokens),) on the CPU: True for the tokens loaded. It has the form F* T* F*, but
            that the tokens of a row of -1 are False everywhere.
        """
        ids = as_tokens(tokens)
        row_ids = self._rows(rows, len(ids), leading_false(mask, len(ids)))
        report = await self.retrieve_chunks(
            RetrieveRequest(
                request_id=request_id,
                tokens=ids,
                row_ids=row_ids,
                root=self._root(namespace),
                request_namespace=self._label(namespace),
                fence=self.copier.fence() if fence is None else fence,
            )
        )
        result = torch.zeros(len(ids), dtype=torch.bool)
        # The hit begins with the chunk of the first row that is wanted.
        wanted = np.flatnonzero(row_ids >= 0)
        if len(wanted):
            skip = int(wanted[0]) * self.layout.tokens_per_row
            end = skip - skip % self.config.chunk_size + report.hit_tokens
            written = np.repeat(row_ids >= 0, self.layout.tokens_per_row)
            result[skip:end] = torch.from_numpy(written[skip:end])
        return result

    async def prefetch(self, tokens: TokenIds, *, namespace: RequestNamespace = NO_NAMESPACE) -> int:
        """Bring what slower tiers have of `tokens` into host memory; how many leading tokens are there."""
        ids = as_tokens(tokens)
        chunks = self._chunks(ids, namespace)
        rows = tuple(np.zeros(len(c.tokens) // self.layout.tokens_per_row, np.int64) for c in chunks)
        return await self.prefetch_chunks(
            RetrieveRequest(chunks=tuple(chunks), rows=rows, request_namespace=self._label(namespace))
        )

    @property
    @abstractmethod
    def copier(self) -> Any: ...

    def _root(self, namespace: RequestNamespace) -> bytes:
        own = self.namespace
        return namespace.root(own.root(), own.algorithm, own.hash_key)

    def _label(self, namespace: RequestNamespace) -> str:
        return namespace.keyed_label(self.namespace.hash_key)

    def _chunks(self, tokens: Tokens, namespace: RequestNamespace) -> list[Chunk]:
        hasher = ChunkHasher(
            self._root(namespace),
            chunk_size=self.config.chunk_size,
            algorithm=self.namespace.algorithm,
            hash_key=self.namespace.hash_key,
        )
        chunks = hasher.extend(tokens[: len(tokens) - len(tokens) % self.layout.tokens_per_row])
        tail = hasher.tail()
        return chunks if tail is None else [*chunks, tail]

    def _rows(self, rows: Any, num_tokens: int, skip_tokens: int) -> BlockIds:
        """The rows of the tokens as int64, a copy in which those of the first `skip_tokens` are -1."""
        unit = self.layout.tokens_per_row
        ids = row_ids(rows, num_tokens, unit, self.layout.num_rows)
        ids[: -(-skip_tokens // unit)] = -1
        return ids
