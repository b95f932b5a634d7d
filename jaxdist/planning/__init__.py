"""What a step would take on devices that are not here."""

from jaxdist.planning.fitting import fit
from jaxdist.planning.footprint import Memory, memory
from jaxdist.planning.report import Plan

__all__ = ["Memory", "Plan", "fit", "memory"]
