"""Bugs of one line, each of which some test must notice: `python tests/mutants.py [WORD …] [--shard I/N]`.

Each is put into a copy of the project, and the tests that it names are run there until one fails. What survives is a
row that the tests lack, or dead code. WORD: only mutants whose name or file has it. The exit code is the number of
survivors (and of mutants whose line is no longer there).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = "jaxdist", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md"


class Mutant(NamedTuple):
    """A bug that someone could write.

    Attributes:
      name: what goes wrong.
      file: where.
      line: as it stands; occurs once in the file.
      broken: in its place.
      tests: that must fail, as arguments of pytest.
      slow: no quick test can.
    """

    name: str
    file: str
    line: str
    broken: str
    tests: str
    slow: bool = False


MUTANTS: list[Mutant] = [
    # --- placements, precision, calling, plans
    Mutant("a padded end is not masked", "jaxdist/placements/run.py", "if split.is_padded(emitter.n):", "if False:",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("the mask of a padded end is inverted", "jaxdist/placements/emit.py",
           "jnp.where(self.real(split, x.ndim), x, jnp.asarray(identity, x.dtype))",
           "jnp.where(self.real(split, x.ndim), jnp.asarray(identity, x.dtype), x)",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("a loop over examples counts padding", "jaxdist/placements/loops.py",
           "counts = emitter.real(replace(split, dim=0), 1) if padded and carry else None", "counts = None",
           "tests/oracle/test_programs.py -k control"),
    Mutant("a 64-bit place loses its carry", "jaxdist/placements/random_bits.py",
           "high = high + up + (low < down).astype(jnp.uint32)", "high = high + up",
           "tests/oracle/test_programs.py -k places"),
    Mutant("the words of threefry are not folded", "jaxdist/placements/random_bits.py", "return (one ^ two).astype",
           "return one.astype", "tests/oracle/test_programs.py -k random"),
    Mutant("keys of any generator draw alone", "jaxdist/placements/walk.py", "known = not self._draws_together(node)",
           "known = True", "tests/oracle/test_programs.py -k keys_in_the_batch"),
    Mutant("a whole value counts on each device", "jaxdist/placements/emit.py",
           "return jnp.where(self.index == 0, x, nothing)", "return x", "tests/oracle/test_programs.py -k control"),
    Mutant("a summand passes any factor", "jaxdist/placements/summands.py",
           "ok = sum(partial) == 1 and _scales(other, out.dtype)", "ok = sum(partial) == 1",
           "tests/oracle/test_programs.py -k traps"),
    Mutant("a summand passes any divisor", "jaxdist/placements/summands.py", "_scales(ins[1], out.dtype, inverse=True)",
           "True", "tests/oracle/test_programs.py -k traps"),
    Mutant("sums of 16 bits are narrowed before they are reduced", "jaxdist/placements/values.py",
           "jnp.dtype(dtype).itemsize < 4:", "jnp.dtype(dtype).itemsize < 0:",
           "tests/oracle/test_programs.py -k traps"),
    Mutant("NaN is lost by max over devices", "jaxdist/communicators/exchange.py",
           'limits.max if op == "max" else limits.min, key', "key, key", "tests/oracle/test_programs.py -k traps"),
    Mutant("an exchange swaps its dimensions", "jaxdist/placements/emit.py", "split_axis=to.dim, concat_axis=own.dim",
           "split_axis=own.dim, concat_axis=to.dim", "tests/oracle/test_programs.py -k operations"),
    Mutant("a reshape forgets that chunks end unevenly", "jaxdist/placements/values.py",
           "outer % before or size % behind or chunk % behind", "outer % before or size % behind",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("looked up at another device's rows", "jaxdist/placements/lookups.py",
           "jnp.where(_is(indices, column), indices - start, indices)", "indices",
           "tests/oracle/test_meshes.py -k vocabulary"),
    Mutant("a gradient is whatever is summed", "jaxdist/placements/walk.py", "[Partial(gradient=node.backward)]",
           "[Partial(gradient=True)]", "tests/oracle/test_steps.py -k compressed"),
    Mutant("matrices go to owners and come back in another order", "jaxdist/placements/owned.py",
           "lax.slice_in_dim(x, k, k + 1)", "lax.slice_in_dim(x, self.parts - 1 - k, self.parts - k)",
           "tests/oracle/test_optimizers.py -k matrices"),
    Mutant("groups share with all devices", "jaxdist/placements/groups.py",
           "return 0 if found == len(hosts) else found", "return 0", "tests/oracle/test_zero.py -k group"),
    Mutant("level 3 keeps parameters whole", "jaxdist/placements/marks.py", "if source.exact and update.level == 3:",
           "if source.exact and update.level == 4:", "tests/oracle/test_zero.py -k keep_in_shards"),
    Mutant("a microbatch's loss is not divided", "jaxdist/grad.py", "(total / k if jnp.issubdtype",
           "(total if jnp.issubdtype", "tests/oracle/test_steps.py -k microbatches"),
    Mutant("microbatches hold consecutive examples", "jaxdist/grad.py",
           "jnp.moveaxis(x.reshape(x.shape[0] // k, k, *x.shape[1:]), 1, 0)",
           "x.reshape(k, x.shape[0] // k, *x.shape[1:])", "tests/oracle/test_steps.py -k microbatches"),
    Mutant("the loss scale is not halved", "jaxdist/precision.py", "jnp.maximum(scale.scale / 2, _LEAST)",
           "jnp.maximum(scale.scale, _LEAST)", "tests/oracle/test_precision.py"),
    Mutant("a step that overflows changes the state", "jaxdist/precision.py",
           "master, inner, scale = keep(master, state.master), keep(inner, state.inner), _next",
           "master, inner, scale = master, inner, _next", "tests/oracle/test_precision.py"),
    Mutant("the loss scale stays in the gradients", "jaxdist/precision.py", "lambda g: g / state.loss_scale.scale",
           "lambda g: g", "tests/oracle/test_precision.py"),
    Mutant("1 and True are one constant", "jaxdist/step/signature.py", "or type(self.value) is not type(other.value)",
           "", "tests/oracle/test_calling.py -k constants"),
    Mutant("what is asked for is not donated", "jaxdist/step/program_cache.py",
           "may = lambda i, name: name in of.donated or (of.donate and i in trace.may_take)",
           "may = lambda i, name: False", "tests/oracle/test_calling.py -k donated"),
    Mutant("fit takes the slowest", "jaxdist/planning/fit.py", "chosen = min(fitting, key=",
           "chosen = max(fitting, key=", "tests/program/test_plan.py -k fit_takes"),
    Mutant("what is filled in for a missing row counts on each device", "jaxdist/placements/lookups.py",
           "own |= ~exists & (emitter.index == 0)", "own |= ~exists", "tests/oracle/test_meshes.py -k vocabulary"),
    Mutant("slices that come by hosts are in another order", "jaxdist/communicators/by_hosts.py",
           "parts.swapaxes(0, 1).reshape(devices, *x.shape)", "parts.reshape(devices, *x.shape)",
           "tests/jobs/test_results.py -k 4 and hand and not quick and not lanes", slow=True),
    Mutant("16 bits between groups over MPI are 32", "jaxdist/communicators/mpi.py",
           "lambda x, wire, groups: self._sum(x, wire, ours)", "lambda x, wire, groups: self._sum(x, None, ours)",
           "tests/jobs/test_results.py -k mpirun and 4 and not quick", slow=True),
    Mutant("the mesh over MPI is in the order of the ranks", "jaxdist/communicators/mpi_groups.py",
           "return every if ranks == tuple(range(every.Get_size())) else _group(rank, ranks)", "return every",
           "tests/jobs/test_results.py -k mpirun and 4 and not quick", slow=True),
    Mutant("copies of slices are not compared", "jaxdist/agreement/sync.py",
           "all(len(set(digests)) == 1 for digests in slices.values())", "True",
           "tests/jobs/test_results.py -k 4 and hand and not quick and not lanes", slow=True),
    Mutant("a patient wait has a limit", "jaxdist/agreement/every_rank.py", "None if patient else context.timeout)",
           "context.timeout)", "tests/io/test_checkpoint_jobs.py -k slow_writes", slow=True),
    Mutant("padding is the largest of negative integers", "jaxdist/placements/run.py",
           'return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max',
           'return 0 if kind == "max" else jnp.iinfo(dtype).max', "tests/oracle/test_programs.py -k operations"),
    Mutant("summands are narrowed before they are added", "jaxdist/placements/summands.py",
           "ok = _is_plain(a) and _is_plain(b) and jnp.promote_types(a, b) == b", "ok = _is_plain(a) and _is_plain(b)",
           "tests/oracle/test_programs.py -k traps"),
    Mutant("a loop in a loop is planned as one", "jaxdist/planning/schedule.py", "devices, times * turns)",
           "devices, turns)", "tests/program/test_plan.py -k turn"),
    Mutant("another row is taken for the own one", "jaxdist/placements/own_rows.py",
           " or below.ins[0] != node.ins[1] or not is_zero(walk.at[below.ins[1]]):", " or below.ins[0] != node.ins[1]:",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("a device in no group gets nothing", "jaxdist/collectives/in_step.py", "d in roots | alone for d",
           "d in roots for d", "tests/jobs/test_one_process.py -k numbers"),
    Mutant("each batch of a stream draws the same", "jaxdist/data/streamed.py", "at.epoch, at.position + i]",
           "at.epoch, i]", "tests/io/test_data.py -k random_transform"),
    Mutant("two arguments are donated into one result", "jaxdist/step/matching.py", "if len(found) == len(group) and (",
           "if found and (", "tests/oracle/test_calling.py -k donate"),
    Mutant("structures that can't be compared are an error", "jaxdist/step/matching.py",
           "return bool(one == other)\n    except Exception:", "return bool(one == other)\n    except KeyError:",
           "tests/oracle/test_calling.py -k metadata"),
    Mutant("what the step returns is the batch", "jaxdist/step/batch.py",
           "last = [i for i in able if i in one and i not in returned] or", "last = [i for i in able if i in one] or",
           "tests/oracle/test_calling.py -k batch_is_found"),
    Mutant("a state as long as the batch is cut", "jaxdist/step/reading.py",
           "for chosen in tried:", "for chosen in [found]:", "tests/oracle/test_calling.py -k batch_is_found"),
    Mutant("two states as long as the batch are cut", "jaxdist/step/reading.py", "tried = [sure, *(", "tried = [*(",
           "tests/oracle/test_calling.py -k batch_is_found"),
    Mutant("a call in which all ranks pass the same settles what the batch is", "jaxdist/step/calls.py",
           "(self._unsure.discard if tells else self._unsure.add)(signature)", "self._unsure.discard(signature)",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("a state is taken for the batch beside one that differs", "jaxdist/step/reading.py",
           "if self._declared is None and (others or", "if False and (others or",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("2 and 2.0 are one constant", "jaxdist/step/signature.py",
           "return tuple((i, type(x), x) for i, x in enumerate(leaves)",
           "return tuple((i, None, x) for i, x in enumerate(leaves)", "tests/oracle/test_calling.py -k one_and_true"),
    # --- jobs, collectives, control
    Mutant("extremes lose NaN on the wire", "jaxdist/communicators/exchange.py",
           'key = reduce(jnp.where(jnp.isnan(wide), limits.max if op == "max" else limits.min, key))',
           "key = reduce(key)", "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("eager extremes lose NaN over MPI", "jaxdist/collectives/mpi.py",
           'dtype.char in "fdFD" and op not in ("min", "max")', 'dtype.char in "fdFD"',
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a large sum over MPI ends after its first piece", "jaxdist/collectives/mpi.py",
           "for i in range(0, x.size, step):", "for i in range(0, min(x.size, step), step):",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a scatter takes the root's number for 0", "jaxdist/collectives/in_step.py",
           "[root * rows : (root + 1) * rows]", "[:rows]", "tests/jobs/test_one_process.py"),
    Mutant("a broadcast loses the sign of zero", "jaxdist/collectives/in_step.py",
           "moved, -jnp.zeros_like(moved))", "moved, jnp.zeros_like(moved))",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("who is not the root loses its own value", "jaxdist/collectives/outside.py",
           "if plan.root not in (None, self._ctx.rank):", "if False:",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("the ranks of a group are sorted", "jaxdist/collectives/outside.py",
           "devices = tuple(self._first[r] for r in members)",
           "devices = tuple(self._first[r] for r in sorted(members))",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("the first ranks are taken for all", "jaxdist/communicators/mpi_groups.py",
           "ranks == tuple(range(every.Get_size()))", "ranks == tuple(range(len(ranks)))",
           "tests/jobs/test_results.py -k 4 and mpirun", slow=True),
    Mutant("a sum over lanes is of another type", "jaxdist/communicators/lanes.py",
           "if isinstance(one, int)]).astype(x.dtype)", "if isinstance(one, int)])",
           "tests/jobs/test_results.py -k lanes and quick"),
    Mutant("an all-to-all over MPI splits where it joins", "jaxdist/communicators/mpi.py",
           "self._scattered(self._comm(eqn), x, split), 0, concat)",
           "self._scattered(self._comm(eqn), x, concat), 0, concat)", "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a permutation over MPI goes the other way", "jaxdist/communicators/mpi.py",
           "dest=dest, source=source,", "dest=source, source=dest,",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("values of per_device keep types of shard_map", "jaxdist/placements/control_flow.py",
           "return iter([(i, i + 1) for i in range(len(eqns))])", "return super()._stretches(eqns)",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a loop over MPI with messages turns once", "jaxdist/communicators/mpi.py",
           "return (*again(order, carry), *carry)", "return (order, jnp.asarray(False), *carry)",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a mean in groups is of all devices", "jaxdist/collectives/in_step.py",
           'return total / _mine({d: len(g) for g in full for d in g}, x.dtype) if op == "avg" else total',
           'return total / size() if op == "avg" else total', "tests/jobs/test_one_process.py"),
    Mutant("a reduce-scatter over gloo is of the wrong part", "jaxdist/communicators/xla.py",
           "total = exchange.summed(parts).astype(x.dtype)\n        return total if tiled",
           "total = exchange.summed(parts[:1]).astype(x.dtype)\n        return total if tiled",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("lanes are added up in XLA's order", "jaxdist/communicators/lanes.py",
           "return exchange.summed(all_gather(axes, x.astype(wire or x.dtype), groups)).astype(x.dtype)",
           "return lax.psum(x, axes, axis_index_groups=groups)", "tests/jobs/test_results.py -k lanes and quick"),
    Mutant("what a rank compiled serves others with other options", "jaxdist/runtime/lowered.py",
           "return [self.computation(), options, _JAXLIB,", "return [self.computation(), _JAXLIB,",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("buckets are in another order on one rank", "jaxdist/placements/bucket_order.py",
           "return sorted(closed, key=lambda bucket: (turn[bucket[0].at], *bucket[-1].order))",
           "return sorted(closed, key=lambda bucket: (turn[bucket[0].at], *bucket[-1].order), "
           "reverse=__import__('jax').process_index() == 1)",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("constants do not count in what ranks compare", "jaxdist/ir/dataflow.py",
           '_digest(f"constant {held(value):08x}")', '_digest("constant")',
           "tests/jobs/test_faults.py -k constant and hand"),
    Mutant("no warning of a batch that all ranks share", "jaxdist/step/reading.py",
           "if not self._warned and context.is_root:", "if False:",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("bits of arrays are not compared", "jaxdist/agreement/sync.py",
           "parts = [(str(shard.device), checksum(_on_host(shard.data))) for shard in x.addressable_shards]",
           "parts = [(str(shard.device), 0) for shard in x.addressable_shards]",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("a donated array is not named", "jaxdist/step/donation.py",
           'f"step {step!r}: {name} is gone: {Taken.by(physical(array))}',
           'f"step {step!r}: an array is gone: {Taken.by(physical(array))}',
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("an error does not say its rank", "jaxdist/control/failfast.py",
           'text = f"{control.who(control.rank)} failed: ', 'text = f"a rank failed: ',
           "tests/jobs/test_faults.py -k raises and run and not mpirun"),
    Mutant("a failing script ends with code 1", "jaxdist/control/failfast.py", "ending = number & 0xFF or 1",
           "ending = 1", "tests/jobs/test_faults.py -k exits and mpirun"),
    Mutant("processes that share some examples pass", "jaxdist/mesh.py", "if any(of[rank] != of[ranks[0]]",
           "if False and any(of[rank] != of[ranks[0]]",
           "tests/jobs/test_start.py -k shares"),
    Mutant("lanes that don't divide evenly pass", "jaxdist/runtime/in_lanes.py", "if lanes[0] % size:", "if False:",
           "tests/jobs/test_start.py -k joins", slow=True),
    Mutant("ranks of one host listen for MPI", "jaxdist/connectors/mpi.py", '= "self,sm"', '= "^ofi"',
           "tests/jobs/test_start.py -k listens", slow=True),
    Mutant("processors that differ pass", "jaxdist/runtime/compiler.py", "if other is not None and", "if False and",
           "tests/jobs/test_start.py -k processors"),
    Mutant("a rank that has just left is waited for", "jaxdist/agreement/ledger.py",
           "        for rank, count in left.items():\n            self._left(rank, count)\n", "",
           "tests/jobs/test_faults.py -k leaves_unseen", slow=True),
    Mutant("recv waits for who has left", "jaxdist/collectives/messages.py",
           'left = source in ctx.control.notices.get("bye", {})', "left = False",
           "tests/jobs/test_faults.py -k leaves_a_receiver", slow=True),
    Mutant("ranks outlive an mpirun that is killed", "jaxdist/launch/job.py",
           "[*that_dies_with(0), *command]", "command", "tests/launch/test_ends.py -k signals_end"),
    Mutant("calls in another order pass", "jaxdist/agreement/ledger.py", "if self.count <= position:", "if True:",
           "tests/jobs/test_faults.py -k order and hand"),
    Mutant("a call nobody expects waits for nobody", "jaxdist/agreement/ledger.py",
           "return self.unsettled or not self._foreseen(entry) or", "return self.unsettled or",
           "tests/jobs/test_faults.py -k order and hand"),
    Mutant("a state that one rank has changed is not looked at again", "jaxdist/step/calls.py",
           "return self.number & (self.number - 1) == 0", "return self.number == 1",
           "tests/jobs/test_faults.py -k changed_copy", slow=True),
    Mutant("a target network is not kept as its online network is", "jaxdist/step/tracing.py",
           "for leaves in alike:", "for leaves in ():", "tests/oracle/test_zero.py -k alike"),
    Mutant("programs of ranks are not compared", "jaxdist/agreement/calls.py", "if len(digests) > 1:", "if False:",
           "tests/jobs/test_faults.py -k constant"),
    Mutant("SIGTERM is swallowed", "jaxdist/compat/distributed.py",
           'for name in ("jax_enable_preemption_service", "jax_check_proxy_envs"):',
           'for name in ("jax_check_proxy_envs",):', "tests/jobs/test_faults.py -k SIGTERM and hand"),
    Mutant("the watchdog looks ten times later", "jaxdist/control/watchdog.py",
           "self._watched[step] = newest, newest.since + self._timeout",
           "self._watched[step] = newest, newest.since + 10 * self._timeout", "tests/jobs/test_faults.py -k by_hand"),
    Mutant("the other workers' engine is not seen", "jaxdist/connectors/engines.py", "_initialized()[1] > 1:", "False:",
           "tests/jobs/test_start.py -k initialized"),
    Mutant("Kubeflow's variables are not seen", "jaxdist/connectors/engines.py",
           'if any(name in env for name in _TRAINER) and env.get("JAX_NUM_PROCESSES") != "1":', "if False:",
           "tests/launch/test_connectors.py -k launcher_that_is_there"),
    Mutant("the proof of the secret is not looked at", "jaxdist/control/handshake.py",
           'if not hmac.compare_digest(proof, _proof(self.key, b"rank", transcript)):', "if False:",
           "tests/control/test_control.py -k another_secret or (stranger and secret)"),
    Mutant("what a stranger sends is unpickled before its proof", "jaxdist/control/handshake.py",
           "whole = _CHALLENGE + _ANSWER\n        try:\n            part = sock.recv(whole - len(received))",
           "whole = _CHALLENGE + _ANSWER\n        try:\n            part = sock.recv(whole - len(received))\n"
           "            with __import__('contextlib').suppress(Exception):\n"
           "                __import__('pickle').loads(part[4:])",
           "tests/control/test_control.py -k goes_on"),
    Mutant("one of several processes is taken for alone", "jaxdist/runtime/start.py",
           "        _check_alone(connector)\n", "        pass\n", "tests/jobs/test_start.py -k initialized"),
]  # fmt: skip
# Checkpoints, data, logs.
MUTANTS += [
    Mutant("digests are not compared", "jaxdist/checkpoint/arrays.py", "elif share != leaf.digest:",
           "elif False:", "tests/io/test_damage.py::test_each_damage_is_told"),
    Mutant("digests of arrays split over ranks are not compared", "jaxdist/checkpoint/reading.py",
           "% MODULUS != leaves[name].digest:",
           "< 0:", "tests/io/test_checkpoint_jobs.py::test_two_ranks"),
    Mutant("another kind of leaf, or one more, is not told", "jaxdist/checkpoint/reading.py",
           "        if saved != wanted and not (",
           "        if False and not (", "tests/io/test_checkpoints.py::test_of_another_model"),
    Mutant("what was moved away is damage", "jaxdist/checkpoint/manifest.py", "        if not directory.is_dir():",
           "        if False:", "tests/io/test_damage.py::test_what_is_removed_at_any_moment_of_a_reading"),
    Mutant("what was replaced is damage", "jaxdist/checkpoint/reading.py",
           "            return _find(root, step, failed)  # moved just now",
           "            continue", "tests/io/test_damage.py::test_what_is_replaced_at_any_moment_of_a_reading"),
    Mutant("damage is not passed over", "jaxdist/checkpoint/reading.py",
           "        except (DamagedError, FileNotFoundError) as failure:",
           "        except FileNotFoundError as failure:", "tests/io/test_damage.py::test_the_one_before"),
    Mutant("a different step than the one asked for is read", "jaxdist/checkpoint/reading.py",
           "if step in (None, number)",
           "if True", "tests/io/test_checkpoints.py::test_after_going_back"),
    Mutant("a digest does not know places", "jaxdist/checkpoint/checksum.py",
           "return (x ^ (x >> np.uint64(31))) | np.uint64(1)",
           "return x * np.uint64(0) | np.uint64(1)", "tests/io/test_logs.py::test_a_digest_changes_with_any_bit"),
    Mutant("a digest has each shard at the start", "jaxdist/checkpoint/checksum.py",
           "[at.start or 0 for at in shard.index]",
           "[0 for at in shard.index]", "tests/io/test_logs.py::test_a_digest_is_the_same_however_a_state_is_kept"),
    Mutant("a digest counts padding", "jaxdist/checkpoint/checksum.py", "slice(max(0, n - a))",
           "slice(None)", "tests/io/test_checkpoints.py::test_weak_types_and_padding"),
    Mutant("weak types are lost", "jaxdist/checkpoint/arrays.py", "value = compat.with_weak_type(value, leaf.weak)",
           "pass", "tests/io/test_checkpoints.py::test_any_tree"),
    Mutant("keep= removes the higher ones", "jaxdist/checkpoint/directory.py", "for old in others[: max(",
           "for old in others[::-1][: max(", "tests/io/test_checkpoints.py::test_the_highest_ones_are_kept"),
    Mutant("keep= removes the new one", "jaxdist/checkpoint/directory.py", "[s for s in steps(path) if s != step and",
           "[s for s in steps(path) if", "tests/io/test_checkpoints.py::test_the_highest_ones_are_kept"),
    Mutant("the latest is the lowest", "jaxdist/checkpoint/reading.py", "in reversed([number for number in steps(root)",
           "in ([number for number in steps(root)", "tests/io/test_checkpoints.py -k names_and_not_by_times"),
    Mutant("one that was put aside is not found", "jaxdist/checkpoint/directory.py",
           "return aside if aside.is_dir() and not final.is_dir() else final",
           "return final", "tests/io/test_damage.py::test_a_kill_at_any_moment_of_a_save_loses_nothing"),
    Mutant("a link is removed as a folder", "jaxdist/checkpoint/directory.py", "        if gone.is_symlink():",
           "        if False:", "tests/io/test_checkpoints.py::test_a_step_that_is_a_link"),
    Mutant("what stays is an error", "jaxdist/checkpoint/directory.py",
           "        warn_once(f\"{gone} can't be removed, and stays: {error}\")",
           "        raise", "tests/io/test_checkpoints.py::test_what_cannot_be_removed_warns_once"),
    Mutant("a changed manifest is believed", "jaxdist/checkpoint/manifest.py",
           "        if digest != hashlib.sha256(content.encode()).hexdigest():",
           "        if False:", "tests/io/test_damage.py::test_each_damage_is_told"),
    Mutant("a manifest of another step is believed", "jaxdist/checkpoint/manifest.py",
           "    if step not in (None, found[\"step\"]):",
           "    if False:", "tests/io/test_damage.py::test_each_damage_is_told"),
    Mutant("a disk that fails is damage", "jaxdist/checkpoint/manifest.py", "if number in _DAMAGE:",
           "if True:", "tests/io/test_damage.py::test_nor_is_a_disk_that_fails"),
    Mutant("the manifest is not synced", "jaxdist/checkpoint/manifest.py", "os.fsync(file.fileno())",
           "pass", "tests/io/test_damage.py::test_it_has_its_name_when_all_of_it_is_on_disk"),
    Mutant("renamed before it is synced", "jaxdist/checkpoint/directory.py", "    sync_to_disk(temporary)\n",
           "", "tests/io/test_damage.py::test_it_has_its_name_when_all_of_it_is_on_disk"),
    Mutant("the rename is not synced", "jaxdist/checkpoint/directory.py", "    sync_to_disk(final.parent)\n",
           "", "tests/io/test_damage.py::test_it_has_its_name_when_all_of_it_is_on_disk"),
    Mutant("a step is removed before it is replaced", "jaxdist/checkpoint/directory.py", "final.rename(aside)  #",
           "shutil.rmtree(final)  #", "tests/io/test_damage.py::test_a_kill_at_any_moment_of_a_save_loses_nothing"),
    Mutant("shards are saved as training changes them", "jaxdist/checkpoint/writing.py",
           "copied(array, array.sharding) if copy else array)",
           "array)", "tests/io/test_checkpoints.py::test_a_step_may_take_what_is_being_saved"),
    Mutant("host arrays are saved as the script changes them", "jaxdist/checkpoint/writing.py", "copy=copy or None)",
           "copy=None)", "tests/io/test_checkpoints.py::test_a_step_may_take_what_is_being_saved"),
    Mutant("what a rank has otherwise is saved", "jaxdist/checkpoint/writing.py",
           "    if ctx.size > 1:\n        _compare(ctx, leaves)\n",
           "", "tests/io/test_checkpoint_jobs.py::test_two_ranks"),
    Mutant("a damaged step is not replaced", "jaxdist/checkpoint/directory.py", "passed_over: set[Path] = set()",
           "passed_over: set[Path] = type('', (set,), {'add': len})()", "tests/io/test_damage.py::test_the_one_before"),
    Mutant("a living owner's lock is no obstacle", "jaxdist/checkpoint/directory.py", "fcntl.LOCK_EX | fcntl.LOCK_NB",
           "fcntl.LOCK_SH | fcntl.LOCK_NB", "tests/io/test_checkpoint_jobs.py -k second_job", slow=True),
    Mutant("a forked child takes its parent's lock for its own", "jaxdist/checkpoint/directory.py",
           "os.register_at_fork(after_in_child=_forget_locks)",
           "", "tests/io/test_checkpoint_jobs.py -k forked_child", slow=True),
    Mutant("a dtype is lost in an export", "jaxdist/checkpoint/export.py", "x.dtype.isbuiltin == 1 if", "True if",
           "tests/io/test_export.py -k kept"),
    Mutant("export writes another array", "jaxdist/checkpoint/export.py", "renamed[new] = name, x",
           "renamed[new] = name, next(iter(leaves.values()))", "tests/io/test_export.py"),
    Mutant("export takes the last of two names", "jaxdist/checkpoint/export.py", "if new in renamed:", "if False:",
           "tests/io/test_export.py"),
    Mutant("tail='keep' drops the tail", "jaxdist/data/sampling.py",
           "return -(-left // self.whole) if self.pad or self.keep else left // self.whole",
           "return -(-left // self.whole) if self.pad else left // self.whole", "tests/io/test_data.py::test_an_epoch"),
    Mutant("padding has a weight", "jaxdist/data/sampling.py",
           "return self.order(epoch, places % self.length), places < self.length",
           "return self.order(epoch, places % self.length), places <= self.length",
           "tests/io/test_evaluate.py::test_the_sums_of_all_examples"),
    Mutant("the seed is ignored", "jaxdist/data/sampling.py",
           "return _permutation(self.length, self.seed, epoch)[places]",
           "return _permutation(self.length, 0, epoch)[places]",
           "tests/io/test_data.py::test_the_orders_of_epochs_and_seeds"),
    Mutant("each epoch has the same order", "jaxdist/data/sampling.py",
           "return _permutation(self.length, self.seed, epoch)[places]",
           "return _permutation(self.length, self.seed, 0)[places]",
           "tests/io/test_data.py::test_the_orders_of_epochs_and_seeds"),
    Mutant("a rank reads another one's rows", "jaxdist/data/sampling.py",
           "[part * each + np.arange(each) for part in self.own]",
           "[(part + 1) % self.parts * each + np.arange(each) for part in self.own]",
           "tests/io/test_data.py::test_an_epoch"),
    Mutant("a loader's state is one batch on", "jaxdist/data/loader.py", '"position": at.position} | reading.fixed',
           '"position": at.position + bool(at.position)} | reading.fixed',
           "tests/io/test_data.py::test_any_restarts_on_any_ranks_skip_and_repeat_nothing"),
    Mutant("a loop that was left comes again", "jaxdist/data/loader.py", "if self._begun:  # the last",
           "if False:  # the last", "tests/io/test_data.py::test_a_loop_that_is_left"),
    Mutant("streams of ranks are not compared", "jaxdist/data/loader.py", "if check and (last or",
           "if False and (last or", "tests/io/test_data.py::test_two_ranks_and_then_one"),
    Mutant("a stream is resumed one example before", "jaxdist/data/streamed.py", 'iter(self._source), state["given"]',
           'iter(self._source), state["given"] - 1',
           "tests/io/test_data.py::test_any_restarts_on_any_ranks_skip_and_repeat_nothing"),
    Mutant("a shuffled window is resumed at its start", "jaxdist/data/streamed.py",
           '        self._at = state["position"]\n', "",
           "tests/io/test_data.py::test_any_restarts_on_any_ranks_skip_and_repeat_nothing"),
    Mutant("tuples of a stream's state become lists", "jaxdist/data/streamed.py",
           "return {_TUPLE: items} if isinstance(x, tuple) else items", "return items",
           "tests/io/test_data.py::test_the_state_of_a_stream_is_kept_exactly_or_refused"),
    Mutant("integer keys of a stream's state become text", "jaxdist/data/streamed.py", "if not isinstance(name, str):",
           "if False:", "tests/io/test_data.py::test_the_state_of_a_stream_is_kept_exactly_or_refused"),
    Mutant("a random transform is the same in each epoch", "jaxdist/data/streamed.py",
           "[self.sampling.seed, at.epoch, at.position + i]", "[self.sampling.seed, at.position + i]",
           "tests/io/test_data.py::test_a_random_transform_depends_on_example_epoch_and_seed_alone"),
    Mutant("packing loses the last row", "jaxdist/data/packing.py", "return len(self._rows) - 1",
           "return len(self._rows) - 2", "tests/io/test_documents.py::test_rows"),
    Mutant("packing loses the rest of a long document", "jaxdist/data/packing.py",
           "(sizes % length)[sizes % length > 0]", "(sizes % length)[sizes % length > 0] // 2 + 1",
           "tests/io/test_documents.py::test_rows"),
    Mutant("damaged tokens are read", "jaxdist/data/documents.py", "if _digest(path / name) != about.get(name):",
           "if False:", "tests/io/test_documents.py::test_damage_of_tokens_is_told"),
    Mutant("a folder of tokens is not read before it is used again", "jaxdist/data/documents.py",
           "    _check_digests(path, found)\n", "", "tests/io/test_documents.py::test_damage_of_tokens_is_told"),
    Mutant("what is said of tokens may be anything", "jaxdist/data/documents.py", "if not isinstance(about, dict):",
           "if about is None:", "tests/io/test_documents.py::test_damage_of_tokens_is_told"),
    Mutant("tokens of other documents are used again", "jaxdist/data/documents.py",
           'found["bytes"] = documents.checksum()', "pass",
           "tests/io/test_documents.py::test_text_files_that_are_written_anew"),
    Mutant("evaluate loses what it has waited for", "jaxdist/data/evaluate.py",
           "total = _add(total, waiting.popleft())", "waiting.popleft()",
           "tests/io/test_evaluate.py::test_many_batches"),
    Mutant("evaluate takes means for sums", "jaxdist/data/evaluate.py", "if padded and not _is_checked(step):",
           "if False:", "tests/io/test_evaluate.py::test_what_is_no_sum_is_seen_where_there_are_weights"),
    Mutant("evaluate leaves out what was read before", "jaxdist/data/evaluate.py", 'if at["position"]:', "if False:",
           "tests/io/test_evaluate.py::test_the_sums_of_all_examples"),
    Mutant("gather_for_metrics counts padding", "jaxdist/data/gathering.py", "real = whole(weight) > 0",
           "real = whole(weight) >= 0", "tests/io/test_evaluate.py::test_what_each_example_gives"),
    Mutant("gather_for_metrics takes ranks in another order", "jaxdist/data/gathering.py",
           "np.concatenate([everyone[at] for at in once])", "np.concatenate([everyone[at] for at in once[::-1]])",
           "tests/io/test_data.py::test_two_ranks_and_then_one"),
    Mutant("a restart logs a step twice", "jaxdist/observe/metrics.py", 'entry["step"] < step)',
           'entry["step"] <= step)', "tests/io/test_logs.py::test_a_restart_leaves_no_step_twice"),
    Mutant("what a restart drops is not kept", "jaxdist/observe/metrics.py", 'shutil.copyfile(file, f"{file}.bak")',
           "pass", "tests/io/test_logs.py::test_a_restart_leaves_no_step_twice"),
    Mutant("a line without an end swallows the next", "jaxdist/observe/metrics.py", 'b"".join(line + b"\\n"',
           'b"\\n".join(line', "tests/io/test_logs.py::test_what_a_crash_has_damaged_is_dropped"),
    Mutant("a kill takes away a line", "jaxdist/observe/metrics.py", "file.flush()", "pass",
           "tests/io/test_logs.py::test_a_kill_takes_away_no_line"),
    Mutant("a log has NaN", "jaxdist/observe/metrics.py", "x if math.isfinite(x) else json.dumps(x)", "x",
           "tests/io/test_logs.py::test_nan_and_infinity_are_valid_json"),
    Mutant("throughput is that of one step", "jaxdist/observe/metrics.py", "n * steps / seconds", "n / seconds",
           "tests/io/test_logs.py::test_what_is_logged"),
    Mutant("a log waits for the device", "jaxdist/observe/metrics.py", "return all(x.is_deleted() or x.is_ready()",
           "return True or all(x.is_deleted() or x.is_ready()",
           "tests/io/test_logs.py::test_nothing_waits_for_the_device"),
    Mutant("a failed sink is called again", "jaxdist/observe/metrics.py", "self._sinks.remove(sink)", "pass",
           "tests/io/test_logs.py::test_a_sink_that_fails_is_left_out"),
    Mutant("waiting counts as sending", "jaxdist/observe/profile.py", "map(min, zip(*each", "map(max, zip(*each",
           "tests/io/test_logs.py::test_a_profile"),
    Mutant("a collective has the line of the call", "jaxdist/ir/compiled.py", 'else "" if is_ours(file) else outer',
           "else outer", "tests/io/test_logs.py::test_a_profile"),
    Mutant("the installation's test is passed by anything", "jaxdist/cli/selftest.py", "worst <= _TOLERANCE", "True",
           "tests/launch/test_tools.py::test_a_wrong_result_is_told"),
    # --- launch
    Mutant("the exit code of a failed rank is lost", "jaxdist/launch/processes.py", "        verdict = event.code\n",
           "        verdict = 1\n", "tests/launch/test_ends.py -k first_failing"),
    Mutant("SIGTERM is not passed on", "jaxdist/launch/processes.py",
           "signal.SIGKILL if again else signal.Signals(event.number))", "signal.SIGKILL)",
           "tests/launch/test_ends.py::test_a_rank_sees_the_signal_and_may_finish"),
    Mutant("what is ignored is caught", "jaxdist/launch/processes.py",
           "if signal.getsignal(number) is not signal.SIG_IGN]", "]", "tests/launch/test_ends.py -k ignored"),
    Mutant("one restart too many", "jaxdist/cli/run.py", "if not failed or restart == max_restarts:",
           "if not failed or restart > max_restarts:", "tests/launch/test_ends.py::test_no_more_than_asked_for"),
    Mutant("started again after Ctrl-C", "jaxdist/cli/run.py", "if not failed or restart == max_restarts:",
           "if restart == max_restarts:", "tests/launch/test_ends.py::test_not_again_after_the_user_has_ended_it"),
    Mutant("Slurm's rank is that on its host", "jaxdist/connectors/slurm.py",
           'rank = read_int(env, "SLURM_PROCID", 0, size - 1)', 'rank = int(env.get("SLURM_LOCALID", 0))',
           "tests/launch/test_connectors.py::test_two_slurm_jobs_at_once_on_one_host_do_not_mix"),
    Mutant("a job's number does not matter to Slurm's ranks", "jaxdist/connectors/slurm.py",
           "token = f\"slurm {env['SLURM_JOB_ID']}.", "token = f\"slurm ",
           "tests/launch/test_connectors.py::test_two_slurm_jobs_at_once_on_one_host_do_not_mix"),
    Mutant("tcp:// swaps rank and size", "jaxdist/connectors/tcp.py",
           "return TcpConnector([(host, int(port))], rank, size, timeout, name=url)",
           "return TcpConnector([(host, int(port))], size, rank, timeout, name=url)",
           "tests/launch/test_connectors.py::test_two_ranks_at_an_address"),
    Mutant("torchrun's own port is taken", "jaxdist/connectors/tcp.py", "        port += 1  #", "        port += 0  #",
           "tests/launch/test_connectors.py -k torchrun"),
    Mutant("the prefix of lines is lost", "jaxdist/launch/ranks.py", 'return lambda line: b"[%d] %b" % (rank, line)',
           "return lambda line: line", "tests/launch/test_run.py::test_lines_of_ranks_do_not_mix"),
    Mutant("ranks share all cores", "jaxdist/launch/ranks.py", "max(1, cores() // ranks)", "cores()",
           "tests/launch/test_run.py -k cores"),
]  # fmt: skip


def survives(mutant: Mutant, suite: str | None = None, root: Path = ROOT) -> str:
    """Why a mutant lives: ``""`` if a test has failed because of it.

    Args:
      mutant: of the table.
      suite: arguments of pytest in place of those that it names.
      root: of a checkout.
    """
    with tempfile.TemporaryDirectory(prefix="jaxdist-mutant-") as folder:
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy(root / name, folder)
        file = Path(folder, mutant.file)
        text = file.read_text() if file.exists() else ""
        if text.count(mutant.line) != 1:
            return f"its line occurs {text.count(mutant.line)} times in {mutant.file}"
        file.write_text(text.replace(mutant.line, mutant.broken))
        chosen = (mutant.tests if suite is None else suite).split(" -k ")
        command = [*chosen[0].split(), *(["-k", chosen[1]] if chosen[1:] else [])]
        command += [] if mutant.slow or "-m" in command else ["-m", "not slow"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", *command],
            cwd=folder, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 1 and "FAILED " in done.stdout:
            return ""
        return "SURVIVED" if done.returncode == 0 else f"pytest ended with {done.returncode}:\n{done.stdout[-1500:]}"


def main() -> int:
    """As a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--shard", default="1/1", help="I/N: the Ith of N equal parts of the table")
    parser.add_argument("--suite", help="arguments of pytest in place of the tests that a mutant names")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    args = parser.parse_args()
    part, parts = map(int, args.shard.split("/"))
    chosen = [m for m in MUTANTS if not args.words or any(word in f"{m.name} {m.file}" for word in args.words)]

    def lives(mutant: Mutant) -> bool:
        began = time.monotonic()
        why = survives(mutant, args.suite, args.root)
        print(f"{time.monotonic() - began:5.0f} s  {mutant.name} ({mutant.file}): {why or 'killed'}", flush=True)
        return bool(why)

    with ThreadPoolExecutor(2) as pool:  # each of one process, but for those that start ranks
        return sum(pool.map(lives, chosen[part - 1 :: parts]))


if __name__ == "__main__":
    sys.exit(main())
