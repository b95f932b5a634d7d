"""What values, operations and strategies are: facts, no decisions."""
