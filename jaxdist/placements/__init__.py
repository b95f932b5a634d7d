"""Placements: how the devices hold each value of a step, inferred and then emitted as one device's program.

| where | what |
|---|---|
| `values` | the placements: Replicated, Split, Partial, Deferred |
| `block` | a step as a flat list of operations |
| `rules`, `registry` | what each operation does to the dimensions of its operands: the table of rules |
| `infer`, `walk`, `strategy` | the walk that settles the placement of each value, and what it settles |
| `summands`, `shapes`, `lookups`, `own_rows`, `random_bits` | what it knows of such operations |
| `loops`, `control_flow` | and of those with bodies |
| `options`, `search` | which options of the operations are taken, and what the model axis cuts: what costs least |
| `products`, `heads` | options: few examples in place of large weights, heads in place of keys and values |
| `marks`, `groups` | what `jaxdist.zero` asks for, what leads to it, and which devices share it |
| `matrices`, `owners`, `owned` | work on whole matrices: found, given to devices, and run by them |
| `emit`, `run` | the program of one device, once |
| `wires` | which summands may travel compressed |
| `buckets` | which collectives travel together, and when |
| `cost` | the FLOPs, seconds and messages of a placed step |
| `report` | what moves, and what every device repeats |
"""

from jaxdist.placements import (  # noqa: F401  (they enter their rules)
    control_flow,
    heads,
    lookups,
    loops,
    own_rows,
    owned,
    products,
    random_bits,
    shapes,
)
from jaxdist.placements.registry import register

__all__ = ["register"]
