"""Random programs on meshes of virtual devices, against one device.

`python benchmarks/random_programs.py [N] [--start SEED] [--missing]`; `--missing` lists the primitives that none has.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import traceback
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> int:
    """Return how many are wrong."""
    import jax
    from harness.generated import Generated
    from jax.extend.core import Primitive

    from jaxdist.ir.interpreter import equations

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--missing", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    logging.getLogger("jaxdist").setLevel(logging.ERROR)
    reached, wrong = set[str](), 0
    for seed in range(given.start, given.start + given.count):
        one = Generated(seed)
        try:
            reached.update(eqn.primitive.name for eqn in equations(one.jaxpr().jaxpr))
            one.run()
        except Exception as error:
            wrong += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"{one}\n  {type(error).__name__}: {str(error)[:600]} ({where.filename}:{where.lineno})", flush=True)
        if seed % 20 == 19:
            print(f"{seed + 1 - given.start} programs, {wrong} wrong", file=sys.stderr, flush=True)
            jax.clear_caches()
    print(f"{given.count} programs, {wrong} wrong, {len(reached)} primitives")
    if given.missing:
        every = {one.name for one in gc.get_objects() if isinstance(one, Primitive)}
        print("never reached:", ", ".join(sorted(every - reached)))
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
