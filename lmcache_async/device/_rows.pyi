# The compiled module, from _rows.c, which says what its function does.

from _typeshed import ReadableBuffer, WriteableBuffer

def copy(
    memory: WriteableBuffer,
    starts: ReadableBuffer,
    payload: WriteableBuffer,
    row_bytes: int,
    to_payload: bool,
    stream: bool,
    /,
) -> None: ...
