"""One device's program, written as the propagation says."""
