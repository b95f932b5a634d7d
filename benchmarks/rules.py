"""Placement rules compared with JAX's own examples of its primitives: are they right, and which are missing?

    python benchmarks/rules.py --every 40 --log rules.jsonl

In each of JAX's 5,594 examples, each dimension of each array in turn is the batch. **Right**: results and gradients
are those of one device, and `jaxdist.verify` agrees. **Missing**: `jaxdist` gathers, although parts of the results come
from halves of arrays. This is found by trying, and so not where parameters contain sizes, as those of `slice` do.
--devices without a number only searches. A run with the --log of one that was stopped continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX is imported; programs are small, and a rule that sends nothing is to be taken
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    os.environ["JAXDIST_MACHINE"] = "cpu,latency=0.1"

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax._src.internal_test_util.test_harnesses import Harness, all_harnesses  # private: nothing else has them all
from jax.sharding import Mesh

import jaxdist

TOLERANCE = {8: 0.25, 16: 3e-2, 32: 1e-4, 64: 1e-9}  # by the bits of a real number, relative to 1 + the largest one


@dataclass
class Case:
    """A dimension of an operand as the batch, on some devices or, with 1, as the search for rules saw it."""

    group: str
    name: str
    operand: str  # its type, number and dimension
    devices: int
    outcome: str = ""  # "right", or what is not
    gradients: bool = False
    verified: str = ""
    sends: str = ""
    halves: str = ""  # of operands that make the results, so that nothing needs to be sent


def step_of(f: Callable[..., Any], k: int, devices: int) -> Any:
    """Return the function decorated, with argument `k` as the batch."""
    return jaxdist.data_parallel(f, batch_argnums=(k,), mesh=Mesh(np.array(jax.devices()[:devices]), ("data",)))


def is_array(x: Any) -> bool:
    """Check whether an operand can be divided: no number, and no random keys."""
    return isinstance(x, (np.ndarray, jax.Array)) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def with_gradients(f: Callable[..., Any], xs: Sequence[Any]) -> Callable[..., Any]:
    """Return the function with the gradients of its results times random numbers, or itself if JAX has none."""
    is_float = lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    floats = [i for i, x in enumerate(xs) if is_float(x)]

    def both(*xs: Any) -> Any:
        def inner(*some: Any) -> Any:
            ys = jax.tree.leaves(f(*map(dict(zip(floats, some, strict=True)).get, range(len(xs)), xs)))
            return [y for y in ys if is_float(y)], ys

        ys, pull, results = jax.vjp(inner, *[xs[i] for i in floats], has_aux=True)
        return results, pull([np.random.default_rng(0).normal(size=y.shape).astype(y.dtype) for y in ys])

    with contextlib.suppress(Exception):  # JAX has many ways to say so
        jax.eval_shape(both, *xs)
        return both if floats else f
    return f


def differs(got: Any, want: Any) -> str:
    """Return how results differ, or ""."""
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {i} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        x, y = np.asarray(a), np.asarray(b)
        same = x == y
        if jnp.issubdtype(b.dtype, jnp.inexact):
            x, y = x.astype(complex), y.astype(complex)
            tolerance = TOLERANCE[jnp.finfo(b.dtype).bits] * (1 + np.abs(y[np.isfinite(y)]).max(initial=0))
            same |= np.isclose(x, y, rtol=0, atol=tolerance, equal_nan=True)
        if not same.all():
            return f"{np.sum(~same)} of {same.size} numbers of result {i} differ"
    return ""


def compare(case: Case, f: Callable[..., Any], xs: Sequence[Any], k: int) -> Case:
    """Run a call on some devices."""
    both = with_gradients(f, xs)
    case.gradients, step = both is not f, step_of(both, k, case.devices)
    try:
        case.outcome = differs(jaxdist.unshard(step(*xs)), jax.jit(both)(*xs)) or "right"
        proof = jaxdist.verify(step, *xs, points=1)
        case.verified = "equal" if proof.equal else str(proof).split(" at ")[0]
    except Exception as error:  # each is a finding
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        case.outcome, case.verified = case.outcome or said, said
    return case


def sent(f: Callable[..., Any], xs: Sequence[Any], k: int) -> str:
    """Return what is sent on two devices before there is a result."""
    [whole] = step_of(f, k, 2).program(*xs).placed.emitted.propagations
    messages = [m for p, _ in whole.blocks() for m in p.messages if p is not whole or m.value not in p.block.outputs]
    return "; ".join(dict.fromkeys(f"{m.kind} for {m.operation} ({m.why})" for m in messages))


def joins(a: np.ndarray, b: np.ndarray, whole: np.ndarray) -> set[str]:
    """Return the ways in which two results make a whole one."""
    other = lambda x, d: x.shape[:d] + x.shape[d + 1 :]
    if a.shape == b.shape == whole.shape:
        ways = {"same": a, "sum": a + b, "product": a * b, "max": np.maximum(a, b), "min": np.minimum(a, b)}
    else:
        ways = {f"dim {d}": np.concatenate([a, b], d) for d in range(a.ndim) if other(a, d) == other(b, d)}
    return {way for way, x in ways.items() if not differs(x, whole)}


def halves(f: Callable[..., Any], calls: Sequence[Sequence[Any]], k: int) -> str:
    """Return a way to halve operand `k` along its first dimension, and others with it, in all calls, or ""."""
    size = np.shape(calls[0][k])[0]
    options = [[None, *(d for d, n in enumerate(np.shape(x)) if n == size and is_array(x))] for x in calls[0]]
    options[k] = [0]
    run = lambda xs: map(np.asarray, jax.tree.leaves(jax.jit(f)(*xs)))
    half = lambda x, dim, h: x if dim is None else np.array_split(np.asarray(x), 2, dim)[h]
    for dims in itertools.islice(itertools.product(*options), 64):
        found: list[set[str]] = []
        with contextlib.suppress(Exception):  # parameters that are for the whole size only
            for xs in calls:
                parts = [run(map(half, xs, dims, [h] * len(xs))) for h in (0, 1)]
                ways = [joins(*three) for three in zip(*parts, run(xs), strict=True)]
                found = [old & new for old, new in zip(found or ways, ways, strict=True)]
            if all(found) and not all("same" in ways for ways in found):
                return f"operands along {dims}, results: {', '.join(map(min, found))}"
    return ""


def cases(harness: Harness, devices: Sequence[int], all_dims: bool) -> Iterator[Case]:
    """Yield the search for rules and each comparison of a harness."""
    draw = lambda seed: jax.tree.flatten(harness.dyn_args_maker(np.random.RandomState(seed)))
    (xs, tree), others = draw(0), draw(1)[0]
    f = lambda *xs: harness.dyn_fun(*jax.tree.unflatten(tree, xs))
    for k, dim in [(k, d) for k, x in enumerate(xs) if is_array(x) for d, n in enumerate(x.shape) if n >= 2]:
        front = lambda xs, k=k, dim=dim: [*xs[:k], np.moveaxis(np.asarray(xs[k]), dim, 0), *xs[k + 1 :]]
        g = lambda *xs, k=k, dim=dim: f(*xs[:k], jnp.moveaxis(xs[k], 0, dim), *xs[k + 1 :])
        about = harness.group_name, harness.name, f"{k}: {jax.typeof(xs[k]).str_short()}, dimension {dim}"
        messages = sent(g, front(xs), k)
        moved = "all-gather" in messages or "all-to-all" in messages
        yield Case(*about, 1, sends=messages, halves=halves(g, [front(xs), front(others)], k) if moved else "")
        for n in devices if all_dims or dim == 0 else ():
            yield compare(Case(*about, n), g, front(xs), k)


def sample(every: int, group: str | None) -> list[Harness]:
    """Return each N-th harness of each group, and at least two, spread evenly; the first of each group come first."""
    groups = defaultdict[str, list[Harness]](list)
    for harness in all_harnesses:
        if harness.filter("cpu") and group in (None, harness.group_name):
            groups[harness.group_name].append(harness)
    counts = {name: min(len(members), max(2, len(members) // every)) for name, members in groups.items()}
    chosen = [(i, groups[name][i * len(groups[name]) // n]) for name, n in counts.items() for i in range(n)]
    return [harness for _, harness in sorted(chosen, key=lambda pair: pair[0])]


def tally(text: str, found: Iterable[tuple[str, Case]]) -> str:
    """Return a table: for each group and text, how many cases there are, and the first."""
    some = defaultdict[tuple[str, str], list[str]](list)
    for said, case in found:
        note = f"{case.devices} devices" if case.devices > 1 else case.halves
        some[case.group, said].append(f"{case.name[:60]}, operand {case.operand}; {note}")
    return report.table(["group", text, "cases", "for example"], [[*key, len(x), x[0]] for key, x in some.items()])


def markdown(found: Sequence[Case]) -> str:
    """Return the tables."""
    runs, searches = ([case for case in found if (case.devices > 1) is compared] for compared in (True, False))
    examples, groups = {(c.group, c.name) for c in found}, {c.group for c in found}
    about = f"{len(examples)} examples of {len(groups)} groups. Rules were searched for {len(searches)} dimensions"
    kinds = Counter((c.devices, c.gradients, c.outcome == "right", c.verified == "equal") for c in runs)
    rows = [[*kind, count] for kind, count in sorted(kinds.items())]
    tables = [
        f"{about} of operands; for {sum(bool(c.sends) for c in searches)} of them something is sent.",
        report.table(["devices", "with gradients", "right", "verified", "runs"], rows),
        tally("not right", ((c.outcome, c) for c in runs if c.outcome != "right")),
        tally("not verified", ((c.verified, c) for c in runs if c.verified != "equal")),
        tally("sends needlessly", ((c.sends, c) for c in searches if c.halves)),
    ]
    return "\n\n".join(tables)


def main() -> None:
    """Run a sample, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=40, help="each N-th example of a group; at least two")
    parser.add_argument("--group", help="only this")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after them")
    parser.add_argument("--devices", type=int, nargs="*", default=[2], help="to compare on")
    parser.add_argument("--all-dims", action="store_true", help="compare with each dimension as the batch")
    parser.add_argument("--log", type=Path, help="what was found so far, and is not run again")
    args = parser.parse_args()
    known = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    found = [Case(**case) for line in known for case in json.loads(line)]
    known, end = {(case.group, case.name) for case in found}, time.monotonic() + args.seconds
    rest = [harness for harness in sample(args.every, args.group) if (harness.group_name, harness.name) not in known]
    for harness in itertools.takewhile(lambda _: time.monotonic() < end, rest):
        with jax.enable_x64(True):
            new = list(cases(harness, args.devices, args.all_dims))
        found += new
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps([asdict(case) for case in new]) + "\n")
    print(markdown(found))


if __name__ == "__main__":
    main()
