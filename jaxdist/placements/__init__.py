"""Placements: how the devices hold each value of a step, inferred and then emitted as one device's program.

Where is what: `values` the placements; `block` the step as a flat list; `describe` and `rules` the table of rules;
`infer` the walk that settles placements, `shapes`, `random_bits`, `control_flow` what it knows of such operations;
`emit` the program of one device.
"""

from jaxdist.placements import control_flow, random_bits, shapes  # noqa: F401  (they enter their rules)
