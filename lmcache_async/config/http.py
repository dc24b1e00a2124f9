"""What can be configured of the endpoint that shows how an engine or a daemon does."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from lmcache_async.config.endpoint import Endpoint, is_loopback, parse_listen
from lmcache_async.config.explain import disagree
from lmcache_async.config.specs import Section
from lmcache_async.config.values import Count, Seconds, expand_home, unless_none
from lmcache_async.errors import ConfigError


def _parse_optional_listen(value: object) -> Endpoint | None:
    if isinstance(value, Endpoint):
        return value
    value = unless_none(value)
    return None if value is None else parse_listen(value)


def _parse_optional_file(value: object) -> Path | None:
    value = unless_none(value)
    if value is not None and not isinstance(value, str | Path):
        raise ValueError("expected the path of a file")
    return None if value is None else expand_home(value)


OptionalFile = Annotated[
    Path | None, BeforeValidator(_parse_optional_file, json_schema_input_type=str | None)
]


class HTTPConfig(Section):
    """The status page, its figures as JSON, and metrics for Prometheus; read-only."""

    listen: Annotated[
        Endpoint | None, BeforeValidator(_parse_optional_listen, json_schema_input_type=str | None)
    ] = Field(
        default=None,
        description="Where status page and metrics are served, as host:port, the rank added to the port; none"
        " serves nothing, port 0 takes a free one.",
    )
    token_file: OptionalFile = Field(
        default=None,
        description="File of the tokens that a reader must say, one a line, closed to others; needed on anything"
        " but the loopback.",
    )
    tls_cert_file: OptionalFile = Field(
        default=None, description="Certificate as PEM, to serve HTTPS; none serves HTTP."
    )
    tls_key_file: OptionalFile = Field(default=None, description="Its key, unless that is in the same file.")
    max_connections: Count = Field(
        default=32, description="Connections at the same time; one more is refused."
    )
    timeout_s: Seconds = Field(
        default=10.0, description="Longest time of one connection, which has one request, in seconds."
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.listen is not None and self.token_file is None and not is_loopback(self.listen.host):
            raise disagree(
                f"{self.listen} can be reached from elsewhere, and nobody would have to say a token:"
                " set token_file, or listen at 127.0.0.1",
                "listen",
                "token_file",
            )
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise disagree(
                "a key is of use with a certificate: set tls_cert_file", "tls_key_file", "tls_cert_file"
            )
        return self

    def make_context(self) -> ssl.SSLContext | None:
        """TLS as configured; None without a certificate.

        Raises:
            ConfigError: A file cannot be used.
        """
        if self.tls_cert_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert_file, self.tls_key_file)
        except (OSError, ssl.SSLError) as error:
            names = f"http.tls_cert_file: {self.tls_cert_file}, http.tls_key_file: {self.tls_key_file}"
            raise ConfigError(f"{names}: they cannot be used: {error}") from error
        return context
