"""Read a call of a step: find its data and its batch."""

import itertools
import sys
from collections.abc import Iterable, Sequence

import jax

from jaxdist.compilation.annotations import model_dims
from jaxdist.compilation.calling import Settings
from jaxdist.compilation.program import ProgramCache
from jaxdist.compilation.signature import (
    NUMBERS,
    Args,
    Constant,
    Leaf,
    Signature,
    Static,
    Structure,
    constant_text,
    is_array,
    is_keys,
    leaf_name,
    with_constants,
)
from jaxdist.errors import in_words
from jaxdist.placements.model.layouts import Layout, Padded, of_batch
from jaxdist.step import batch
from jaxdist.step.placer import Placer
from jaxdist.text import name_of


class Reader:
    """Reads the calls of one step."""

    def __init__(self, name: str, settings: Settings, placer: Placer, cache: ProgramCache):
        self.name, self.calling, self._declared = name, settings.calling, settings.batch_argnums
        self._placer, self._cache = placer, cache
        # Of calls that all ranks have agreed on: `Calls._compared_and_placed` enters them.
        self.signatures: dict[tuple[Structure, tuple[Constant, ...]], Signature] = {}
        self._in_modules: dict[Structure, frozenset[int]] = {}

    def constants(self, tree: Structure, leaves: Sequence[Leaf]) -> tuple[Constant, ...]:
        """The constants among these leaves, of a structure that `signature` has read."""
        in_modules = self._in_modules[tree]
        return tuple(
            Constant(i, type(x), x) for i, x in enumerate(leaves)
            if not is_array(x) or (i in in_modules and isinstance(x, NUMBERS))
        )  # fmt: skip

    def signature(self, args: Args, keywords: tuple[str, ...], leaves: Sequence[Leaf], tree: Structure) -> Signature:
        """The signature of a call: an earlier call's, or as this rank reads it."""
        # A Python number is data, as under `jax.jit`; in modules of equinox it is a constant, as under
        # `equinox.filter_jit`.
        if tree not in self._in_modules:
            self._in_modules[tree] = _in_equinox(args)
        parameters, constants = self.calling.of(len(args), keywords), self.constants(tree, leaves)
        self._check_hashable(constants, parameters, args)
        if earlier := self.signatures.get((tree, constants)):
            return earlier  # by structure alone: batches of other sizes are read the same way
        numbers = frozenset(c.position for c in constants if isinstance(c.value, NUMBERS))
        paths, whole = jax.tree_util.tree_flatten_with_path(args)
        leaf_names = [leaf_name(parameters, path) for path, _ in paths]
        is_data = [is_array(x) and i not in numbers for i, x in enumerate(leaves)]
        names = tuple(itertools.compress(leaf_names, is_data))
        static = [(name, x.value) for name, x in zip(parameters, args, strict=True) if isinstance(x, Static)]
        static += [(leaf_names[c.position], c.value) for c in constants]
        marked = [x if data else Static(x) for x, data in zip(leaves, is_data, strict=True)]
        annotations = enumerate(itertools.compress(model_dims(args), is_data))
        annotated = [(i, dim) for i, (dim, is_annotated) in annotations if is_annotated]
        signature = Signature(
            with_constants(whole, marked), is_batch=(False,) * len(names), names=names,
            parameters=tuple(parameters), keywords=keywords, numbers=numbers,
            constants=tuple((name, constant_text(value)) for name, value in static),
            annotated=tuple(annotated) if any(dim is not None for _, dim in annotated) else (),
        )  # fmt: skip
        leaves = signature.data(leaves)
        if self._declared is not None:
            return signature.with_batch(self._chosen(self._declared, args, signature, leaves))
        return self._by_structure(signature, leaves)

    def _check_hashable(self, constants: Iterable[Constant], parameters: Sequence[str], args: Sequence[Leaf]) -> None:
        """Refuse a constant that cannot be compared with constants of earlier calls."""
        for position, kind, value in constants:
            try:
                hash(value)
            except (TypeError, ValueError):  # a memoryview
                path, _ = jax.tree_util.tree_leaves_with_path(args)[position]
                name = leaf_name(parameters, path)
                raise TypeError(
                    f"step {self.name!r}: argument {name} is of type {name_of(kind)}, neither an array nor "
                    "hashable. If it holds arrays, register the class (jax.tree_util.register_dataclass); if it is a "
                    "constant, make it hashable (a frozen dataclass, say) or close over it"
                ) from None

    # --- the batch by structure

    def _by_structure(self, signature: Signature, leaves: Sequence[Leaf]) -> Signature:
        """The signature with the batch as `jaxdist.step.batch` says.

        The step returns its state. To know that, it must be traced, and to trace it, the call must be read:

        1. It is traced once with the reading that is certain, or else most likely (`_returned`).
        2. `batch_of` takes what that returns into account.
        3. A state may have the batch's length by chance. Then the first reading (`_readings`) in which the step can be
           traced is taken; such a state, read as the batch, prevents that:

        ==================  =====================================  ==========================================
        candidates          one process                            several, whose parts are joined
        ==================  =====================================  ==========================================
        all or none are     nothing is tried: they are the batch   `_readings`, all candidates first
        returned
        some are returned   `_readings`, those without returned    the same, not doubled: no state is as long
        (`is_mixed`)        ones first, with a batch twice as      as the joined batch
                            long: a state does not fit that
        ==================  =====================================  ==========================================

        If none can be traced, all candidates are the batch; with several processes that is an error if the step cannot
        be traced so, but can be without a batch.
        """
        arguments = [self._argument([leaves[i] for i in argument.positions]) for argument in signature.arguments]
        passes_parts = len(self._placer.device_map.sharers) > 1
        returned = self._returned(signature, leaves, batch.batch_of(arguments) if passes_parts else None)
        candidates = batch.batch_of(arguments, returned)
        certain = [k for k in candidates if k not in returned]  # arguments that the step does not return are not state
        is_mixed = 0 < len(certain) < len(candidates)
        if not passes_parts and not is_mixed:
            return _with_batch(signature, leaves, candidates)
        for guess in _readings(candidates, certain if is_mixed else ()):
            reading = _with_batch(signature, leaves, guess)
            if self.error_if_read(reading, leaves, batch_factor=1 if passes_parts else 2) is None:
                return reading
        reading = _with_batch(signature, leaves, candidates)
        error = self.error_if_read(reading, leaves) if passes_parts else None
        if error and self.error_if_read(signature, leaves) is None:
            names = [signature.arguments[k].name for k in candidates]
            raise ValueError(
                f"step {self.name!r}: {batch.listed(names)} would be the batch, which has the parts of all ranks, and "
                f"the step can't be traced so ({in_words(error)}). Name the batch in batch_argnums="
            ) from error
        return reading

    def _returned(self, signature: Signature, leaves: Sequence[Leaf], likely: Sequence[int] | None) -> list[int]:
        """Return the arguments that part of the step's result looks like; `likely`: those that may be the batch."""
        if likely is None:  # one process has the whole batch: read as state it has the same shapes
            return self.returned(signature, leaves)
        try:  # the parts that processes pass must be joined first
            return self.returned(_with_batch(signature, leaves, likely), leaves)
        except Exception:  # of the user's step: `likely` is wrong, or the step is
            # With the part of this process alone, which does not work next to a batch that is global already.
            return self.returned(signature, leaves) if self.error_if_read(signature, leaves) is None else []

    def returned(self, signature: Signature, leaves: Sequence[Leaf]) -> list[int]:
        """Return the arguments that part of the step's result looks like, if the call is read so."""
        types = self._placer.types(signature, leaves)
        return self._cache.jaxpr(signature, types).returned(signature.arguments, types)

    def error_if_read(self, signature: Signature, leaves: Sequence[Leaf], batch_factor: int = 1) -> Exception | None:
        """Return the error of the step if it is traced so, with a batch that many times as long, or None."""
        types = self._placer.types(signature, leaves)
        for i in signature.batch if batch_factor > 1 else ():
            shape = types[i].shape
            types[i] = types[i].update(shape=(shape[0] * batch_factor, *shape[1:]))
        try:
            self._cache.jaxpr(signature, types)
        except Exception as error:
            return error
        return None

    def _argument(self, leaves: Sequence[Leaf]) -> batch.Argument:
        """Return the properties of an argument that decide whether it is the batch."""
        if any(self._is_state(x) for x in leaves):
            return batch.Argument(frozenset())
        entries = [x for x, n in zip(leaves, batch.sizes(leaves), strict=True) if n is not None]
        lengths = frozenset(self._placer.logical_batch(x).shape[0] for x in entries)  # of all ranks together
        return batch.Argument(lengths, all(map(is_keys, entries)))

    def _is_state(self, x: Leaf) -> bool:
        """Check whether an earlier step, `restore` or `shard` made a leaf that is not split over the batch."""
        current = x.layout if type(x) is Padded else self._placer.layout(x)
        if current is None:
            return True
        return isinstance(current, Layout) and current is not of_batch(x.shape, self._placer.mesh)

    # --- the batch that the user names

    def _chosen(
        self, declared: Sequence[int | str], args: Args, signature: Signature, leaves: Sequence[Leaf]
    ) -> list[int]:
        """Leaves with entries of the arguments that are said to be the batch; all leaves of one that has no entries."""
        parameters, chosen = signature.parameters, list[int]()
        by_name = {leaf_name(parameters, path): x for path, x in jax.tree_util.tree_leaves_with_path(args)}
        for n in declared:
            if isinstance(n, int) and not -len(args) <= n < len(args):
                raise TypeError(
                    f"step {self.name!r} got {len(args)} arguments, and batch_argnums={tuple(declared)} names one that "
                    "was not passed: pass the batch, or batch_argnums=() if the step has none"
                )
            part = n if isinstance(n, str) else parameters[n]
            if not any(_is_in(name, part) for name in (*by_name, *parameters)):
                raise TypeError(
                    f"step {self.name!r} has no argument {part!r}, which batch_argnums names: there are "
                    f"{', '.join([*by_name][:8])}{', ...' if len(by_name) > 8 else ''}"
                )
            if constants := [name for name, x in by_name.items() if not is_array(x) and _is_in(name, part)]:
                raise TypeError(
                    f"batch leaf {constants[0]} is {by_name[constants[0]]!r}, not an array: anything without one entry "
                    "per example belongs to the state, or batch_argnums names the wrong argument"
                )
            positions = [i for i, name in enumerate(signature.names) if _is_in(name, part)]
            chosen += _with_entries(positions, leaves) or positions
        return chosen


