"""Client of an object store, created from the config."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from lmcache_async.config.files import read_bounded
from lmcache_async.errors import ConfigError
from lmcache_async.plugins.s3.errors import reason

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore

    from lmcache_async.plugins.s3.config import S3Config

_MAX_SECRET_BYTES = 64 << 10
_MAX_CERTIFICATE_BYTES = 16 << 20


def open_store(config: S3Config) -> ObjectStore:
    """Create a client, without connecting.

    Raises:
        ConfigError: A file cannot be read, or the options are invalid.
    """
    place = config.place
    options: dict[str, Any] = {
        "client_options": _client_options(config),
        # The retry layer retries, so the client does not.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=config.request_timeout_s)},
    }
    prefix = place.prefix or None
    try:
        if place.kind == "gs":
            return GCSStore(place.bucket, prefix=prefix, config=_google(config), **options)
        if place.kind == "az":
            return AzureStore(place.bucket, prefix=prefix, config=_azure(config), **options)
        return S3Store(place.bucket, prefix=prefix, config=_s3(config), **options)
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
        options["root_certificate"] = _read(config.ca_file, "ca_file", _MAX_CERTIFICATE_BYTES)[0]
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
    content, mode = _read(config.secret_key_file, "secret_key_file", _MAX_SECRET_BYTES)
    if mode & 0o007:
        raise ConfigError(
            f"secret_key_file: {config.secret_key_file} has mode {mode:04o}, so everybody may read it: chmod 600 it"
        )
    return content.strip()


def _read(file: Path, name: str, max_bytes: int) -> tuple[str, int]:
    try:
        content, mode = read_bounded(file, max_bytes)
    except OSError as error:
        raise ConfigError(f"{name}: {file} cannot be read: {error.strerror}") from None
    return content.decode("utf-8", "replace"), mode
