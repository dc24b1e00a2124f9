"""All mutations."""

from __future__ import annotations

from tools.mutants.apart import APART
from tools.mutants.moved import MOVED
from tools.mutants.stuck import LAYERS, LEASES, WAITS
from tools.mutants.web import WEB
from tools.mutants.wrong import DISK, LAYERWISE, OUTSIDE, RECORDS

MUTATIONS = RECORDS + LAYERWISE + OUTSIDE + DISK + LEASES + LAYERS + WAITS + APART + WEB + MOVED
