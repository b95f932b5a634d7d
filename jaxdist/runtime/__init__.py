"""A process of a job: its context, its devices, and the start of JAX and of MPI."""
