"""Check whether the program of the devices is the step: both are evaluated in a finite field."""
