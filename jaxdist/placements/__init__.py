"""Placements: how the devices hold each value of a step, inferred and then emitted as one device's program.

| where | what |
|---|---|
| `values` | the placements: Replicated, Split, Partial, Deferred |
| `block` | a step as a flat list of operations |
| `rules` | what each operation does to the dimensions of its operands: the table of rules |
| `infer`, `walk`, `strategy` | the walk that settles the placement of each value, and what it settles |
| `summands`, `shapes`, `lookups` | what it knows of such operations |
| `loops`, `control_flow` | and of those with bodies |
| `options`, `search` | which options of the operations are taken, and what the model axis cuts: what costs least |
| `products` | options: few examples in place of large weights, heads in place of keys and values |
| `marks` | what `jaxdist.zero` asks for, what leads to it, and which devices share it |
| `matrices`, `owners`, `owned` | work on whole matrices: found, given to devices, and run by them |
| `emit`, `run` | the program of one device, once |
| `buckets` | which collectives travel together, and when |
| `cost` | the FLOPs, seconds and messages of a placed step |
| `report` | what moves, and what every device repeats |
"""

from jaxdist.placements import control_flow, lookups, loops, owned, products, shapes  # noqa: F401  (their rules)
from jaxdist.placements.rules import register

__all__ = ["register"]
