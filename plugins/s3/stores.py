"""Client of an object store: created from the config, and its errors translated to TierError."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from lmcache_async.config.files import read_bounded, read_secret_file
from lmcache_async.errors import ConfigError, TierError, TierUnavailableError
from lmcache_async.plugins.s3.config import S3Config

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_MAX_CERTIFICATE_BYTES = 16 << 20
_STATUS = re.compile(r"status code: (\d{3})[^:]*:?")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_QUERY = re.compile(r"\?[^\s\"'<>]*")
_MAX_LENGTH = 300

_REFUSED = (
    "check the credentials and their permissions to read, write, delete and list;"
    " without the permission to list, some stores answer 403 for missing objects"
)
_NO_BUCKET = "the bucket does not exist: create it, or check url, region and endpoint"
_REDIRECTED = "the bucket is in another region or at another endpoint: check region and endpoint"
_CURES = {401: _REFUSED, 403: _REFUSED, 404: _NO_BUCKET, **dict.fromkeys((301, 307, 400), _REDIRECTED)}
"""Advice for error responses, by status."""


def open_store(config: S3Config) -> ObjectStore:
    """Create a client, without connecting."""
    location = config.location
    client: Any
    options: dict[str, Any] = {"skip_signature": config.anonymous}
    match location.kind:
        case "gs":
            client, file = GCSStore, config.service_account_file
            options |= {"base_url": config.endpoint, "service_account": file and str(file)}
        case "az":
            client = AzureStore
            options |= {"endpoint": config.endpoint, "account_name": config.account}
            options["account_key"] = _secret(config)
        case _:
            client, token = S3Store, config.session_token
            options |= {
                "endpoint": config.endpoint,
                "region": config.region,
                "access_key_id": config.access_key_id,
                "secret_access_key": _secret(config),
                "session_token": token and token.get_secret_value(),
                "unsigned_payload": not config.sign_payload,
                "virtual_hosted_style_request": not config.path_style,
                "disable_bulk_delete": True,  # not supported by all S3-compatible stores
            }
    client_options = _client_options(config)
    try:
        store: ObjectStore = client(
            location.bucket,
            prefix=location.prefix or None,
            config={name: value for name, value in options.items() if value is not None},
            client_options=client_options,
            # The retry layer retries, so the client does not.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=config.request_timeout_s)},
        )
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f"{config.url}: {reason(error)}") from None  # its text may contain a secret
    return store


def _client_options(config: S3Config) -> dict[str, Any]:
    options: dict[str, Any] = {
        "allow_http": config.allow_http,
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "timeout": timedelta(seconds=config.request_timeout_s),
        "user_agent": "lmcache-async",
    }
    if config.ca_file is not None:
        try:
            content, _ = read_bounded(config.ca_file, _MAX_CERTIFICATE_BYTES)
        except OSError as error:
            raise ConfigError(f"ca_file: {config.ca_file} cannot be read: {error.strerror}") from None
        options["root_certificate"] = content.decode("utf-8", "replace")
    return options


def _secret(config: S3Config) -> str | None:
    if config.secret_key is not None:
        return config.secret_key.get_secret_value()
    if config.secret_key_file is None:
        return None
    return read_secret_file(config.secret_key_file, "secret_key_file").decode("utf-8", "replace").strip()


def reason(error: BaseException) -> str:
    """Return the cause in one line, without the client's debug text and without queries with signatures."""
    text = str(error).split("\n\nDebug source", 1)[0]
    status = status_of(error)
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if status is not None:
        said = [match[1].strip() for match in (code, message) if match]
        text = ": ".join([f"HTTP {status}", *said])
    else:
        text = text.rsplit(" - ", 1)[-1]
    text = " ".join(_QUERY.sub("", text).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the response; None if there was no response."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def translated(error: BaseException, what: str) -> TierError:
    """Return the TierError for an error of the client while it tried to do `what`."""
    status = status_of(error)
    if status is None and isinstance(error, FileNotFoundError):
        status = 404
    text = f"cannot {what}: {reason(error)}"
    if status in _CURES:
        return TierError(f"{text}; {_CURES[status]}")
    return TierUnavailableError(text)
