"""Rank 1 never comes to MPI_Init."""

import os
import time

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(90)

import jaxdist

jaxdist.init()
