"""Compare published training steps, unchanged except for the decorator, with one device.

    python benchmarks/compatibility.py --sources DIR [NAME ...] [--markdown benchmarks/results/published.md]

DIR holds a checkout of each repository at the commit in published/source.py (`--list` prints them). Each
step trains on 1, 2 and 4 virtual devices, at each ZeRO level if it has an optax transformation, and on two
processes over both communicators (started by `jaxdist run`). Results are compared with one device under
the step's own decorator. Named steps replace their entries in benchmarks/results/compatibility.json.
`--markdown` alone writes the page from that file, and needs no checkouts. Besides jaxdist's packages this
needs diffrax, dm-haiku, dm-tree, numpyro, einops, jraph, ml_collections and clu.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "compatibility.json"
DEVICES = (1, 2, 4)
LEVELS = (1, 2, 3)
COMMUNICATORS = ("xla", "mpi")
EXACT, EXACT32 = 1e-10, 1e-6
"""Relative tolerances in float64 and float32."""
FLOOR = 1e-6
"""The smallest divisor of a leaf's difference: values that should be zero contain only rounding."""
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compilation dominates; results do not change
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
FLAGS = f"--xla_force_host_platform_device_count={2 * max(DEVICES)}"
Numbers = list[dict[str, Any]]


class Expected(NamedTuple):
    """The results of an entry on one device.

    Attributes:
      numbers: values after each step.
      itself: per leaf, the effect of changing the last digit of the first call's floats.
    """

    numbers: Numbers
    itself: dict[str, float]


class Step(NamedTuple):
    """The placement of a step that a run compiled for several devices.

    Attributes:
      split: whether it got examples, with each device getting its part.
      repeated: the share of its work that every device repeats.
    """

    split: bool
    repeated: float


@contextlib.contextmanager
def split() -> Iterator[list[Step]]:
    """Collect the steps that are placed within this context."""
    from jaxdist.compilation.placed import PlacedStep
    from jaxdist.placements import report
    from jaxdist.placements.model.values import Split

    shipped, steps = PlacedStep.place, []

    def place(self: PlacedStep) -> Any:
        closed, found = shipped(self)
        for one in found:
            examples = any(isinstance(one.in_forms[i], Split) for i in self.signature.batch)
            repeated = sum(row.share for row in report.rows([one]) if row.what == "repeated")
            steps.append(Step(examples, repeated))
        return closed, found

    PlacedStep.place = place  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        PlacedStep.place = shipped


def compare(expected: Numbers, got: Numbers) -> dict[str, float]:
    """Return the largest difference between two trainings, per leaf, relative to its largest value."""
    import numpy as np

    worst: dict[str, float] = {}
    if len(expected) != len(got):
        raise ValueError(f"{len(got)} steps for {len(expected)}")
    for ours, theirs in zip(expected, got, strict=True):
        if ours.keys() != theirs.keys():
            raise ValueError(f"other leaves: {sorted(ours.keys() ^ theirs.keys())[:4]}")
        for path, a in ours.items():
            b = theirs[path]
            if a.shape != b.shape:
                raise ValueError(f"{path}: shape {b.shape} for {a.shape}")
            x, y = a.astype(float), b.astype(float)
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            scale = max(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0.0), FLOOR)
            with np.errstate(invalid="ignore"):  # infinities
                apart = np.where(same, 0, np.abs(x - y) / scale)
            apart = np.where(np.isnan(apart), np.inf, apart).max(initial=0.0)
            worst[path] = max(worst.get(path, 0.0), float(apart))
    return worst


