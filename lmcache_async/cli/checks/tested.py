"""What this version was tested with. docs/compatibility.md shows the same."""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = ("3.11",)
"""Minor versions; the first is also the oldest that works."""
UVLOOP = ("0.23",)


@dataclass(frozen=True, slots=True)
class Tested:
    """A version of vLLM under which the connector's tests and a real engine were run.

    Attributes:
        vllm: Its version.
        torch: The one beside it.
    """

    vllm: str
    torch: str

    @property
    def minor(self) -> str:
        return minor(self.vllm)


MATRIX = (
    Tested(vllm="0.32.0", torch="2.13.0"),
    Tested(vllm="0.31.0", torch="2.13.0"),
    Tested(vllm="0.30.0", torch="2.13.0"),
)


def minor(version: str) -> str:
    """`0.32` of `0.32.0+cpu`."""
    return ".".join(version.partition("+")[0].split(".")[:2])
