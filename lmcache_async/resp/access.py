"""How a server lets us in: a user and a password, and TLS."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, SecretStr

from lmcache_async.config.explain import disagree
from lmcache_async.config.files import read_secret_file
from lmcache_async.config.values import expand_home, unless_none
from lmcache_async.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def parse_file(value: object) -> Path | None:
    value = unless_none(value)
    if value is not None and not isinstance(value, str | Path):
        raise ValueError("expected the path of a file")
    return None if value is None else expand_home(value)


def check_variable(value: str) -> str:
    """A variable's name; what is none may be the password itself, so no message shows it."""
    if value and not _VARIABLE.fullmatch(value):
        raise disagree("expected the name of a variable that holds the password", "")
    return value


OptionalFile = Annotated[Path | None, BeforeValidator(parse_file)]
Variable = Annotated[str, AfterValidator(check_variable)]


class Credentials:
    """A user and a password; no repr shows it."""

    def __init__(self, username: str, password: SecretStr | None) -> None:
        self.username = username
        self._password = password

    @classmethod
    def read(cls, username: str, file: Path | None, variable: str, prefix: str = "") -> Self:
        """The password from the file or the variable, where one of them is given.

        Args:
            username: "" is the default user.
            file: The option `password_file`.
            variable: The option `password_variable`.
            prefix: Of the options' names, for messages.

        Raises:
            ConfigError: The file or the variable is not there, or the file is open to others.
        """
        password: str | None = None
        if file is not None:
            password = read_password(file, f"{prefix}password_file")
        elif variable:
            password = os.environ.get(variable)
            if not password:
                raise ConfigError(f"{prefix}password_variable: the variable {variable} is not set")
        elif username:
            raise ConfigError(
                f"{prefix}username is {username!r} without a password: set {prefix}password_file or"
                f" {prefix}password_variable"
            )
        return cls(username, None if password is None else SecretStr(password))

    @property
    def command(self) -> tuple[bytes, ...]:
        """The AUTH command; empty where there is nothing to say."""
        if self._password is None:
            return ()
        password = self._password.get_secret_value().encode()
        return (b"AUTH", self.username.encode(), password) if self.username else (b"AUTH", password)


def make_client_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None, *, check_hostname: bool
) -> ssl.SSLContext:
    """TLS as the options `tls_ca_file` and so on say. Reads files.

    Raises:
        ConfigError: A file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca_file: {ca_file} cannot be used: {error}") from error
    context.check_hostname = check_hostname
    if cert_file is not None:
        try:
            context.load_cert_chain(cert_file, key_file)
        except (OSError, ssl.SSLError) as error:
            names = f"tls_cert_file: {cert_file}, tls_key_file: {key_file}"
            raise ConfigError(f"{names}: they cannot be used: {error}") from error
    return context


def read_password(file: Path, name: str) -> str:
    """The file's text without its last line's end.

    Raises:
        ConfigError: It cannot be read, is open to others, or is empty. `name` is the option's.
    """
    password = read_secret_file(file, name).decode("utf-8", "replace").rstrip("\r\n")
    if not password:
        raise ConfigError(f"{name}: {file} is empty")
    return password