def numbers(tree: Any) -> dict[str, Any]:
    """Return the arrays that a loop yields, whole, by path."""
    import jax
    import numpy as np
    from flax import nnx

    import jaxdist

    plain = jax.tree.map(
        lambda x: nnx.state(x) if isinstance(x, nnx.Pytree) else x, tree, is_leaf=lambda x: isinstance(x, nnx.Pytree)
    )
    found = [
        (jax.tree_util.keystr(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(plain)
        if isinstance(x, (jax.Array, np.ndarray, np.generic, float, int)) or type(x).__name__ == "Padded"
    ]
    whole = jaxdist.unshard([x for _, x in found])
    out = {}
    for (path, _), x in zip(found, whole, strict=True):
        keys = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        out[path] = np.asarray(jax.random.key_data(x) if keys else x)
    return out


def nudged(decorate: Callable[[Any], Any], bits: int) -> Callable[[Any], Any]:
    """Return a decorator that changes the last digit of the floats in its first call."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    noise = np.random.default_rng(1)

    def other(x: Any) -> Any:
        if not isinstance(x, (jax.Array, np.ndarray)) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if (x == jnp.round(x)).all():  # classes, or values that must be 0 or 1
            return x
        return (x * (1 + noise.uniform(-1, 1, x.shape) * 2.0 ** (1 - bits))).astype(x.dtype)

    def wrap(step: Any) -> Any:
        decorated, first = decorate(step), [True]

        def call(*args: Any) -> Any:
            if first:
                first.clear()
                for x in (x for x in args if isinstance(x, nnx.Pytree)):
                    nnx.update(x, jax.tree.map(other, nnx.state(x)))
                args = tuple(x if isinstance(x, nnx.Pytree) else jax.tree.map(other, x) for x in args)
            return decorated(*args)

        return call

    return wrap


def train(
    entry: Any, decorate: Callable[[Any], Any], level: Any = 0, rank: int = 0, size: int = 1
) -> tuple[Numbers, bool]:
    """Train an entry; return its loop's values, and whether it has an optax transformation."""
    import jax
    import published

    import jaxdist

    asked = []

    def zero(tx: Any) -> Any:
        asked.append(tx)
        return jaxdist.zero(tx, level) if level else tx

    def part(tree: Any) -> Any:
        rows = lambda x: x[rank * len(x) // size : (rank + 1) * len(x) // size]
        return tree if size == 1 else jax.tree.map(rows, tree)

    steps = [numbers(out) for out in entry.loop(published.Run(decorate, zero, part))]
    return steps, bool(asked)


def decorator(entry: Any, devices: int | None = None) -> Callable[[Any], Any]:
    """Return `data_parallel` for this many devices of this process, or for the job's."""
    import functools

    import jax

    import jaxdist

    settings: dict[str, Any] = {} if entry.batch is None else {"batch_argnums": entry.batch}
    if devices is not None:
        settings["mesh"] = jax.sharding.Mesh(jax.devices()[:devices], ("data",))
    return functools.partial(jaxdist.data_parallel, **settings)


def halved(names: Sequence[str], leaves: Sequence[Any], seed: str) -> dict[str, int]:
    """Return layouts that cut three in four leaves with an even dimension, along the largest."""
    import random

    import jax
    import numpy as np

    rng, found = random.Random(seed), {}
    for name, x in zip(names, leaves, strict=True):
        keys = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        shape = () if keys else np.shape(x)
        even = [d for d, n in enumerate(shape) if n and n % 2 == 0]
        if even and rng.random() < 0.75:
            found[f"^{re.escape(name)}$"] = max(even, key=lambda d: shape[d])
    return found


def over(entry: Any, sizes: dict[str, int], cuts: list[int]) -> Callable[[Any], Any]:
    """Return `parallel` on a mesh of virtual devices, with `halved` layouts of the arguments.

    Args:
      entry: the entry to run.
      sizes: the sizes of the mesh axes.
      cuts: receives the number of cut leaves for each kind of call.
    """
    import math

    import jax
    import numpy as np

    import jaxdist

    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(list(sizes.values()))
    settings: dict[str, Any] = {"mesh": jax.sharding.Mesh(devices, tuple(sizes))}
    if entry.batch is not None:
        settings["batch_argnums"] = entry.batch

    def decorate(step: Any) -> Any:
        probe: Any = jaxdist.parallel(step, **settings, layouts={})
        steps: dict[Any, Any] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            probe._bind_context()
            signature, leaves = probe._signature(*probe._arguments(args, kwargs))
            at = signature.state
            layouts = halved([signature.names[i] for i in at], [leaves[i] for i in at], entry.name)
            key = tuple(layouts.items())
            if key not in steps:
                steps[key] = jaxdist.parallel(step, **settings, layouts=layouts)
                cuts.append(len(layouts))
            return steps[key](*args, **kwargs)

        return call

    return decorate


def over_mesh(entry: Any, sizes: dict[str, int]) -> str:
    """Run an entry on a mesh; return ``"right: ..."``, ``"wrong: ..."`` or ``"refused: ..."``."""
    reference, _ = train(entry, entry.reference)
    again, _ = train(entry, nudged(entry.reference, 24 if entry.float32 else 53))
    known, cuts = Expected(reference, compare(reference, again)), list[int]()
    found = attempt(entry, known, lambda: train(entry, over(entry, sizes, cuts)))
    if "error" in found:
        return f"refused: {found['error']}"
    said = f"{number(found['difference'])} at {found['where']}, {sum(cuts)} leaves cut, {found['seconds']} s"
    return f"{'right' if found['beyond'] <= 1 else 'wrong'}: {said}"


def attempt(entry: Any, expected: Expected, run: Callable[[], tuple[Numbers, bool]]) -> dict[str, Any]:
    """Return a cell: the largest difference, absolute and per leaf's tolerance, or an error's line.

    The tolerance is the last digits, or ten times their effect on one device if a reason is given.
    """
    start, steps = time.monotonic(), []
    try:
        with split() as steps:
            apart = compare(expected.numbers, run()[0])
        least = EXACT32 if entry.float32 else EXACT
        beyond = {k: x / max(least, 10 * expected.itself[k] if entry.reason else 0.0) for k, x in apart.items()}
        where = max(beyond, key=lambda k: beyond[k])
        found: dict[str, Any] = {"difference": max(apart.values()), "beyond": beyond[where], "where": where}
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]}
    if steps:  # several devices
        found |= {"split": any(s.split for s in steps)}
        found["repeated"] = round(max((s.repeated for s in steps if s.split), default=0.0), 4)
    return found | {"seconds": round(time.monotonic() - start, 1)}


def here(entry: Any, expected: Path, old: dict[str, Any], wanted: re.Pattern[str]) -> dict[str, Any]:
    """Run an entry on this process's virtual devices; keep the reference in the file `expected`."""
    from published.source import COMMITS, MissingSourceError

    repository, commit = COMMITS[entry.path.partition("/")[0]]
    path = entry.path.partition("/")[2]
    result: dict[str, Any] = {
        "repository": repository, "commit": commit, "path": path, "function": entry.function, "style": entry.style,
        "batch_argnums": entry.batch, "reason": entry.reason, "runs": old.get("runs", {}),
    }  # fmt: skip
    try:
        reference, levels = train(entry, entry.reference)
        again, _ = train(entry, nudged(entry.reference, 24 if entry.float32 else 53))
    except MissingSourceError as error:
        return result | {"missing": str(error)}
    known = Expected(reference, compare(reference, again))
    expected.write_bytes(pickle.dumps(tuple(known)))
    result["steps"], result["leaves"] = len(reference), len(reference[-1])
    result["itself"] = max(known.itself.values())
    result["runs"] = {k: v for k, v in result["runs"].items() if not wanted.search(k)}
    for devices, level in [(n, 0) for n in DEVICES] + [(max(DEVICES), level) for level in LEVELS if levels]:
        if wanted.search(name(devices, level)):
            run = lambda devices=devices, level=level: train(entry, decorator(entry, devices), level)
            result["runs"][name(devices, level)] = attempt(entry, known, run)
    return result


def name(devices: int, level: int = 0) -> str:
    """Return the name of a run."""
    return f"{devices} device{'s' if devices > 1 else ''}" + (f", level {level}" if level else "")


def as_rank(names: Sequence[str], folder: Path) -> None:
    """Run each entry as one process of a job, and write results to files in the folder."""
    import published

    import jaxdist

    context = jaxdist.init()
    for entry in (published.load_all()[n] for n in names):
        expected = Expected(*pickle.loads((folder / f"{entry.name}.pickle").read_bytes()))
        found = attempt(
            entry, expected, lambda entry=entry: train(entry, decorator(entry), 0, context.rank, context.size)
        )
        (folder / f"{entry.name}.{context.rank}.json").write_text(json.dumps(found))


def on_ranks(names: Sequence[str], folder: Path, communicator: str) -> dict[str, Any]:
    """Return each entry's worse result of two processes. If a job ends early, a new one continues."""
    results: dict[str, Any] = {}
    left = list(names)
    while left:
        for file in folder.glob("*.json"):
            file.unlink()
        command = [
            sys.executable, "-m", "jaxdist", "run", "-n", "2", str(Path(__file__)), "--ranks", str(folder), *left,
        ]  # fmt: skip
        env, seconds = os.environ | {"JAXDIST_COMMUNICATOR": communicator}, 180 + 60 * len(left)
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=env)
            lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            said = next((line for line in lines if line.startswith("[jaxdist rank")), lines[-1])
        except subprocess.TimeoutExpired:
            said = "no end"
        for entry in list(left):
            files = [folder / f"{entry}.{rank}.json" for rank in range(2)]
            done = all(file.exists() for file in files)
            found = (
                [json.loads(file.read_text()) for file in files]
                if done
                else [{"error": f"the job ended: {said}"[:300]}]
            )
            results[entry] = max(found, key=lambda f: f.get("difference", float("inf")))
            left.remove(entry)
            if not done:
                break
    return results


