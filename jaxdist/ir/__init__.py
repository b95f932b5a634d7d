"""A traced step as data: its operations, rules to run them, and their communication."""
