"""`python -m lmcache_async.bench NAME [options]`: runs one benchmark."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("scheduler", "checksums")


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments and not arguments[0].startswith("-") else BENCHMARKS[0]
    if name not in BENCHMARKS:
        sys.stderr.write(f"there is no benchmark {name}; there are: {', '.join(BENCHMARKS)}\n")
        return 2
    options = arguments[1:] if arguments[:1] == [name] else arguments
    result: int = importlib.import_module(f"lmcache_async.bench.{name}").main(options)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
