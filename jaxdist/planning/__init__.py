"""Estimate the memory, communication and time of a step on hypothetical devices."""

from jaxdist.planning.fitting import fit
from jaxdist.planning.footprint import Memory, memory
from jaxdist.planning.report import Plan

__all__ = ["Memory", "Plan", "fit", "memory"]
