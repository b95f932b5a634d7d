"""Who this rank is: the connector, rank, size, place on its host. `who.py [CONNECTOR] [fail|goes on|late]`."""

import os
import sys
import time

import jaxdist

words = sys.argv[1:]
if "late" in words and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(90)
ctx = jaxdist.init(*[word for word in words if word not in ("fail", "goes on", "late")])
c = ctx.connector
jobs = ctx.connector.broadcast(os.environ.get("SLURM_JOB_ID"))
assert jobs == os.environ.get("SLURM_JOB_ID"), "of another job"
# One write: unbuffered, print() makes one of each argument, and hydra puts those of several ranks on one line.
said = ("job", c.name, c.rank, c.size, c.local_rank, c.local_size, ctx.communicator)
sys.stdout.write(" ".join(map(str, said)) + "\n")
if "goes on" in words:
    time.sleep(60)
if "fail" in words:
    ctx.barrier()
    if ctx.rank == 1:
        raise ValueError("boom on purpose")
    ctx.barrier()