def _with_batch(signature: Signature, leaves: Sequence[Leaf], chosen: Iterable[int]) -> Signature:
    """The signature with these arguments as the batch: all of their leaves that can be split."""
    split = set[int]()
    for k in chosen:
        positions = signature.arguments[k].positions
        sizes = batch.sizes([leaves[i] for i in positions])
        split.update(i for i, size in zip(positions, sizes, strict=True) if size is not None)
    return signature.with_batch(split)


def _readings(candidates: Sequence[int], certain: Sequence[int]) -> list[Sequence[int]]:
    """The arguments that may be the batch, the likeliest reading first: a state may have its length by chance."""
    # Of candidates 1, 2 and 3, where 3 is certain: [3], then all without one of the others, [2, 3] and [1, 3], then
    # all, and what is left without the first or the last ones.
    readings = list[Sequence[int]]()
    if certain:
        readings.append(certain)
        readings += [[k for k in candidates if k != state] for state in candidates if state not in certain]
    readings.append(candidates)
    readings += [candidates[k:] for k in range(1, len(candidates))]
    readings += [candidates[:-k] for k in range(1, len(candidates))]
    return list(dict.fromkeys(map(tuple, readings)))


def _with_entries(positions: Sequence[int], leaves: Sequence[Leaf]) -> list[int]:
    """Return the leaves of a part of an argument that have an entry for each example."""
    # A leaf that is named alone is the batch, regardless of its shape.
    sizes = [None] if len(positions) == 1 else batch.sizes([leaves[i] for i in positions])
    keys = [is_keys(leaves[i]) for i in positions]
    lengths = {n for n, key in zip(sizes, keys, strict=True) if not key}
    return [
        i for i, n, key in zip(positions, sizes, keys, strict=True)
        if n is not None and (not key or n in lengths)
    ]  # fmt: skip


def _in_equinox(args: Args) -> frozenset[int]:
    """Positions of the leaves in modules of equinox."""
    if "equinox" not in sys.modules:  # then nobody has made one
        return frozenset()
    from equinox import Module

    in_modules, position = list[int](), 0
    for part in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, Module)):
        count = len(jax.tree.leaves(part))
        if isinstance(part, Module):
            in_modules += range(position, position + count)
        position += count
    return frozenset(in_modules)


def _is_in(name: str, part: str) -> bool:
    """Check whether a leaf belongs to an argument or a part of one."""
    return name == part or name.startswith((part + "[", part + "."))
