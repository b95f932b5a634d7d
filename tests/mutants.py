"""Bugs of one line, each of which some test must notice: `python tests/mutants.py [WORD …] [--shard I/N]`.

Each is put into a copy of the project, and the tests that it names are run there until one fails. What survives is a
row that the tests lack, or dead code. WORD: only mutants whose name or file has it. The exit code is the number of
survivors (and of mutants whose line is no longer there).
"""

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
    """A bug that someone could write."""

    name: str  # what goes wrong
    file: str  # where
    line: str  # as it stands; occurs once in the file
    broken: str  # in its place
    tests: str  # that must fail, as arguments of pytest
    slow: bool = False  # no quick test can


MUTANTS: list[Mutant] = [
    # --- placements, precision, calling, plans
    Mutant("a padded end is not masked", "jaxdist/placements/rules/run.py",
           "if split.is_padded(device.n):", "if False:",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("a loop over examples counts padding", "jaxdist/placements/rules/loops.py",
           "counts = device.real(replace(split, dim=0), 1) if padded and carry else None", "counts = None",
           "tests/oracle/test_programs.py -k control"),
    Mutant("the words of threefry are not folded", "jaxdist/placements/rules/shapes.py", "return (high ^ low).astype",
           "return high.astype", "tests/oracle/test_programs.py -k random"),
    Mutant("keys of any generator draw alone", "jaxdist/placements/model/block.py",
           "known = node.name not in _DRAWS or compat.draws_by_key(self.avals[node.ins[0]].dtype)", "known = True",
           "tests/oracle/test_programs.py -k keys_in_the_batch"),
    Mutant("a whole value counts on each device", "jaxdist/placements/emit/emitter.py",
           "return jnp.where(self.index == 0, x, nothing)", "return x", "tests/oracle/test_programs.py -k control"),
    Mutant("a summand passes any factor", "jaxdist/placements/rules/summands.py",
           "ok = sum(partial) == 1 and _scales(ins[1 - partial.index(True)], out.dtype)", "ok = sum(partial) == 1",
           "tests/oracle/test_programs.py -k traps"),
    Mutant("sums of 16 bits are narrowed before they are reduced", "jaxdist/placements/model/values.py",
           "jnp.dtype(dtype).itemsize < 4:", "jnp.dtype(dtype).itemsize < 0:",
           "tests/oracle/test_programs.py -k traps"),
    Mutant("what each device has whole is passed on in slices", "jaxdist/placements/rules/shapes.py",
           "[REPLICATED if isinstance(p, Split) and p.whole else form(p) for p in out_placements]",
           "list(map(form, out_placements))",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("an axis that vmap names is unknown", "jaxdist/placements/model/factors.py", '("reduce_sum", "psum")',
           '("reduce_sum",)', "tests/program/test_sent.py -k vmap"),
    Mutant("what a callback raised is forgotten", "jaxdist/compilation/callbacks.py", "if self._raised:", "if False:",
           "tests/oracle/test_steps.py -k callback"),
    Mutant("NaN is lost by max over devices", "jaxdist/communicators/exchange.py",
           'limits.max if op == "max" else limits.min, key', "key, key", "tests/oracle/test_programs.py -k traps"),
    Mutant("an exchange swaps its dimensions", "jaxdist/placements/emit/emitter.py",
           "split_axis=target.dim, concat_axis=source.dim", "split_axis=source.dim, concat_axis=target.dim",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("a reshape forgets that chunks end unevenly", "jaxdist/placements/model/values.py",
           "outer % left or size % right or chunk % right", "outer % left or size % right",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("looked up at another device's rows", "jaxdist/placements/rules/lookups.py",
           "jnp.where(_is(indices, column), indices - start, indices)", "indices",
           "tests/oracle/test_meshes.py -k vocabulary"),
    Mutant("a built weight's gradient is sent whole", "jaxdist/placements/search/options.py",
           "choices.append(Choice(later=later))", "pass", "tests/program/test_explain.py -k sent_at_most"),
    Mutant("a loop gathers in each iteration", "jaxdist/placements/rules/loops.py",
           "if once + trips * cost(other_body, infer) < trips * cost(body, infer):", "if False:",
           "tests/program/test_explain.py -k sent_at_most"),
    Mutant("a loop over microbatches holds the whole model", "jaxdist/placements/rules/loops.py",
           "_HELD = 2", "_HELD = 99", "tests/program/test_explain.py -k layer_at_a_time"),
    Mutant("what summands are added to counts once a device", "jaxdist/placements/rules/summands.py",
           "return k == 2 and is_zero(ins[0])", "return k == 2", "tests/oracle/test_idioms.py -k built_weights"),
    Mutant("a slice among zeros is out of place", "jaxdist/placements/emit/emitter.py",
           "whole, x.astype(whole.dtype), self.index * split.chunk, split.dim)",
           "whole, x.astype(whole.dtype), 0, split.dim)", "tests/oracle/test_idioms.py -k sinkhorn"),
    Mutant("a sum from behind starts in front", "jaxdist/placements/rules/along.py",
           "device.index + (1 if is_reversed else -1)", "device.index - 1",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("every second row begins at the first", "jaxdist/placements/rules/along.py",
           "part(xs[0], first, stride)", "part(xs[0], 0, stride)", "tests/oracle/test_programs.py -k operations"),
    Mutant("shifted padding is of other rows", "jaxdist/placements/rules/along.py",
           "jnp.where(device.real(split, x.ndim), x, lax.slice_in_dim", "jnp.where(True, x, lax.slice_in_dim",
           "tests/oracle/test_padding.py"),
    Mutant("padding is convolved", "jaxdist/placements/rules/along.py",
           "xs[0] = device.masked(xs[0], split, 0)", "pass", "tests/oracle/test_meshes.py -k convolution"),
    Mutant("a gradient is whatever is summed", "jaxdist/placements/rules/context.py",
           "[Partial(gradient=node.backward)]", "[Partial(gradient=True)]", "tests/oracle/test_steps.py -k compressed"),
    Mutant("a mix of shards and of the batch is taken for shards", "jaxdist/placements/rules/loops.py",
           "return replace(a, of_state=False) if form(a) == form(b) else", "return a if form(a) == form(b) else",
           "tests/program/test_explain.py -k mix"),
    Mutant("what an operation sends itself is not listed", "jaxdist/placements/propagate.py",
           "messages.sent_by(node, strategy)", "pass", "tests/program/test_explain.py -k itself"),
    Mutant("a value that is there already is listed again", "jaxdist/placements/propagate.py",
           "again = not self._present.isdisjoint({whole, new_form}) or (of_state and reshaped)", "again = False",
           "tests/program/test_explain.py -k idioms"),
    Mutant("padding is not counted", "jaxdist/placements/search/infer.py",
           "shape[split.dim] = split.rows * self.devices",
           "pass", "tests/program/test_explain.py -k idioms"),
    Mutant("a summand that all take in slices is reduced whole", "jaxdist/placements/propagate.py",
           "_scatter_summands(infer, propagation, summands)", "pass", "tests/program/test_explain.py -k straight"),
    Mutant("a ring is as fast as the host with most of it", "jaxdist/machine.py",
           "kind.network * min(on_host.values())", "kind.network * max(on_host.values())",
           "tests/program/test_plan.py -k ring_between"),
    Mutant("matrices go to owners and come back in another order", "jaxdist/placements/search/owners/run.py",
           "lax.slice_in_dim(x, k, k + 1)", "lax.slice_in_dim(x, self.parts - 1 - k, self.parts - k)",
           "tests/oracle/test_optimizers.py -k matrices"),
    Mutant("groups share with all devices", "jaxdist/placements/search/groups.py",
           "return 0 if size == len(hosts) else size",
           "return 0", "tests/oracle/test_zero.py -k group"),
    Mutant("a gathered gradient is turned afterwards", "jaxdist/placements/emit/emitter.py",
           "users = self.block.users.get(i, ())", "users = ()", "tests/program/test_sent.py -k turned"),
    Mutant("what two axes pad is cut at its end only", "jaxdist/placements/model/layouts.py",
           "if any(inner.pad for inner in inners):", "if False:", "tests/oracle/test_meshes.py -k two_axes_pad"),
    Mutant("level 3 keeps parameters whole", "jaxdist/placements/search/marks.py", '"parameter": 3', '"parameter": 4',
           "tests/oracle/test_zero.py -k what_a_level_keeps"),
    Mutant("a microbatch's loss is not divided", "jaxdist/gradients.py", "(total / k if jnp.issubdtype",
           "(total if jnp.issubdtype", "tests/oracle/test_steps.py -k microbatches"),
    Mutant("a step that overflows changes the state", "jaxdist/precision.py",
           "master, inner, scale = keep(master, state.master), keep(inner, state.inner), _next",
           "master, inner, scale = master, inner, _next", "tests/oracle/test_precision.py"),
    Mutant("what is asked for is not donated", "jaxdist/compilation/program.py",
           "name in settings.donate_argnums or (settings.donate and i in trace.returned_as_often)",
           "False", "tests/oracle/test_calling.py -k donated"),
    Mutant("a patient wait has a limit", "jaxdist/agreement/every_rank.py", "None if patient else context.timeout)",
           "context.timeout)", "tests/io/test_checkpoint_jobs.py -k slow_writes", slow=True),
    Mutant("padding is the largest of negative integers", "jaxdist/placements/rules/run.py",
           'return limits.min if kind == "max" else limits.max', 'return 0 if kind == "max" else limits.max',
           "tests/oracle/test_programs.py -k operations"),
    Mutant("a small integer counts on", "jaxdist/placements/rules/lookups.py",
           " or jnp.iinfo(dtype).max < max(new, default=0):", ":", "tests/oracle/test_programs.py -k operations"),
    Mutant("a slice starts at a summand", "jaxdist/placements/rules/summands.py", " and not any(partial[1:])", "",
           "tests/oracle/test_programs.py -k operations"),
    Mutant("once a number in a module, always a number", "jaxdist/step/reading.py",
           "(i in in_modules and isinstance(x, NUMBERS))", "i in in_modules",
           "tests/oracle/test_frameworks.py -k number_then"),
    Mutant("two arguments are donated into one result", "jaxdist/compilation/signature.py",
           "if len(places) == len(group) and (", "if places and (", "tests/oracle/test_calling.py -k donate"),
    Mutant("what the step returns is the batch", "jaxdist/step/batch.py",
           "[i for i in able if i in of_one_length and i not in returned]", "[i for i in able if i in of_one_length]",
           "tests/oracle/test_calling.py -k batch_is_found"),
    Mutant("a state as long as the batch is cut", "jaxdist/step/reading.py",
           "for guess in _readings(candidates, certain if is_mixed else ()):", "for guess in [candidates]:",
           "tests/oracle/test_calling.py -k batch_is_found"),
    Mutant("a call in which all ranks pass the same settles what the batch is", "jaxdist/step/calls.py",
           "(self._unconfirmed.discard if confirmed else self._unconfirmed.add)(signature)",
           "self._unconfirmed.discard(signature)",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    # --- jobs, collectives, control
    Mutant("eager extremes lose NaN over MPI", "jaxdist/collectives/mpi.py",
           'dtype.char in "fdFD" and op in ("sum", "avg")', 'dtype.char in "fdFD"',
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a small message waits for an acknowledgement", "jaxdist/control/wire.py", "socket.TCP_NODELAY, 1",
           "socket.TCP_NODELAY, 0", "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("a known call is compared", "jaxdist/agreement/ledger.py",
           "return entry.digest == self._turns.get((self._last, self._run), self._last)", "return False",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("ranks of other hosts share the cores", "jaxdist/runtime/devices.py", "if h.host == mine.host]", "]",
           "tests/jobs/test_start.py -k share"),
    Mutant("a job of the user's signal has as long as one that failed", "jaxdist/launch/processes.py",
           "_SIGNAL_GRACE_S = 10.0", "_SIGNAL_GRACE_S = 3.0", "tests/launch/test_ends.py -k may_finish"),
    Mutant("a requeued job meets its first run", "jaxdist/connectors/slurm.py",
           ".{env.get('SLURM_RESTART_COUNT', '0')}", "", "tests/launch/test_connectors.py -k slurm_jobs", slow=True),
    Mutant("the batch is donated", "jaxdist/compilation/program.py",
           "[i for i in placed.signature.state if i in donate]  # leaves",
           "[i for i in range(len(placed.avals)) if i in donate]  # leaves", "tests/oracle/test_calling.py -k donated"),
    Mutant("a user's node is made of types", "jaxdist/compilation/tracing.py",
           "unflattener(tree_and_paths[0])(tuple(tracers))",
           "unflattener(tree_and_paths[0])([t.aval for t in tracers])", "tests/oracle/test_frameworks.py -k look_at"),
    Mutant("the state of momentum is kept like the parameters", "jaxdist/compilation/signature.py",
           "(len(argument.positions), argument.structure.num_nodes))", "len(argument.positions))",
           "tests/oracle/test_zero.py -k exactly_the_leaves"),
    Mutant("zero forgets the class", "jaxdist/sharding.py", "return tx._replace(init=init, update=update)",
           "return optax.GradientTransformationExtraArgs(init, update)", "tests/oracle/test_zero.py -k class_of"),
    Mutant("nnx variables may change places", "jaxdist/compilation/modules.py",
           "any(map(operator.is_not, _variables(objects), variables))", "False",
           "tests/oracle/test_frameworks.py -k nnx_objects"),
    Mutant("the constants of an open jaxpr are lost", "jaxdist/compat/jaxprs.py",
           "replace(constvars=invars[:constants], invars=invars[constants:])", "replace(invars=invars[constants:])",
           "tests/oracle/test_steps.py -k among_the_parameters"),
    Mutant("a compiled step takes any call", "jaxdist/step/cached_call.py", "if self.program is compiled:", "if True:",
           "tests/oracle/test_calling.py -k is_compiled_for"),
    Mutant("short integers saturate over MPI", "jaxdist/communicators/mpi.py", "x.dtype.itemsize < 4", "False",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("short integers saturate in eager sums over MPI", "jaxdist/collectives/mpi.py", "dtype.itemsize >= 4",
           "True", "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("broadcast adds up floats", "jaxdist/collectives/in_step.py",
           "bits, back = exchange.unsigned(_movable(x))", "bits, back = exchange.bits(_movable(x))",
           "tests/jobs/test_results.py -k quick and run"),
    Mutant("what is received is moved implicitly", "jaxdist/collectives/messages.py", "jax.device_put(arrays)",
           "map(jax.numpy.array, arrays)", "tests/oracle/test_calling.py -k guard"),
    Mutant("what is restored is moved implicitly", "jaxdist/checkpoint/arrays.py", "value = jax.device_put(whole)",
           "value = jax.numpy.asarray(whole)", "tests/oracle/test_calling.py -k guard"),
    Mutant("equality of what is in shards is identity", "jaxdist/placements/model/layouts.py", '"eq", "ne", ', "",
           "tests/oracle/test_zero.py -k value_of_a_padded"),
    Mutant("lookups add up floats", "jaxdist/placements/rules/lookups.py", "Partial(bits=True)", "Partial()",
           "tests/oracle/test_programs.py -k moves"),
    Mutant("the root's values are added up as floats", "jaxdist/placements/emit/emitter.py",
           "bits, whole = exchange.unsigned(raw)", "bits, whole = exchange.bits(raw)",
           "tests/oracle/test_programs.py -k callback_returns"),
    Mutant("a large sum over MPI ends after its first piece", "jaxdist/collectives/mpi.py",
           "for i in range(0, given.size, step):", "for i in range(0, min(given.size, step), step):",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("the first ranks are taken for all", "jaxdist/communicators/mpi_groups.py",
           "ranks == tuple(range(every.Get_size()))", "ranks == tuple(range(len(ranks)))",
           "tests/jobs/test_results.py -k 4 and mpirun", slow=True),
    Mutant("a loop over MPI with messages turns once", "jaxdist/communicators/mpi.py",
           "return (*again(order, carry), *carry)", "return (order, jnp.asarray(False), *carry)",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a reduction in groups is of all devices", "jaxdist/collectives/in_step.py",
           "allgather(_wide(x)[None], 0, groups), 0)", "allgather(_wide(x)[None], 0, None), 0)",
           "tests/jobs/test_one_process.py -k random_calls"),
    Mutant("a reduce-scatter over gloo is of the wrong part", "jaxdist/communicators/xla.py",
           "total = exchange.summed(parts).astype(x.dtype)\n        return total if tiled",
           "total = exchange.summed(parts[:1]).astype(x.dtype)\n        return total if tiled",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("lanes are added up in XLA's order", "jaxdist/communicators/lanes.py",
           "return exchange.summed(all_gather(axes, x.astype(wire or x.dtype), groups)).astype(x.dtype)",
           "return lax.psum(x, axes, axis_index_groups=groups)", "tests/jobs/test_results.py -k lanes and quick"),
    Mutant("what a rank compiled serves others with other options", "jaxdist/runtime/executables.py",
           "parts = [_bytecode(module), options, _JAXLIB,", "parts = [_bytecode(module), _JAXLIB,",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("buckets are in another order on one rank", "jaxdist/placements/emit/buckets.py", "return bucket",
           "return bucket[:: -1 if __import__('jax').process_index() == 1 else 1]",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("constants do not count in what ranks compare", "jaxdist/ir/fingerprint.py",
           'with the checksum {checksum(np.asarray(value)):08x}', '',
           "tests/jobs/test_faults.py -k constant and hand"),
    Mutant("bits of arrays are not compared", "jaxdist/agreement/sync.py",
           "(str(shard.device), checksum(on_host(shard.data)[real]))", "(str(shard.device), 0)",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("a donated array is not named", "jaxdist/step/donated.py", 'f"step {step!r}: {name} is gone: {by} ',
           'f"step {step!r}: an array is gone: {by} ',
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    *[Mutant("an exit that is caught counts", "jaxdist/compat/processes.py", "error: note(None) if", "error: None if",
             "tests/jobs/test_faults.py -k catches_an_exit", slow=True)] * (sys.version_info >= (3, 12)),
    Mutant("an error does not say its rank", "jaxdist/control/failfast.py",
           'text = f"{control.who(control.rank)} {what}', 'text = f"a rank {what}',
           "tests/jobs/test_faults.py -k raises and run and not mpirun"),
    Mutant("processes that share some examples pass", "jaxdist/device_map.py", "if sum(map(len, different)) > count",
           "if False", "tests/jobs/test_start.py -k shares", slow=True),
    Mutant("ranks of one host listen for MPI", "jaxdist/connectors/mpi.py", '= "self,sm"', '= "^ofi"',
           "tests/jobs/test_start.py -k listens", slow=True),
    Mutant("processors that differ pass", "jaxdist/runtime/compiler.py", "if other is not None and", "if False and",
           "tests/jobs/test_start.py -k processors"),
    Mutant("workers outlive a rank that is killed", "jaxdist/runtime/readers.py", "(parent.join(), os._exit(1))",
           "parent.join()", "tests/io/test_data.py -k killed and hand", slow=True),
    Mutant("a thread that exits says nothing", "jaxdist/runtime/readers.py",
           "    except BaseException as error:\n        buffer.put((None, None, error))",
           "    except Exception as error:\n        buffer.put((None, None, error))",
           "tests/io/test_data.py -k beside_the_loop"),
    Mutant("a worker that exits says nothing", "jaxdist/runtime/readers.py", "worker.exitcode is None or not iterator",
           "not worker.exitcode or not iterator", "tests/io/test_data.py -k workers_raise", slow=True),
    Mutant("a worker sends what it can't pickle", "jaxdist/runtime/readers.py", "put(_Message(parts), ",
           "put(parts, ", "tests/io/test_data.py -k workers_raise", slow=True),
    Mutant("StopIteration ends a worker's data", "jaxdist/data/reader.py",
           "[*((i, self._transformed(source[past + i], at.epoch, i)) for i in read)]",
           "[(i, self._transformed(source[past + i], at.epoch, i)) for i in read]",
           "tests/io/test_data.py -k workers_raise", slow=True),
    Mutant("ranks outlive an mpirun that is killed", "jaxdist/launch/mpi.py", "*UNDER_MPIRUN, *program", "*program",
           "tests/launch/test_ends.py -k signals_end"),
    Mutant("ranks under mpirun have no time to save", "jaxdist/launch/mpi.py", "is_mpirun=True,",
           "is_mpirun=False,", "tests/launch/test_ends.py -k sees_the_signal"),
    Mutant("the last line of a failed job says nothing", "jaxdist/launch/processes.py",
           "if self._cause and ended.failed:", "if False:", "tests/launch/test_ends.py -k last_line"),
    Mutant("calls in another order pass", "jaxdist/agreement/ledger.py", "if self.count <= position:", "if True:",
           "tests/jobs/test_faults.py -k order and hand"),
    Mutant("a call nobody expects waits for nobody", "jaxdist/agreement/ledger.py",
           "self._context.watchdog.failed or asked or not self._foreseen(entry)", "asked",
           "tests/jobs/test_faults.py -k order and hand"),
    Mutant("a state that one rank has changed is not looked at again", "jaxdist/step/calls.py",
           "return self.number & (self.number - 1) == 0", "return self.number == 1",
           "tests/jobs/test_faults.py -k changed_copy", slow=True),
    Mutant("a target network is not kept as its online network is", "jaxdist/compilation/tracing.py",
           "for tied in matched.tied:", "for tied in ():", "tests/oracle/test_zero.py -k alike"),
    Mutant("programs of ranks are not compared", "jaxdist/agreement/calls.py", "if len(digests) > 1:", "if False:",
           "tests/jobs/test_faults.py -k constant"),
    Mutant("SIGTERM is swallowed", "jaxdist/compat/distributed.py",
           'for name in ("jax_enable_preemption_service", "jax_check_proxy_envs"):',
           'for name in ("jax_check_proxy_envs",):', "tests/jobs/test_faults.py -k SIGTERM and hand"),
    Mutant("the watchdog looks ten times later", "jaxdist/control/watchdog.py",
           "watched, deadline = newest, newest.since + self._timeout",
           "watched, deadline = newest, newest.since + 10 * self._timeout", "tests/jobs/test_faults.py -k by_hand"),
    Mutant("the other workers' engine is not seen", "jaxdist/connectors/engines.py", "and initialized()[1] > 1:",
           "and False:", "tests/jobs/test_start.py -k initialized"),
    Mutant("Kubeflow's variables are not seen", "jaxdist/connectors/engines.py",
           'if any(name in env for name in _TRAINER) and env.get("JAX_NUM_PROCESSES") != "1":', "if False:",
           "tests/launch/test_connectors.py -k launcher_that_is_there"),
    Mutant("the proof of the secret is not looked at", "jaxdist/control/wire.py",
           "return hmac.compare_digest(proof, ", "return True or (proof, ",
           "tests/control/test_control.py -k goes_on"),
    Mutant("what a stranger sends is unpickled before its proof", "jaxdist/control/wire.py",
           "theirs = await self._reader.readexactly(len(mine))",
           "theirs = await self._reader.read(1 << 12)\n"
           "        with __import__('contextlib').suppress(Exception):\n"
           "            pickle.loads(theirs[8:])",
           "tests/control/test_control.py -k goes_on"),
    Mutant("one of several processes is taken for alone", "jaxdist/connectors/__init__.py",
           "    if others is not None:\n        raise", "    if False:\n        raise",
           "tests/jobs/test_start.py -k initialized"),
]  # fmt: skip
# Checkpoints, data, logs.
MUTANTS += [
    Mutant("digests are not compared", "jaxdist/checkpoint/arrays.py", "in everyone) != leaf.digest:",
           "in everyone) < 0:", "tests/io/test_damage.py::test_each_damage_is_told"),
    Mutant("digests of arrays split over ranks are not compared", "jaxdist/checkpoint/reading.py",
           "            arrays.compare(root / str(found), leaves, everyone)\n", "",
           "tests/io/test_checkpoint_jobs.py::test_two_ranks"),
    Mutant("ranks may save different values", "jaxdist/checkpoint/writing.py", "!= math.prod(leaf.shape)", "< 0",
           "tests/io/test_checkpoint_jobs.py::test_two_ranks"),
    Mutant("damage is not passed over", "jaxdist/checkpoint/reading.py",
           "        except (DamagedError, FileNotFoundError) as failure:",
           "        except FileNotFoundError as failure:", "tests/io/test_damage.py::test_the_one_before"),
    Mutant("the latest is the lowest", "jaxdist/checkpoint/reading.py", "in reversed(known):", "in known:",
           "tests/io/test_checkpoints.py -k names_and_not_by_times"),
    Mutant("a changed manifest is believed", "jaxdist/checkpoint/manifest.py",
           "        if outer[\"digest\"] != hashlib.sha256(content.encode()).hexdigest():", "        if False:",
           "tests/io/test_damage.py::test_each_damage_is_told"),
    Mutant("renamed before it is synced", "jaxdist/checkpoint/writing.py", "    directory.sync_to_disk(temporary)\n",
           "", "tests/io/test_damage.py::test_it_has_its_name_when_all_of_it_is_on_disk"),
    Mutant("shards are saved as training changes them", "jaxdist/checkpoint/writing.py",
           "copied(array, array.sharding) if copy else array\n", "array\n",
           "tests/io/test_checkpoints.py::test_a_step_may_take_what_is_being_saved"),
    Mutant("a living owner's lock is no obstacle", "jaxdist/checkpoint/directory.py", "fcntl.LOCK_EX | fcntl.LOCK_NB",
           "fcntl.LOCK_SH | fcntl.LOCK_NB", "tests/io/test_checkpoint_jobs.py -k second_job", slow=True),
    Mutant("a dtype is lost in an export", "jaxdist/checkpoint/formats.py",
           "np.dtype(x.dtype.type).isbuiltin == 1 if", "True if", "tests/io/test_export.py -k kept"),
    Mutant("tail='keep' drops the tail", "jaxdist/data/sampling.py",
           "return -(-left // self.batch_size) if self.keep else left // self.batch_size",
           "return left // self.batch_size",
           "tests/io/test_data.py::test_an_epoch"),
    Mutant("ranks assume that all pass as many rows", "jaxdist/agreement/calls.py",
           "if any(rows.total != total for rows in found):", "if False:",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("batches of as many rows on some rank are not told apart", "jaxdist/step/calls.py",
           "cached.is_ambiguous = any(", "cached.is_ambiguous = False and any(",
           "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a loader does not say how long the last batch is", "jaxdist/data/loader.py",
           "if context.size > 1 and any(", "if False and any(", "tests/jobs/test_results.py -k quick and mpirun"),
    Mutant("a copy on a second device may differ", "jaxdist/step/records.py",
           "for shard in physical(x).addressable_shards}", "for shard in physical(x).addressable_shards[:1]}",
           "tests/jobs/test_results.py -k 2_devices", slow=True),
    Mutant("processes may see a part of each other's GPUs", "jaxdist/runtime/devices.py",
           "if overlap or any(", "if any(", "tests/jobs/test_start.py -k gpu"),
    Mutant("the rows of several devices are cut by indices that move", "jaxdist/step/batch_placer.py",
           "pieces = program(x) if isinstance(x, jax.Array) and len(devices) > 1 else cut(x)", "pieces = cut(x)",
           "tests/jobs/test_results.py -k 2_devices", slow=True),
    Mutant("hosts of a TPU slice do not find each other", "jaxdist/connectors/engines.py",
           "return \"tpu\" if may_be and", "return \"tpu\" if False and",
           "tests/launch/test_connectors.py -k TPU", slow=True),
    Mutant("groups of within= first meet in the step", "jaxdist/step/calls.py", "if self._several and is_new:",
           "if False:", "tests/jobs/test_start.py -k sums_in_groups", slow=True),
    Mutant("libtpu may be of any version", "jaxdist/extras.py",
           'if not wanted or not installed or f"{installed}.".startswith(f"{wanted}."):', "if True:",
           "tests/jobs/test_start.py -k libtpu", slow=True),
    Mutant("rows of other sizes pass", "jaxdist/step/placer.py",
           "np.shape(x)[0] == self.share.size(total):", "True:",
           "tests/jobs/test_results.py -k quick and run and not mpirun and not lanes"),
    Mutant("a loader's state is one batch on", "jaxdist/data/loader.py", '"position": at.position} | reader.fixed',
           '"position": at.position + bool(at.position)} | reader.fixed',
           "tests/io/test_data.py::test_any_restarts_on_any_ranks_skip_and_repeat_nothing"),
    Mutant("streams of ranks are not compared", "jaxdist/data/loader.py", "if read.digest and (last or",
           "if False and (last or", "tests/io/test_data.py::test_several_ranks_and_then_one"),
    Mutant("a stream is resumed one example before", "jaxdist/data/reader.py", "skip = at.position - start\n",
           "skip = max(0, at.position - start - 1)\n",
           "tests/io/test_data.py::test_any_restarts_on_any_ranks_skip_and_repeat_nothing"),
    Mutant("a stream that comes in another order passes", "jaxdist/data/reader.py",
           "if expected is not None and (not rows or digest(rows[0][0]) != expected):", "if False:",
           "tests/io/test_data.py::test_a_stream_that_comes_in_another_order"),
    Mutant("a restart logs a step twice", "jaxdist/observe/metrics.py", 'entry["step"] < step)',
           'entry["step"] <= step)', "tests/io/test_logs.py::test_a_restart_leaves_no_step_twice"),
    Mutant("a step of a log is rounded", "jaxdist/observe/metrics.py", "operator.index(step)", "int(step)",
           "tests/io/test_logs.py::test_what_a_log_refuses"),
    Mutant("a kill takes away a line", "jaxdist/observe/metrics.py", "file.flush()", "pass",
           "tests/io/test_logs.py::test_a_kill_takes_away_no_line"),
    Mutant("waiting counts as sending", "jaxdist/observe/profile.py", "map(min, zip(*each", "map(max, zip(*each",
           "tests/io/test_logs.py::test_a_profile"),
    # --- launch
    Mutant("SIGTERM is not passed on", "jaxdist/launch/processes.py",
           "child.ask_to_end(number)", "child.send(signal.SIGKILL)",
           "tests/launch/test_ends.py -k sees_the_signal"),
    Mutant("started again after Ctrl-C", "jaxdist/cli/run.py", "if not ended.failed or restart == max_restarts:",
           "if restart == max_restarts:", "tests/launch/test_ends.py::test_not_again_after_the_user_has_ended_it"),
]  # fmt: skip


def survives(mutant: Mutant, suite: str | None = None, root: Path = ROOT) -> str:
    """Why a mutant lives: ``""`` if a test has failed because of it."""
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
