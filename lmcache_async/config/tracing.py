"""The section `tracing`: spans for OpenTelemetry."""

from __future__ import annotations

from pydantic import Field

from lmcache_async.config.specs import Section
from lmcache_async.config.values import Flag


class TracingConfig(Section):
    """Spans of stores and retrieves; docs/metrics.md says who exports them."""

    enabled: Flag = Field(
        default=False,
        description="Give OpenTelemetry a span of each store and retrieve; needs the extra otel.",
    )
