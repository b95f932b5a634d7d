"""Eight virtual CPU devices and float64 for every test; processes of an MPI job have one device each."""

from __future__ import annotations

import os
from typing import Any

if "OMPI_COMM_WORLD_SIZE" not in os.environ and "PMI_SIZE" not in os.environ:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_ENABLE_X64", "1")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """`-m "not jobs"` can run on several cores at once; tests that start processes want the machine for themselves."""
    for item in items:
        if {"launch", "subprocess"} & set(vars(item.module)) or item.path.parent.name in ("cli", "hosts"):
            item.add_marker("jobs")
