# The compiled module. Its functions are documented in _rows.c.

from _typeshed import ReadableBuffer, WriteableBuffer

INTERFACE: int
STREAM_PAGES: int

def copy(
    pieces: list[tuple[WriteableBuffer, ReadableBuffer, WriteableBuffer, int]],
    to_payload: bool,
    stream: int,
    digest: bool = False,
    /,
) -> bytes | None: ...
def open_queue(event: int, /) -> object: ...
def submit(
    queue: object,
    pieces: list[tuple[WriteableBuffer, ReadableBuffer, WriteableBuffer, int]],
    to_payload: bool,
    stream: int,
    /,
) -> int: ...
def withdraw(queue: object, number: int, /) -> bool: ...
def run(queue: object, /) -> None: ...
def finished(queue: object, /) -> list[int]: ...
def close_queue(queue: object, /) -> None: ...
