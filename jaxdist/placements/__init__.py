"""Placements: how the devices hold each value of a step, inferred and then emitted as one device's program.

Four rooms, each aware of those before it: `model`, facts about values and operations; `rules`, the strategies of an
operation; `search`, which chooses among them; `emit`, which writes the program. Between rules and search stands
`propagate`, which places a block. CONTRIBUTING.md follows a step through them.
"""

from jaxdist.placements.model import grids, named_kernels  # noqa: F401  (their rules)
from jaxdist.placements.rules import (  # noqa: F401  (their rules)
    along,
    branches,
    effects,
    kernels,
    lookups,
    loops,
    own_code,
    partitioned,
    products,
    shapes,
)
from jaxdist.placements.rules.kernels import register
from jaxdist.placements.search.owners import run  # noqa: F401  (its rule)

__all__ = ["register"]
