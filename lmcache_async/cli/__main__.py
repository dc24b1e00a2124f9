"""`python -m lmcache_async.cli` is `lmcache-async`."""

from lmcache_async.cli.main import main

main()