# --- the page


def exact(result: dict[str, Any]) -> bool:
    """Check whether all runs of a step match as closely as possible."""
    runs = result["runs"].values()
    return bool(runs) and all(run.get("beyond", float("inf")) <= 1 for run in runs)


def worst(result: dict[str, Any]) -> float:
    """Return the largest difference of all runs."""
    return max((run.get("difference", float("inf")) for run in result["runs"].values()), default=float("inf"))


def placed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs on several devices, if in all of them each device got its part of the examples."""
    runs = [run for run in result["runs"].values() if "split" in run]
    return runs if all(run["split"] for run in runs) else []


def ran(result: dict[str, Any]) -> str:
    """Describe the runs on several devices in words."""
    return "split" if placed(result) else "no batch"


def number(x: float) -> str:
    """Format with two digits."""
    return "0" if not x else f"{x:.0e}".replace("e-0", "e-") if x < float("inf") else "inf"


def share(result: dict[str, Any]) -> str:
    """Return the largest share of repeated work in any run."""
    most = max((run["repeated"] for run in placed(result)), default=0.0)
    return f"{most:.0%}" if most >= 0.005 else ""


def conditions(result: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of devices, levels and wires of the runs, and their results."""
    runs = result["runs"]
    levels = ["0"] * any("device" in run and "level" not in run for run in runs) + [
        run[-1] for run in runs if "level" in run
    ]
    return {
        "devices": ", ".join(sorted({run.split()[0] for run in runs if "device" in run})),
        "levels": ", ".join(levels),
        "wires": ", ".join(run.rpartition(" ")[2] for run in runs if "ranks" in run),
        "run": ran(result),
    }


