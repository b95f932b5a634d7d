"""The name of the one axis of a job's mesh."""

AXIS = "data"
