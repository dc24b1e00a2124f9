"""`python -m tools.gpu`: tests and measurements on a machine with a GPU, as JSON and one page. See docs/gpu.md."""

import sys

from tools.gpu.command import main
from tools.processes import exit_on_sigterm

if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main(sys.argv[1:]))
