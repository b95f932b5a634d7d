"""Damages checkpoints at random and restores them: `python tests/checkpoint/damage.py COUNT SEED`.

Each time a few bits, bytes or files of a copy are changed. What is restored must then be bit for bit what was saved,
or there must be a `CheckpointError`. The tally is printed; the exit code is 1 if anything else came back.
"""

from __future__ import annotations

import collections
import os
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from states import bits

import jaxdist

STEPS = (10, 20, 30)


def state(step: int) -> dict[str, Any]:
    """Another one for each step; leaves of all kinds, in shards and whole, that compress and that do not."""
    rng = np.random.default_rng(step)
    wide = {"even": rng.normal(size=(16, 40)), "padded": np.full((9, 5), float(step))}
    return {
        "wide": jaxdist.shard(wide),
        "half": jnp.asarray(rng.normal(size=(8, 24)), jnp.bfloat16),
        "bytes": rng.integers(0, 255, 3000, np.uint8),
        "zeros": np.zeros((64, 64), np.float32) + (step == 20),
        "same": np.arange(12.0),
        "scalar": np.float32(step),
        "key": jax.random.key(step),
        "step": step,
        "flag": step == 20,
        "text": f"step {step}",
        "none": None,
    }


def files(directory: Path) -> list[Path]:
    """All that a checkpoint consists of."""
    return sorted(p for p in directory.rglob("*") if p.is_file())


def change_bytes(file: Path, rng: random.Random) -> None:
    """Other bits, or other bytes, or more or fewer of them."""
    content = bytearray(file.read_bytes())
    at = rng.randrange(len(content))
    match rng.randrange(8):
        case 0 | 1 | 2:
            content[at] ^= 1 << rng.randrange(8)
        case 3:
            for _ in range(rng.randrange(2, 20)):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case 4:
            end = min(len(content), at + rng.choice((2, 8, 64, 512)))
            content[at:end] = rng.choice((bytes(end - at), rng.randbytes(end - at)))
        case 5:
            del content[at:]
        case 6:
            content += rng.randbytes(rng.randrange(1, 100))
        case 7:
            length = rng.choice((1, 4, 16, 64))
            del content[at : at + length]
            content[at:at] = rng.randbytes(rng.choice((0, length)))
    file.write_bytes(content)


def swap(a: Path, b: Path) -> None:
    """Exchange the contents of two files, or of two directories."""
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def damage(path: Path, rng: random.Random) -> str:
    """Do something to the last checkpoint in a directory; what it was."""
    last, other = path / "30", path / rng.choice(("10", "20"))
    mine, theirs = files(last), files(other)
    file = rng.choice(mine)
    what = rng.choice(("bytes",) * 6 + ("delete", "swap", "swap", "copy", "within", "directories", "folder"))
    match what:
        case "bytes":
            change_bytes(file, rng)
        case "delete":
            for gone in {file, rng.choice(mine)}:
                gone.unlink()
        case "swap" | "copy":
            # The data have random names: the k-th of the one for the k-th of the other.
            twin = other / file.relative_to(last)
            if not twin.exists():
                place = [f for f in mine if f.parent == file.parent].index(file)
                beside = [f for f in theirs if f.parent == other / file.parent.relative_to(last)]
                twin = beside[place % len(beside)]
            if what == "swap":
                swap(file, twin)
            else:
                shutil.copyfile(twin, file)
        case "within":
            swap(file, rng.choice([f for f in mine if f != file]))
        case "directories":
            name = rng.choice(("default", ""))
            swap(last / name, other / name)
        case "folder":
            folder = rng.choice([p for p in last.rglob("*") if p.is_dir()])
            shutil.rmtree(folder)
    return what


def run(count: int, seed: int, where: Path) -> collections.Counter[str]:
    """How often which damage was told or did not matter; "SILENT": other weights came back; "RAW": another error."""
    good, bad = where / "good", where / "bad"
    for step in STEPS:
        jaxdist.save(good, state(step), step)
    leaves = lambda tree: jax.tree.map(bits, jaxdist.unshard(tree))
    expected = {step: leaves(state(step)) for step in STEPS}
    tally: collections.Counter[str] = collections.Counter()
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        what = damage(bad, rng)
        fallback = rng.random() < 0.25
        try:
            got = jaxdist.restore(bad, state(0), fallback=fallback)
        except jaxdist.CheckpointError:
            tally[f"{what}: told"] += 1
            continue
        except BaseException:
            traceback.print_exc()
            tally["RAW"] += 1
            print(f"RAW: {what}, number {i} of seed {seed}", flush=True)
            continue
        found = [step for step in STEPS if leaves(got) == expected[step]]
        if found == [30]:
            tally[f"{what}: the same bits"] += 1
        elif found and fallback:
            tally[f"{what}: told, and the one before restored"] += 1
        else:
            tally["SILENT"] += 1
            print(f"SILENT: {what}, number {i} of seed {seed}: restored {found or 'something else'}", flush=True)
    return tally


if __name__ == "__main__":
    # So many lines about what was passed over say nothing.
    jaxdist.init().control.say = lambda message: None  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        tally = run(int(sys.argv[1]), int(sys.argv[2]), Path(scratch))
    for name, times in sorted(tally.items()):
        print(f"{times:6} {name}")
    print(f"{sum(tally.values()):6} damages, {tally['SILENT']} silent loads, {tally['RAW']} other errors")
    sys.exit(1 if tally["SILENT"] or tally["RAW"] else 0)
