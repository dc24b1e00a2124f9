"""All mutations."""

from __future__ import annotations

from tools.mutants.disaggregated import DISAGGREGATED
from tools.mutants.groups import GROUPS
from tools.mutants.integrity import DISK, LAYERWISE, OUTSIDE, RECORDS
from tools.mutants.liveness import LAYERS, LEASES, WAITS
from tools.mutants.maintenance import MAINTENANCE
from tools.mutants.web import WEB

MUTATIONS = (
    RECORDS
    + LAYERWISE
    + OUTSIDE
    + DISK
    + LEASES
    + LAYERS
    + WAITS
    + DISAGGREGATED
    + WEB
    + MAINTENANCE
    + GROUPS
)
