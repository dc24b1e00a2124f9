"""Bounded reading of configuration files, secret files and YAML."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from typing import Any

import yaml

from lmcache_async.errors import ConfigError

MAX_SECRET_BYTES = 64 << 10
MAX_YAML_BYTES = 1 << 18
_MAX_DEPTH = 50  # of nested lists and mappings
_MAX_NODES = 20_000


def read_bounded(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Return content and mode of a regular file, without blocking. An OSError has the reason in `strerror`."""
    try:
        # Opening a FIFO would block without O_NONBLOCK.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except ValueError:
        raise OSError(0, "the name of a file cannot contain a null character or invalid Unicode") from None
    with file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(0, "it is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"it has more than {max_bytes} bytes")
    return content, stat.S_IMODE(mode)


def read_secret_file(path: Path, name: str) -> bytes:
    """Read a file that other users cannot read. `name` is the option that names it, for messages."""
    try:
        content, mode = read_bounded(path, MAX_SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from None
    if mode & 0o007:
        raise ConfigError(
            f"{name}: {path} has mode {mode:04o}, so all users may read it:"
            " chmod 600 it (in Kubernetes set the secret's defaultMode to 0400)"
        )
    return content


def load_certificate(context: ssl.SSLContext, cert_file: Path, key_file: Path | None) -> None:
    """Load a certificate and its key, which may be in the same file."""

    def refuse_password() -> str:  # by default OpenSSL would wait for it at the terminal
        raise OSError("the key has a password; use a key without one")

    context.load_cert_chain(cert_file, key_file, refuse_password)


class YAMLTextError(Exception):
    """The text is not YAML, or exceeds a limit. `line` is the line of the error, or None if it is not known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read_yaml(text: str) -> tuple[object, YAMLLines]:
    """Parse YAML with plain data types, limited in size, depth and expanded aliases; return the lines of its keys too."""
    if len(text) > MAX_YAML_BYTES:
        raise YAMLTextError(f"the text has {len(text)} characters, more than {MAX_YAML_BYTES}")
    lines = YAMLLines()
    try:
        loader = _BoundedLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            lines.visit(node, ())
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise YAMLTextError(f"not YAML: {problem!s:.200}", mark.line + 1 if mark else None) from None
    except (ValueError, OverflowError, AttributeError) as error:  # such as a date of month 13
        raise YAMLTextError(f"a value cannot be read: {error!s:.200}") from None


class YAMLLines:
    """Lines of the keys of a document, from 1.

    Attributes:
        lines: Line of each key and list item, by its path.
        repeated: Keys that are set twice, with the later and the first line. YAML keeps the last value.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.repeated: list[tuple[tuple[str | int, ...], int, int]] = []
        self._above: list[yaml.Node] = []
        self._nodes = 0

    def visit(self, node: yaml.Node, path: tuple[str | int, ...], key_line: int = 1) -> None:
        """Add the keys of a node with its aliases expanded."""
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise YAMLTextError(f"the text expands to more than {_MAX_NODES} values", key_line)
        if node in self._above:
            raise YAMLTextError("an alias contains itself", key_line)
        if len(self._above) > _MAX_DEPTH:  # aliases can add depth
            raise YAMLTextError("the text is nested too deeply", key_line)
        self._above.append(node)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner, line = (*path, str(key.value)), key.start_mark.line + 1
                if inner in self.lines and inner[-1] != "<<":
                    self.repeated.append((inner, line, self.lines[inner]))
                self.lines[inner] = line
                self.visit(value, inner, key_line if path else line)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[*path, index] = item.start_mark.line + 1
                self.visit(item, (*path, index), key_line)
        self._above.pop()


class _BoundedLoader(yaml.SafeLoader):
    """A safe loader with limits on depth and number of nodes."""

    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        self._nodes += 1
        self._depth += 1
        if self._nodes > _MAX_NODES:
            raise YAMLTextError(f"the text has more than {_MAX_NODES} values", line)
        if self._depth > _MAX_DEPTH:
            raise YAMLTextError("the text is nested too deeply", line)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node
