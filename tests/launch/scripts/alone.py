"""MPI that starts as a job of its own, under each of the launchers' variables that are given as JSON."""

import json
import os
import sys

from mpi4py import MPI  # noqa: F401 (before: Open MPI would look for the server of PMIX_RANK)

import jaxdist

for env in json.loads(sys.argv[1]):
    os.environ.update(env)
    try:
        jaxdist.init(timeout=30)
    except RuntimeError as error:
        print(repr(str(error)))
    for name in env:
        del os.environ[name]
