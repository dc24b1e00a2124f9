"""Bounded reading of configuration files, secret files and YAML."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from lmcache_async.errors import ConfigError

MAX_SECRET_BYTES = 64 << 10
MAX_YAML_BYTES = 1 << 18
_MAX_DEPTH = 50  # of nested lists and mappings
_MAX_NODES = 20_000  # after aliases are expanded


def read_bounded(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Read a regular file without waiting; return its content and its mode.

    Raises:
        OSError: The file cannot be read, is not regular or has more than `max_bytes`; `strerror` has the reason.
    """
    if "\0" in str(path):
        raise OSError(0, "the name of a file cannot contain a null character")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO would block
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(0, "it is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"it has more than {max_bytes} bytes")
    return content, stat.S_IMODE(mode)


def read_secret_file(path: Path, name: str) -> bytes:
    """Read a file that other users cannot read.

    Args:
        path: The file.
        name: The option that names the file, for messages.

    Raises:
        ConfigError: The file cannot be read, or all users may read it.
    """
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


class YAMLTextError(Exception):
    """The text is not YAML, or exceeds a limit.

    Attributes:
        line: Line of the error, from 1; None if it has none.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read_yaml(text: str) -> tuple[object, yaml.Node | None]:
    """Parse YAML with plain data types, limited in size, depth and expanded aliases.

    Returns:
        The content and its node; None and None if the text is empty.

    Raises:
        YAMLTextError: The text is not YAML, or exceeds a limit.
    """
    if len(text) > MAX_YAML_BYTES:
        raise YAMLTextError(f"the text has {len(text)} characters, more than {MAX_YAML_BYTES}")
    try:
        loader = _BoundedLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _count(node, {}, [])
            return loader.construct_document(node), node
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise YAMLTextError(f"not YAML: {problem!s:.200}", mark.line + 1 if mark else None) from None
    except (ValueError, OverflowError, AttributeError) as error:  # such as a date of month 13
        raise YAMLTextError(f"a value cannot be read: {error!s:.200}") from None


class _BoundedLoader(yaml.SafeLoader):
    """A safe loader with limits on depth and number of nodes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise YAMLTextError(f"it has more than {_MAX_NODES} values", line)
        if self._depth >= _MAX_DEPTH:
            raise YAMLTextError("it is nested too deep", line)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _count(node: yaml.Node, known: dict[int, int], above: list[int]) -> int:
    """Number of nodes after aliases are expanded."""
    line = node.start_mark.line + 1
    if id(node) in above:
        raise YAMLTextError("an alias contains itself", line)
    if len(above) > 2 * _MAX_DEPTH:  # aliases can add depth
        raise YAMLTextError("it is nested too deep", line)
    total = known.get(id(node))
    if total is None:
        above.append(id(node))
        total = 1 + sum(_count(part, known, above) for part in _parts(node))
        above.pop()
        known[id(node)] = total
    if total > _MAX_NODES:
        raise YAMLTextError(f"it expands to more than {_MAX_NODES} values", line)
    return total


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
