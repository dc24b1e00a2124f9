# The compiled module. Its function is documented in _publish.c.

from _typeshed import ReadableBuffer

def publish_file(
    directory: int,
    temporary: str,
    flags: int,
    data: ReadableBuffer,
    stamp: int,
    folder: str,
    name: str,
    /,
) -> tuple[int, bool]: ...
