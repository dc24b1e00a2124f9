"""What the scheduler half knows of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.hashing import Extra
from lmcache_async.integration.vllm.chains import Adapter, RequestChain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_async.integration.vllm.lookups import Lookup

_TAG_PREFIX = "lmcache.tag."  # LMCache's spelling of one tag as a key of its own


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request's `kv_transfer_params` say. Keys of others are left alone.

    LMCache's `lmcache.skip_save` and `lmcache.tag.<name>` are understood beside our own names.
    """

    load: bool = True
    store: bool = True
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RequestOptions:
        if not params:
            return DEFAULT_OPTIONS
        tags = params.get("tags")
        pairs = {str(name): str(value) for name, value in tags.items()} if isinstance(tags, dict) else {}
        for name, value in params.items():
            if name.startswith(_TAG_PREFIX):
                pairs[name.removeprefix(_TAG_PREFIX)] = str(value)
        return cls(
            load=not _is_set(params, "skip_load"),
            store=not (_is_set(params, "skip_save") or _is_set(params, "force_skip_save")),
            tags=tuple(sorted(pairs.items())),
        )


DEFAULT_OPTIONS = RequestOptions()


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the scheduler's hands.

    Attributes:
        chain: Its tokens and keys.
        may_load: Whether it is looked up at all.
        may_store: Whether its KV is stored.
        tail_tokens: Length of the prompt's partial end: whole blocks after its last full chunk.
        lookup: The last lookup.
        local_tokens: What vLLM had itself when it last asked for a match.
        layerwise: The match that vLLM was told last is to be loaded by the step that uses it.
        loading: A load of it is under way.
        load_failed: A load of it failed; it is not tried again.
        next_chunk: The first full chunk that is neither known to be there nor on its way.
        tail_pending: The prompt's partial end is still to be stored.
        adopted: `next_chunk` knows the lookup's answer already.
    """

    request: Any
    chain: RequestChain
    may_load: bool
    may_store: bool
    tail_tokens: int
    lookup: Lookup | None = None
    local_tokens: int = 0
    layerwise: bool = False
    loading: bool = False
    load_failed: bool = False
    next_chunk: int = 0
    tail_pending: bool = False
    adopted: bool = False


def new_state(request: Any, tail_tokens: int, *, loads: bool, stores: bool) -> RequestState:
    """At first sight of a request.

    Args:
        loads: Whether this vLLM loads at all.
        stores: Whether it stores.
    """
    options = RequestOptions.of(request.kv_transfer_params)
    fits = _usable(request)
    return RequestState(
        request=request,
        chain=_chain_of(request, options.tags),
        may_load=fits and loads and options.load,
        may_store=fits and stores and options.store,
        tail_tokens=tail_tokens,
        tail_pending=tail_tokens > 0,
    )


def _usable(request: Any) -> bool:
    """Whether the request's KV is a function of what we put into its keys.

    Prompts given as embeddings have no token ids, and a streaming session's tokens may still be taken back.
    """
    return request.prompt_embeds is None and not request.resumable and request.prompt_token_ids is not None


def _chain_of(request: Any, tags: tuple[tuple[str, str], ...]) -> RequestChain:
    lora = request.lora_request
    adapter = None
    if lora is not None:
        adapter = Adapter(lora.lora_name, lora.lora_path, bool(lora.load_inplace), lora.lora_int_id)
    return RequestChain(
        request_id=request.request_id,
        source=request.all_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        adapter=adapter,
        cache_salt=request.cache_salt or "",
        tags=tags,
        extras=tuple(map(_extra, request.mm_features)),
    )


def _extra(feature: Any) -> Extra:
    start = feature.mm_position.offset
    return Extra(start, start + feature.mm_position.length, feature.identifier)


def _is_set(params: Mapping[str, Any], name: str) -> bool:
    return bool(params.get(name) or params.get(f"lmcache.{name}"))
