"""`python -m tools.benchmarks NAME [options]`: run one benchmark, or `all`. See docs/benchmarks.md."""

import sys

from tools.benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
