"""Placements: how the devices hold each value of a step, inferred and then emitted as one device's program.

| where | what |
|---|---|
| `values` | the placements: Replicated, Split, Partial, Deferred |
| `block` | a step as a flat list of operations |
| `rules` | the table of rules: how each primitive treats the dimensions of its operands |
| `infer`, `walk`, `strategy` | the walk that settles the placement of each value, and its result |
| `summands`, `shapes`, `lookups` | its special rules for operations without bodies |
| `loops`, `control_flow` | its rules for operations with bodies |
| `options`, `search` | the cheapest options of operations, and dimensions for the model axis |
| `products` | options: send examples rather than weights, heads rather than keys and values |
| `marks` | the marks of `jaxdist.zero`, values that lead to them, devices that share a leaf |
| `matrices`, `owners`, `owned` | work on whole matrices: find it, assign it to devices, run it |
| `emit`, `run` | the program of one device, emitted once |
| `buckets` | which collectives are sent together, and when |
| `cost` | the FLOPs, seconds and messages of a placed step |
| `report` | the communication of a step, and the work that every device repeats |
"""

from jaxdist.placements import control_flow, lookups, loops, owned, products, shapes  # noqa: F401  (their rules)
from jaxdist.placements.rules import register

__all__ = ["register"]
