"""What the scheduler half knows of one request."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache_async.hashing import Extra
from lmcache_async.integration.vllm.chains import Adapter, RequestChain
from lmcache_async.integration.vllm.handover import Promise
from lmcache_async.integration.vllm.media import MediaIdentity
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_async.integration.vllm.lookups import Lookup

logger = LimitedLogger(logging.getLogger(__name__))

_TAG_PREFIX = "lmcache.tag."  # LMCache's spelling of one tag as a key of its own


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request's `kv_transfer_params` say. Keys of others are left alone.

    LMCache's `lmcache.skip_save` and `lmcache.tag.<name>` are understood beside our own names.

    Attributes:
        hand_over: Another vLLM is to go on from here: it is told what it will find.
        promise: What a producer has told of this request.
    """

    load: bool = True
    store: bool = True
    hand_over: bool = False
    promise: Promise | None = None
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RequestOptions:
        if not params:
            return DEFAULT_OPTIONS
        tags = params.get("tags")
        usable = tags is None or isinstance(tags, dict)
        if not usable:  # taken for none it would share the request's KV with everybody
            logger.report(
                "tags",
                "kv_transfer_params: tags is a %s; expected an object of names and values; the request is neither"
                " loaded nor stored",
                type(tags).__name__,
            )
        pairs = {str(name): str(value) for name, value in tags.items()} if isinstance(tags, dict) else {}
        for name, value in params.items():
            if name.startswith(_TAG_PREFIX):
                pairs[name.removeprefix(_TAG_PREFIX)] = str(value)
        return cls(
            load=usable and not _is_set(params, "skip_load"),
            store=usable and not (_is_set(params, "skip_save") or _is_set(params, "force_skip_save")),
            hand_over=params.get("do_remote_decode") is True,
            promise=Promise.of(params),
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
        hands_over: Another vLLM is told what is stored of it.
        first_chunks: The first chunk of each of its stores, if it is handed over.
        lost_chunk: The first chunk that did not reach a shared tier, as far as is known.
        keys_until: How long, on the monotonic clock, it waits for its keys; None while it need not.
        promise: What a producer has told of it.
        wait_until: How long, on the monotonic clock, that is waited for; None before the first lookup.
        told: Where its prompt comes from was told to who looks.
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
    hands_over: bool = False
    first_chunks: dict[int, int] = field(default_factory=dict)
    lost_chunk: int | None = None
    keys_until: float | None = None
    promise: Promise | None = None
    wait_until: float | None = None
    told: bool = False


@dataclass(frozen=True, slots=True)
class Roles:
    """What this vLLM does, by its `kv_role` and the configuration.

    Attributes:
        loads: It loads what is there.
        stores: It stores what it computes.
        hands_over: Another vLLM goes on with every request.
    """

    loads: bool = True
    stores: bool = True
    hands_over: bool = False


def new_state(request: Any, tail_tokens: int, roles: Roles, media: MediaIdentity) -> RequestState:
    """At first sight of a request."""
    options = RequestOptions.of(request.kv_transfer_params)
    fits = _usable(request) and media.all_by_content(request.mm_features)
    may_store = fits and roles.stores and options.store
    return RequestState(
        request=request,
        chain=_chain_of(request, options.tags),
        may_load=fits and roles.loads and options.load,
        may_store=may_store,
        tail_tokens=tail_tokens,
        tail_pending=tail_tokens > 0,
        hands_over=may_store and (roles.hands_over or options.hand_over),
        promise=options.promise,
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
