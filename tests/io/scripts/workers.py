"""A loader with worker processes: `workers.py [fails|unguarded]`."""

from __future__ import annotations

import sys

import jax

import jaxdist


class Source:
    """Twelve examples, of which one is bad if it is to fail."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, float]:
        if index == 9 and "fails" in sys.argv:
            raise ValueError("a bad example")
        return {"x": float(index)}


if __name__ == "__main__" or "unguarded" in sys.argv:
    jaxdist.init()
    batches = jaxdist.loader(Source(), 2, shuffle=False, workers=1)
    kept = [jax.numpy.asarray(batch["x"]) for batch in batches]  # in use when the script ends
    jaxdist.barrier()
    print(sum(float(x.sum()) for x in kept))
