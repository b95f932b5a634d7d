"""The choice among strategies: slices of state, owners, and the model's axes, by their cost."""