def line(result: dict[str, Any], usual: dict[str, str]) -> str:
    """Return a table row; notes list unusual conditions."""
    errors = sorted({f"{where}: {run['error']}" for where, run in result["runs"].items() if "error" in run})
    notes = [f"{name}: {x}." for name, x in conditions(result).items() if x != usual[name]]
    if share(result):
        notes.append(f"Repeated: {share(result)}.")
    if result["reason"]:
        notes.append(result["reason"])
        if worst(result) > EXACT and not errors:
            notes.append(f"One device with its floats changed in the last digit: {number(result['itself'])}.")
    if result["batch_argnums"] is not None:
        notes.append(f"`batch_argnums={tuple(result['batch_argnums'])!r}`.")
    path = result["path"].replace("/", "/<wbr>").replace("_", "_<wbr>")
    link = f"[{path}](https://github.com/{result['repository']}/blob/{result['commit']}/{result['path']})"
    cells = [
        f"{result['repository'].rpartition('/')[2]}: {link}<br>{result['function']}<br>{result['style']}",
        number(worst(result)) if not errors else "", " ".join([*notes, *errors]),
    ]  # fmt: skip
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def page(found: dict[str, Any]) -> str:
    """Return the Markdown page of the results."""
    results = [r for r in found["results"].values() if "missing" not in r]
    good = [r for r in results if exact(r)]
    told = [r for r in results if r["batch_argnums"] is not None]
    sources = {(r["repository"], r["commit"]) for r in results}
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    parts = [r for r in results if ran(r) == "split"]
    columns = [conditions(r) for r in results]
    usual = {name: Counter(each[name] for each in columns).most_common(1)[0][0] for name in columns[0]}
    return f"""\
# Published steps

These are training steps that others have published. Only the decorator is changed, and an optax transformation is
wrapped in `jaxdist.zero`. {len(good)} of {len(results)} do what one device does; {len(told)} of them need \
`batch_argnums`.
`benchmarks/compatibility.py` reads the files from checkouts of {len(sources)} repositories, and gives the steps small \
models and data.

Each trains for three steps on {usual["devices"]} devices, at ZeRO levels {usual["levels"]}, and on two processes over
{usual["wires"]}; the notes say where that differs. *Difference* is the largest one of all results and states from the
step's own decorator on one device, relative to the largest value of the array. Where float32 or a true value of zero is
the reason for it, a note says how far one device is from itself when its floats are changed in the last digit.

{len(parts)} of {len(results)} steps are split in all runs on several devices (the others have no batch). *Repeated* is
the largest share of a step's FLOPs that every device does, such as what needs all examples at once.

Made with {versions}, by `python benchmarks/compatibility.py --sources DIR --markdown benchmarks/results/published.md`.

| step, and how it is called | difference | notes |
|---|---|---|
{chr(10).join(line(r, usual) for r in results)}
"""


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of entries, or of their sources; all")
    parser.add_argument("--sources", type=Path, help="folder of checkouts")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--markdown", type=Path, help="page to write")
    parser.add_argument("--list", action="store_true", help="the repositories and commits, and nothing else")
    parser.add_argument(
        "--only", default="", help="runs whose names this pattern finds ('ranks'); others stay as they were"
    )
    parser.add_argument("--mesh", help="on this mesh instead (data=2,model=2), printed and not kept")
    parser.add_argument("-v", action="store_true", help="tracebacks")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv if argv is None else list(argv))
    if args.list:
        from published.source import COMMITS

        for folder, (repository, commit) in COMMITS.items():
            print(f"{folder:10} https://github.com/{repository} {commit}")
        return
    found = json.loads(args.results.read_text()) if args.results.exists() else {"versions": {}, "results": {}}
    if args.sources or args.ranks:
        measure(args, found)
    if args.markdown:
        args.markdown.write_text(page(found))


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run the requested entries, and add them to the results."""
    os.environ.update({k: v for k, v in SETTINGS.items() if k not in os.environ})
    if args.sources:
        os.environ["PUBLISHED_SOURCES"] = str(args.sources.resolve())
    if not args.ranks:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.ranks:
        as_rank(args.names, args.ranks)
        return
    import published

    entries, wanted = published.load_all(), re.compile(args.only)
    chosen = [
        n for n, e in entries.items() if not args.names or n in args.names or e.path.partition("/")[0] in args.names
    ]
    if args.mesh:
        sizes = {name: int(size) for name, _, size in (one.partition("=") for one in args.mesh.split(","))}
        for n in chosen:
            print(f"{n:32} {over_mesh(entries[n], sizes)}", flush=True)
        return
    found["versions"] = {p: version(p) for p in ("jax", "flax", "optax", "equinox", "diffrax", "dm-haiku", "numpyro")}
    for source in dict.fromkeys(entries[n].path.partition("/")[0] for n in chosen):
        with tempfile.TemporaryDirectory() as folder:
            names = [n for n in chosen if entries[n].path.startswith(f"{source}/")]
            for n in names:
                start, file = time.monotonic(), Path(folder, f"{n}.pickle")
                try:
                    result = here(entries[n], file, found["results"].get(n, {}), wanted)
                except Exception as error:
                    if args.v:
                        traceback.print_exc()
                    print(f"{n:32} FAILS ON ONE DEVICE {type(error).__name__}: {str(error)[:200]}", flush=True)
                    continue
                found["results"][n] = result
                save(args.results, found, entries)
                runs = {k: short(v) for k, v in result["runs"].items()}
                print(
                    f"{n:32} itself {number(result.get('itself', 0.0))} {runs} [{time.monotonic() - start:.0f} s]",
                    flush=True,
                )
            names = [n for n in names if Path(folder, f"{n}.pickle").exists()]
            for communicator in (c for c in COMMUNICATORS if wanted.search(f"2 ranks, {c}")):
                for n, run in on_ranks(names, Path(folder), communicator).items():
                    found["results"][n]["runs"][f"2 ranks, {communicator}"] = run
                    print(f"{n:32} {communicator} {short(run)}", flush=True)
                save(args.results, found, entries)


def short(run: dict[str, Any]) -> str:
    """Format a cell, with ! if the difference is too large."""
    return run.get("error") or number(run["difference"]) + " !" * (run["beyond"] > 1)


def save(file: Path, found: dict[str, Any], order: Iterable[str]) -> None:
    """Save the results in the order of the entries."""
    found["results"] = {n: found["results"][n] for n in order if n in found["results"]}
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
