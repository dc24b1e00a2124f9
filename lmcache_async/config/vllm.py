"""What can be configured of the vLLM connector."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lmcache_async.config.specs import Section
from lmcache_async.config.values import Count, Flag, Fraction, OptionalRate, Seconds, Wait, unless_none


def _parse_directory(value: object) -> Path | None:
    value = unless_none(value)
    if value is not None and not isinstance(value, str | Path):
        raise ValueError("expected the path of a directory")
    return None if value is None else Path(value)


class VLLMConfig(Section):
    """What only the vLLM connector uses."""

    lookup_timeout_s: Seconds = Field(
        default=0.5,
        description="How long a request waits for its lookup before it counts as a miss, in seconds.",
    )
    lookup_pin_ttl_s: Seconds = Field(
        default=30.0,
        description="How long chunks found by a lookup stay pinned if no retrieve follows, in seconds.",
    )
    max_pinned_fraction: Fraction = Field(
        default=0.25,
        description="Largest part of the arena that lookups may pin, and of vLLM's blocks that stores may hold"
        " until they are copied; above 0 and at most 1.",
    )
    layerwise_load: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether hits in host memory are loaded within the step that uses them, each layer awaited when"
        " the model comes to it; auto does it where the model runs on a CPU.",
    )
    layerwise_max_tokens: Count = Field(
        default=16384,
        description="Longest hit that is loaded so, since the rest of the batch waits too; longer ones are loaded"
        " before the request joins a batch.",
    )
    load_policy: Literal["auto", "always"] = Field(
        default="auto",
        description="Whether a hit is loaded only as far as that is sooner than computing it, by what loads and steps"
        " have taken so far, or always.",
    )
    prefill_tokens_per_s: OptionalRate = Field(
        default=None,
        description="How fast the model computes prompts, in tokens a second, for load_policy; none means measured.",
    )
    wait_for_producer_s: Wait = Field(
        default=2.0,
        description="How long a request waits for what another vLLM has said that it is storing of it, in seconds;"
        " 0 loads what is there at once.",
    )
    producer_loads: Flag = Field(
        default=True, description="Whether a vLLM with kv_role kv_producer loads hits, as kv_both does."
    )
    consumer_stores: Flag = Field(
        default=False, description="Whether a vLLM with kv_role kv_consumer stores what it computes."
    )
    socket_dir: Annotated[Path | None, BeforeValidator(_parse_directory)] = Field(
        default=None,
        description="Directory of the sockets between scheduler and workers; none means a private temporary one.",
    )
    reset_cache: Literal["all", "memory"] = Field(
        default="all", description="What vLLM's reset of its prefix cache clears: every tier, or memory only."
    )
