"""`python -m lmcache_async.bench NAME [options]`: runs one benchmark, or `all`."""

import sys

from lmcache_async.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
