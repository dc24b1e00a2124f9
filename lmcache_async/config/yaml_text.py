"""YAML of a config: plain data alone, bounded in size, depth and in what its aliases unfold to."""

from __future__ import annotations

from typing import Any

import yaml

MAX_BYTES = 1 << 18
_MAX_DEPTH = 50  # of nested lists and mappings
_MAX_NODES = 20_000  # with each alias counted as what it stands for


class YAMLTextError(Exception):
    """The text is no YAML that a config can be made of.

    Attributes:
        line: Where, from 1; None where no line is to blame.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read_yaml(text: str) -> tuple[object, yaml.Node | None]:
    """The content, and the node it was made of; None and None of an empty text.

    Raises:
        YAMLTextError: It is not YAML, or too large, too deep, or its aliases unfold to too much.
    """
    if len(text) > MAX_BYTES:
        raise YAMLTextError(f"{len(text)} characters are more than the {MAX_BYTES} of any config")
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
    """Plain data alone, and no more of it than any config has."""

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
    """How many nodes it unfolds to."""
    line = node.start_mark.line + 1
    if id(node) in above:
        raise YAMLTextError("an alias contains itself", line)
    if len(above) > 2 * _MAX_DEPTH:  # an alias may stand for what is deep itself
        raise YAMLTextError("it is nested too deep", line)
    total = known.get(id(node))
    if total is None:
        above.append(id(node))
        total = 1 + sum(_count(part, known, above) for part in _parts(node))
        above.pop()
        known[id(node)] = total
    if total > _MAX_NODES:
        raise YAMLTextError(f"it unfolds to more than {_MAX_NODES} values", line)
    return total


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
