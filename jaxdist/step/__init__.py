"""The decorated step: trace it once, pass over it, lower it."""
