"""The promises that are taken away one at a time, and which tests must notice each."""

from __future__ import annotations

from tools.mutants.stuck import LEASES, WAITS
from tools.mutants.wrong import DISK, RECORDS

MUTATIONS = RECORDS + DISK + LEASES + WAITS
