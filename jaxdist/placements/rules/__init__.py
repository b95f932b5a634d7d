"""The strategies of an operation, by the placements of its operands."""
