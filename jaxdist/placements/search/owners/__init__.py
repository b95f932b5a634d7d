"""Owners: whole matrices go to one device each, are worked on once, and come back in slices, if that is cheaper.

On slices of a matrix, work such as a Newton-Schulz iteration gathers it repeatedly, or every device repeats it.
`components` finds such work in a block, usually one component per matrix; `assignment` gives each an owner, or leaves
it on slices; `run` sends matrices to their owners and back.

Reference: Anil et al., *Scalable Second Order Optimization for Deep Learning*, arXiv 2002.09018.
"""

from jaxdist.placements.search.owners.assignment import Way, check_split, requested_way, with_owners

__all__ = ["Way", "check_split", "requested_way", "with_owners"]
