"""What a run does: metrics, traces, where arrays move."""
