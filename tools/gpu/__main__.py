"""`python -m tools.gpu`: tests and measurements on a machine with a GPU, as JSON and one page. See docs/gpu.md."""

import sys

from tools.gpu.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
