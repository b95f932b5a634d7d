"""Facts about values, operations and strategies, without decisions."""
