"""Read a call of a step: find its data and its batch, and compare the values that ranks pass."""

import itertools
import logging
import sys
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.agreement.description import list_ranks, unlike_the_root
from jaxdist.errors import in_words
from jaxdist.mesh import AXIS
from jaxdist.placements.layouts import Layout, Padded, of_batch, physical
from jaxdist.step import batch
from jaxdist.step.calling import Settings
from jaxdist.step.placer import Placer, spans
from jaxdist.step.program import ProgramCache
from jaxdist.step.signature import NUMBERS, Signature, Static, constant_text, is_array, leaf_name, with_constants
from jaxdist.text import name_of

_log = logging.getLogger("jaxdist")


class Reader:
    """Reads the calls of one step."""

    def __init__(self, name: str, settings: Settings, placer: Placer, cache: ProgramCache):
        self.name, self.calling, self._declared = name, settings.calling, settings.batch_argnums
        self._placer, self._cache = placer, cache
        self.signatures: dict[Any, Signature] = {}  # of earlier calls, by their structure and constants
        self._in_modules: dict[Any, frozenset[int]] = {}  # by structure
        self._warned = False  # that all ranks pass the same batch

    def constants(self, tree: Any, leaves: Sequence[Any]) -> tuple[tuple[int, type, Any], ...]:
        """Position, type and value of each constant among these leaves."""
        own = self._in_modules[tree]
        each = enumerate(leaves)
        return tuple((i, type(x), x) for i, x in each if not is_array(x) or (i in own and isinstance(x, NUMBERS)))

    def signature(self, args: tuple[Any, ...], keywords: tuple[str, ...], leaves: list[Any], tree: Any) -> Signature:
        """The signature of a call: an earlier call's, or as this rank reads it."""
        # A Python number is data, as under `jax.jit`; in modules of equinox it is a constant, as under
        # `equinox.filter_jit`.
        if tree not in self._in_modules:
            self._in_modules[tree] = _in_equinox(args)
        parameters, constants = self.calling.of(len(args), keywords), self.constants(tree, leaves)
        numbers = frozenset(i for i, _, x in constants if isinstance(x, NUMBERS))
        for i, kind, x in constants:
            try:
                hash(x)
            except (TypeError, ValueError):  # a memoryview
                name = leaf_name(parameters, jax.tree_util.tree_leaves_with_path(args)[i][0])
                raise TypeError(
                    f"step {self.name!r}: argument {name} is of type {name_of(kind)}, neither an array nor "
                    "hashable. If it holds arrays, register the class (jax.tree_util.register_dataclass); if it is a "
                    "constant, make it hashable (a frozen dataclass, say) or close over it"
                ) from None
        if known := self.signatures.get((tree, constants)):
            return known
        paths, whole = jax.tree_util.tree_flatten_with_path(args)
        every = [leaf_name(parameters, path) for path, _ in paths]
        names = tuple(name for i, name in enumerate(every) if is_array(leaves[i]) and i not in numbers)
        static = [(name, x.value) for name, x in zip(parameters, args, strict=True) if isinstance(x, Static)]
        static += [(every[i], x) for i, _, x in constants]
        marked = [x if is_array(x) and i not in numbers else Static(x) for i, x in enumerate(leaves)]
        signature = Signature(
            with_constants(whole, marked), (False,) * len(names), names, tuple(parameters), keywords, numbers,
            tuple((name, constant_text(value)) for name, value in static),
        )  # fmt: skip
        leaves = signature.data(leaves)
        if self._declared is not None:
            return signature.with_batch(self._chosen(self._declared, args, signature, leaves))
        return self._by_structure(signature, leaves)

    def _by_structure(self, signature: Signature, leaves: Sequence[Any]) -> Signature:
        """The signature with the batch as `jaxdist.step.batch` says."""
        arguments = [self._argument([leaves[i] for i in at]) for _, at, _ in signature.arguments]

        def with_batch(chosen: Collection[int]) -> Signature:
            at = [signature.arguments[k][1] for k in chosen]
            found = [batch.sizes([leaves[i] for i in own]) for own in at]
            pairs = zip(itertools.chain(*at), itertools.chain(*found), strict=True)
            return signature.with_batch({i for i, n in pairs if n is not None})

        several = self._placer.parts > 1
        try:
            like = self._returned(with_batch(batch.batch_of(arguments) if several else ()), leaves)
        except Exception:
            if not several:
                raise
            # With the part of this process alone, which does not work next to a batch that is global already.
            like = self._returned(signature, leaves) if self._traced(signature, leaves) is None else []
        found = batch.batch_of(arguments, like)
        sure = [k for k in found if k not in like]
        mixed = 0 < len(sure) < len(found)
        if not several and not mixed:
            return with_batch(found)
        tried = [sure, *([k for k in found if k != one] for one in found if one in like)] if mixed else []
        tried += [found, *(found[k:] for k in range(1, len(found))), *(found[:-k] for k in range(1, len(found)))]
        for chosen in tried:  # a state may have the length of this batch by chance
            if self._traced(with_batch(chosen), leaves, 1 if several else 2) is None:
                return with_batch(chosen)
        if several and (error := self._traced(with_batch(found), leaves)) and self._traced(signature, leaves) is None:
            names = [signature.arguments[k][2] for k in found]
            raise ValueError(
                f"step {self.name!r}: {batch.listed(names)} would be the batch, which has the parts of all ranks, and "
                f"the step can't be traced so ({in_words(error)}). Name the batch in batch_argnums="
            ) from error
        return with_batch(found)

    def _returned(self, read: Signature, leaves: Sequence[Any]) -> list[int]:
        """Return the arguments that part of the step's result looks like, if the call is read so."""
        types = self._cache.types(read, leaves)
        return self._cache.jaxpr(read, types).returned(read.arguments, types)

    def _traced(self, read: Signature, leaves: Sequence[Any], times: int = 1) -> Exception | None:
        """Return the error of the step if traced so, with a batch `times` as long, or None."""
        types = self._cache.types(read, leaves)
        for i in read.batch if times > 1 else ():
            types[i] = types[i].update(shape=(types[i].shape[0] * times, *types[i].shape[1:]))
        try:
            self._cache.jaxpr(read, types)
        except Exception as error:
            return error
        return None

    def _argument(self, leaves: Sequence[Any]) -> batch.Argument:
        """Return the properties of an argument that decide whether it is the batch."""
        if any(self._is_state(x) for x in leaves):
            return batch.Argument(frozenset())
        entries = [x for x, n in zip(leaves, batch.sizes(leaves), strict=True) if n is not None]
        lengths = frozenset(self._placer.logical_batch(x).shape[0] for x in entries)  # of all ranks together
        return batch.Argument(lengths, all(map(batch.is_keys, entries)))

    def _is_state(self, x: Any) -> bool:
        """Check whether an earlier step, `restore` or `shard` made a leaf that is not split over the batch."""
        how = x.layout if type(x) is Padded else self._placer.layout(x)
        return how is None or (isinstance(how, Layout) and how is not of_batch(x.shape, self._placer.mesh))

    def check(
        self, signature: Signature, leaves: Sequence[Any], everyone: Sequence[Sequence[Any]], differs: Collection[int]
    ) -> bool:
        """Compare the ranks' values in a new call. Returns whether they confirm the batch."""
        self._check_shared(signature, everyone)
        parts = [x for x in (leaves[i] for i in signature.batch) if not spans(physical(x))]
        if self._placer.parts == 1 or not any(getattr(x, "size", 1) for x in parts):
            return True
        own = {i for i in differs if everyone[0][i] is not None}
        if any(i in differs for i in signature.batch):
            self._check_alike(signature, leaves, own)
            return True
        self._all_alike(signature, leaves, own)
        return False

    def _all_alike(self, signature: Signature, leaves: Sequence[Any], differs: Collection[int]) -> None:
        """All ranks pass the same batch: something else may be meant to be it; or it is state."""
        split = [k for k, (_, at, _) in enumerate(signature.arguments) if not set(at).isdisjoint(signature.batch)]
        names = [signature.arguments[k][2] for k in split]
        others = [
            name for _, at, name in signature.arguments
            if any(i in differs and not signature.is_batch[i] and np.ndim(leaves[i]) for i in at)
        ]  # fmt: skip
        like = self._returned(signature, leaves)
        if self._declared is None and (others or set(split).issubset(like)):
            but = f"but {batch.listed(others)} does" if others else "and the step returns the next value"
            raise ValueError(
                f"step {self.name!r}: {batch.listed(names)} would be the batch, and nothing of it differs between the "
                f"ranks, {but}. batch_argnums={batch.argnums(others)} says that {'that' if others else 'nothing'} is; "
                f"batch_argnums={batch.argnums(names)} that each rank has its own part of it. {batch.INDICES}"
            )
        context = self._placer.context
        if not self._warned and context.is_root:
            _log.warning(
                "step %r: all %d ranks pass the same batch, so each example counts %d times. Give each rank its own "
                "rows: jaxdist.loader does, or take x[ctx.rows(len(x)%s)]",
                self.name, context.size, self._placer.parts, ", mesh" * (len(self._placer.mesh.shape) > 1),
            )  # fmt: skip
        self._warned = True

    def _check_alike(self, signature: Signature, leaves: Sequence[Any], differs: set[int]) -> None:
        """Refuse arrays in the batch that are the same on all ranks, where they may be for all examples as well."""
        names, named = signature.names, {n for n in self._declared or () if isinstance(n, str)}
        same = [
            i for i in signature.batch if i not in differs and names[i] not in named and not spans(physical(leaves[i]))
        ]
        whole = [[i for i in at if i in same] for _, at, _ in signature.arguments if differs.isdisjoint(at)]
        # Within an argument, equal rows are not a table but weights of examples without padding.
        alone = [[i] for i in same if not any(i in at for at in whole) and not _rows_are_alike(leaves[i])]
        for group in (*alone, *whole, list(itertools.chain(*whole))):
            if not group or not self._may_be_whole(signature, leaves, group):
                continue
            rest = [names[k] for k in signature.batch if k not in group]
            own = [names[i] for i in group]
            rows = np.shape(leaves[group[0]])[0]
            raise ValueError(
                f"step {self.name!r}: {batch.listed(own[:4])} ({rows} entries) is the same on all ranks, and the rest "
                "of the batch is not. It may be one array for all examples (the weights of classes), or each rank's "
                f"part that happens to be the same. Say which: batch_argnums={batch.argnums(rest)}: it is one for all; "
                f"or batch_argnums={batch.argnums([*rest, *own])}: each rank has its own part of it. {batch.INDICES}"
            )

    def _may_be_whole(self, signature: Signature, leaves: Sequence[Any], group: Sequence[int]) -> bool:
        """Check whether the step can be traced with leaves of the batch as one for all, and reads them."""
        tried = signature.with_batch([k for k in signature.batch if k not in group])
        if self._traced(tried, leaves) is not None:
            return False
        step = self._cache.jaxpr(tried, self._cache.types(tried, leaves)).jaxpr.jaxpr
        used = {id(v) for v in (*step.outvars, *(v for eqn in step.eqns for v in eqn.invars))}
        return any(id(step.invars[i]) in used for i in group)

    def _check_shared(self, signature: Signature, everyone: Sequence[Sequence[int | None]]) -> None:
        """Refuse a batch if ranks with the same part of it pass different values."""
        for ranks in self._placer.shared:
            for i in signature.batch:
                if others := unlike_the_root([everyone[rank][i] for rank in ranks]):
                    raise ValueError(
                        f"step {self.name!r}: batch leaf {signature.names[i]} is not the same on rank {ranks[0]} and "
                        f"rank {list_ranks([ranks[k] for k in others])}, which pass one part of the batch: on the mesh "
                        f"{dict(self._placer.mesh.shape)} they have the same place on the axis {AXIS!r}. Read the "
                        "examples of that place on each of them: jaxdist.loader(..., mesh=) does, or "
                        "take x[ctx.rows(len(x), mesh)]"
                    )

    def _chosen(
        self, declared: Sequence[int | str], args: tuple[Any, ...], signature: Signature, leaves: Sequence[Any]
    ) -> list[int]:
        """Leaves with entries of the arguments that are said to be the batch; all leaves of one that has no entries."""
        parameters, chosen = signature.parameters, list[int]()
        every = {leaf_name(parameters, path): x for path, x in jax.tree_util.tree_leaves_with_path(args)}
        for n in declared:
            if isinstance(n, int) and not -len(args) <= n < len(args):
                raise TypeError(
                    f"step {self.name!r} got {len(args)} arguments, and batch_argnums={tuple(declared)} names one that "
                    "was not passed: pass the batch, or batch_argnums=() if the step has none"
                )
            of = n if isinstance(n, str) else parameters[n]
            if not any(_is_in(name, of) for name in (*every, *parameters)):
                raise TypeError(
                    f"step {self.name!r} has no argument {of!r}, which batch_argnums names: there are "
                    f"{', '.join([*every][:8])}{', ...' if len(every) > 8 else ''}"
                )
            if constants := [name for name, x in every.items() if not is_array(x) and _is_in(name, of)]:
                raise TypeError(
                    f"batch leaf {constants[0]} is {every[constants[0]]!r}, not an array: anything without one entry "
                    "per example belongs to the state, or batch_argnums names the wrong argument"
                )
            at = [i for i, name in enumerate(signature.names) if _is_in(name, of)]
            sizes = [None] * len(at) if len(at) == 1 else batch.sizes([leaves[i] for i in at])
            keys = [batch.is_keys(leaves[i]) for i in at]
            arrays = {n for n, key in zip(sizes, keys, strict=True) if not key}
            cut = [i for i, n, key in zip(at, sizes, keys, strict=True) if n is not None and (not key or n in arrays)]
            chosen += cut or at
        return chosen


def _in_equinox(args: Any) -> frozenset[int]:
    """Positions of the leaves in modules of equinox."""
    if "equinox" not in sys.modules:  # then nobody has made one
        return frozenset()
    from equinox import Module

    found, position = [], 0
    for part in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, Module)):
        leaves = jax.tree.leaves(part)
        if isinstance(part, Module):
            found += range(position, position + len(leaves))
        position += len(leaves)
    return frozenset(found)


def _is_in(name: str, of: str) -> bool:
    """Check whether a leaf belongs to an argument or a part of one."""
    return name == of or name.startswith((of + "[", of + "."))


def _rows_are_alike(x: Any) -> bool:
    return not batch.is_keys(x) and bool((np.asarray(x) == np.asarray(x)[:1]).all())
