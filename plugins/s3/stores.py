"""Client of an object store: created from the config, and its errors translated to TierError."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from lmcache_async.config.files import read_bounded, read_secret_file
from lmcache_async.errors import ConfigError, TierError, TierUnavailableError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from lmcache_async.plugins.s3.config import S3Config

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


def open_store(config: S3Config) -> ObjectStore:
    """Create a client, without connecting.

    Raises:
        ConfigError: A file cannot be read, or the options are invalid.
    """
    location = config.location
    options: dict[str, Any] = {
        "client_options": _client_options(config),
        # The retry layer retries, so the client does not.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=config.request_timeout_s)},
    }
    prefix = location.prefix or None
    try:
        if location.kind == "gs":
            return GCSStore(location.bucket, prefix=prefix, config=_google(config), **options)
        if location.kind == "az":
            return AzureStore(location.bucket, prefix=prefix, config=_azure(config), **options)
        return S3Store(location.bucket, prefix=prefix, config=_s3(config), **options)
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f"{config.url}: {reason(error)}") from None  # its text may contain a secret


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


def _s3(config: S3Config) -> Any:
    return _given(
        endpoint=config.endpoint,
        region=config.region,
        access_key_id=config.access_key_id,
        secret_access_key=_secret(config),
        session_token=config.session_token and config.session_token.get_secret_value(),
        skip_signature=config.anonymous,
        unsigned_payload=not config.sign_payload,
        virtual_hosted_style_request=not config.path_style,
        disable_bulk_delete=True,  # not supported by all S3-compatible stores
    )


def _google(config: S3Config) -> Any:
    file = config.service_account_file
    return _given(
        base_url=config.endpoint,
        service_account=None if file is None else str(file),
        skip_signature=config.anonymous,
    )


def _azure(config: S3Config) -> Any:
    return _given(
        endpoint=config.endpoint,
        account_name=config.account,
        account_key=_secret(config),
        skip_signature=config.anonymous,
    )


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


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
    """Return the TierError for an error of the client.

    Args:
        error: The client's error.
        what: The failed operation and its place, for the message.
    """
    status = status_of(error)
    text = f"cannot {what}: {reason(error)}"
    if status in {401, 403}:
        return TierError(f"{text}; {_REFUSED}")
    if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
        return TierError(f"{text}; {_NO_BUCKET}")
    if status in {301, 307, 400}:
        return TierError(f"{text}; {_REDIRECTED}")
    return TierUnavailableError(text)
