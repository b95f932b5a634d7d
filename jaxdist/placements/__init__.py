"""Placements: how the devices hold each value of a step, inferred and then emitted as one device's program.

In this order: `values`, `block`, `rules`; `propagate`, which places a block with the rules of the other modules, and
`infer`, which places all blocks; `emit`; `buckets`. CONTRIBUTING.md follows a step through them.
"""

from jaxdist.placements import control_flow, lookups, loops, owned, products, shapes  # noqa: F401  (their rules)
from jaxdist.placements.rules import register

__all__ = ["register"]
