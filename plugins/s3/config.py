"""Options of the s3 tier."""

import re
from typing import Annotated, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lmcache_async.config.secrets import SecretText, check_one_source
from lmcache_async.config.validation import disagree
from lmcache_async.config.values import Count, Flag, OptionalPath, Seconds, Size, unless_none
from lmcache_async.tiers.base import TierConfig

_SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_EXPECTED = "expected s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"


class Location(NamedTuple):
    """Location of records."""

    kind: str  # `s3`, `gs` or `az`
    bucket: str  # or Azure's container
    prefix: str  # common prefix of object names, without slashes at its ends; may be empty


def parse_location(url: str) -> Location:
    """Parse a URL such as s3://bucket/prefix. Raise ValueError if it is not such a URL."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets without an IPv6 address
        raise ValueError(_EXPECTED) from None
    kind = _SCHEMES.get(parts.scheme)
    if kind is None or not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise ValueError(_EXPECTED)
    names = [name for name in parts.path.split("/") if name]
    if ".." in names or "." in names:
        raise ValueError(f"{_EXPECTED}, without '.' and '..'")
    return Location(kind, parts.netloc, "/".join(names))


def _parse_url(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(_EXPECTED)  # noqa: TRY004 - pydantic reads ValueError
    location = parse_location(value.strip())
    return "/".join(part for part in (f"{location.kind}://{location.bucket}", location.prefix) if part)


def _check_endpoint(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port, or brackets without an IPv6 address
        is_right = False
    if not is_right or "@" in value or parts.query:
        raise ValueError("expected a URL without a user, such as https://storage.example.com:9000")
    return value.rstrip("/")


OptionalText = Annotated[str | None, BeforeValidator(unless_none)]
OptionalEndpoint = Annotated[
    Annotated[str, AfterValidator(_check_endpoint)] | None, BeforeValidator(unless_none)
]


class S3Config(TierConfig):
    """Options of the s3 tier.

    Without credentials in the options, the default chain of the cloud is used: environment variables
    (`AWS_...`, `GOOGLE_...`, `AZURE_...`), a web identity, the role of the container or of the machine.

    Attributes:
        url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        endpoint: URL of a store other than the cloud itself, such as `http://minio:9000`.
        region: Region of the bucket; by default that of the environment, else `us-east-1`.
        allow_http: Allow an endpoint without TLS.
        path_style: Request `https://endpoint/bucket/name`; if false, `https://bucket.endpoint/name`.
        account: Storage account of Azure.
        access_key_id: Id of an S3 access key.
        secret_key: Secret of the S3 access key or of the Azure account.
        secret_key_file: File that contains the secret.
        session_token: Token of temporary S3 credentials.
        service_account_file: JSON file of a Google service account.
        anonymous: Send unsigned requests.
        sign_payload: Send a SHA-256 of each record to S3. Records have checksums of their own.
        ca_file: Certificates to trust in addition to the default ones, as PEM.
        part_bytes: Size of the parts in which longer records are read concurrently.
        concurrency: Maximum number of concurrent lookups, and of other concurrent requests. Each of the latter needs up to
            `part_bytes` outside of the arena.
        connect_timeout_s: Longest time to connect, in seconds.
        request_timeout_s: Longest time of a request, including its content, in seconds.
    """

    url: Annotated[str, BeforeValidator(_parse_url)]
    endpoint: OptionalEndpoint = None
    region: OptionalText = None
    allow_http: Flag = False
    path_style: Flag = True
    account: OptionalText = None
    access_key_id: OptionalText = None
    secret_key: SecretText = None
    secret_key_file: OptionalPath = None
    session_token: SecretText = None
    service_account_file: OptionalPath = None
    anonymous: Flag = False
    sign_payload: Flag = False
    ca_file: OptionalPath = None
    part_bytes: Annotated[Size, Field(ge=4096)] = 8 << 20
    concurrency: Annotated[Count, Field(le=256)] = 16
    connect_timeout_s: Seconds = 5.0
    request_timeout_s: Seconds = 15.0

    @property
    def location(self) -> Location:
        return parse_location(self.url)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        check_one_source(self.secret_key, self.secret_key_file, "secret_key", "secret_key_file")
        if (self.endpoint or "").startswith("http:") and not self.allow_http:
            raise disagree(
                f"endpoint is {self.endpoint}, without TLS: records can be read on the network; use https or set"
                " allow_http: true",
                "endpoint",
                "allow_http",
            )
        has_secret = self.secret_key is not None or self.secret_key_file is not None
        if self.location.kind == "s3" and has_secret != (self.access_key_id is not None):
            raise disagree(
                "access_key_id and secret_key (or secret_key_file) require each other; set both or neither",
                "access_key_id",
                "secret_key",
                "secret_key_file",
                "url",
            )
        for name, kind in _BELONGS.items():
            if getattr(self, name) is not None and self.location.kind != kind:
                raise disagree(f"{name} is only valid for {kind}:// URLs, and url is {self.url}", name, "url")
        return self


_BELONGS = {
    "account": "az",
    "access_key_id": "s3",
    "session_token": "s3",
    "region": "s3",
    "service_account_file": "gs",
}
