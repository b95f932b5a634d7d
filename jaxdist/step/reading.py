"""Which leaves of a call are the batch: what `jaxdist.step.batch` says of arguments, asked with a call's own leaves."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.agreement.description import grouped
from jaxdist.placements.layouts import Layout, Padded, of_batch
from jaxdist.step import batch
from jaxdist.step.placer import Placer, abstract
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.signature import Signature
from jaxdist.step.tracing import StepJaxpr, carried, returns_like


class Reader:
    """Reads which arguments of one call are the batch.

    Args:
      signature: of it, with any batch.
      leaves: of its arguments, without constants.
      placer: onto the devices of the step.
      cache: traces the step.
      lengths: of the leaves on the root, where ranks have parts of several lengths; default: those of `leaves`.

    Attributes:
      failed: why it could not be traced for these leaves.
    """

    def __init__(
        self,
        signature: Signature,
        leaves: Sequence[Any],
        placer: Placer,
        cache: ProgramCache,
        lengths: Sequence[int | None] | None = None,
    ):
        self._signature, self._leaves, self._placer, self._cache = signature, leaves, placer, cache
        self.failed: Exception | None = None
        self._at = [at for _, at, _ in signature.arguments]
        self._types = [abstract(x) for x in leaves]
        if lengths:
            pairs = zip(self._types, lengths, strict=True)
            self._types = [a.update(shape=(n, *a.shape[1:])) if a.shape else a for a, n in pairs]
        self._sizes: dict[int, int | None] = {}  # of each leaf: how many entries may be cut
        for at in self._at:
            found = batch.sizes([leaves[i] for i in at], lambda x: is_kept(x, placer))
            self._sizes.update((i, n and lengths[i] if lengths else n) for i, n in zip(at, found, strict=True))
        self._keys = {i for i, n in self._sizes.items() if n and batch.is_keys(leaves[i])}

    def read(self, differs: Collection[int] | None, several: bool) -> Signature:
        """The signature with the batch.

        Args:
          differs: leaves that are not the same on all ranks; None: they were not compared, or all ranks pass the whole
            batch.
          several: whether there are several devices to split a batch over.

        Raises:
          AmbiguousError: there are several readings.
        """
        alone = differs is None and self._placer.parts == 1
        lengths = [batch.length([self._sizes[i] for i in at]) for at in self._at]
        arrays = {n for n, at in zip(lengths, self._at, strict=True) if not self._only_keys(at)}
        for k, at in enumerate(self._at):
            if self._only_keys(at) and lengths[k] not in arrays:
                lengths[k] = None
            if alone and any(self._sizes[i] is None or i in self._keys for i in at):
                lengths[k] = None  # see below
        arguments = [
            batch.Argument(name, n, None if differs is None else any(i in differs and self._sizes[i] for i in at))
            for (_, at, name), n in zip(self._signature.arguments, lengths, strict=True)
        ]
        found = batch.which(arguments, self._returned, lambda reading: self._traced(self._of(reading)) is not None)
        parts = [grouped((n, i) for i in at if (n := self._sizes[i]) and i not in self._keys) for at in self._at]
        mixed = [k for k, of in enumerate(parts) if of and lengths[k] is None]
        if differs is not None and not any(a.differs and a.length for a in arguments):
            unlike = [k for k in mixed if any(i in differs for of in parts[k].values() for i in of)]
            if not all(map(self._is_returned, unlike)):  # the ranks have parts of what can't be told: of nothing else
                found = ()
        if alone and several and not (found and mixed == [0]):
            mixed = [k for k in mixed if not self._is_returned(k)]
            if mixed:
                of = lambda cut: self._with_keys({i for k, n in cut for i in parts[k][n]})
                cut = batch.pieces(parts, found, mixed, lambda cut: self._traced(of(cut)) is not None)
                return self._signature.with_batch(of(cut))
        return self._signature.with_batch(self._with_keys(self._of(found)) if alone else self._of(found))

    def carried(self) -> set[int]:
        """Leaves of which the step returns the next value."""
        try:
            return carried(self._cache.jaxpr(self._signature, self._types), self._types)
        except Exception as error:  # it will come again when the step is traced as it is called
            self.failed = error
            return set()

    def alike(self, differs: Collection[int], named: Collection[str]) -> int | None:
        """A leaf of the batch that is the same on all ranks, while others of its argument are not, and that the step
        takes as well if it is one for all examples; None: there is none.

        Args:
          differs: leaves that are not the same on all ranks.
          named: leaves that are said to be the batch by themselves.
        """
        is_batch, names = self._signature.is_batch, self._signature.names
        for at in self._at:
            cut = [i for i in at if is_batch[i]]
            lengths = {np.shape(self._leaves[i])[0] for i in cut if i in differs}
            for i in cut if lengths else ():
                rows = np.shape(self._leaves[i])[0]
                # One example a rank: an array for all would be broadcast, and is the same thing if it is alike.
                if i in differs or names[i] in named or (rows == 1 and 1 in lengths):
                    continue
                if _rows_are_alike(self._leaves[i]):  # no table: the weights of examples, none of which is padding
                    continue
                step = self._traced([k for k in self._signature.batch if k != i])
                if step is not None and _uses(step, i):
                    return i
        return None

    def _of(self, arguments: Sequence[int]) -> set[int]:
        """What is cut of arguments."""
        return {i for k in arguments for i in self._at[k] if self._sizes[i] is not None}

    def _only_keys(self, at: Sequence[int]) -> bool:
        return bool(at) and self._keys.issuperset(at)

    def _with_keys(self, cut: set[int]) -> set[int]:
        """These leaves, and keys of which there is one for each of their entries."""
        entries = {self._sizes[i] for i in cut}
        also = set[int]()
        for k, at in enumerate(self._at):
            own = [i for i in self._keys.intersection(at) if self._sizes[i] in entries]
            if own and (not self._is_returned(k) if self._only_keys(at) else not cut.isdisjoint(at)):
                also.update(own)
        return cut | also

    def _returned(self) -> list[int]:
        """Arguments of which the step returns the next value."""
        found = self.carried()
        return [k for k, at in enumerate(self._at) if at and found.issuperset(at)]

    def _is_returned(self, k: int) -> bool:
        """Whether a result has the structure and types of an argument."""
        try:
            step = self._cache.jaxpr(self._signature, self._types)
        except Exception:
            return True
        return returns_like(step, self._signature.arguments[k][0], [self._types[i] for i in self._at[k]])

    def _traced(self, cut: Collection[int]) -> StepJaxpr | None:
        """The step if these leaves are the batch, with more entries than they have; None: it can't be traced."""
        tried = self._signature.with_batch(cut)
        logical = self._cache.types(tried, self._leaves)
        types = [a if b else own for a, own, b in zip(logical, self._types, tried.is_batch, strict=True)]
        if self._placer.parts == 1:  # what is no batch can't be twice as long
            types = [
                jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype) if is_batch else a
                for a, is_batch in zip(types, tried.is_batch, strict=True)
            ]
        try:
            return self._cache.jaxpr(tried, types)
        except Exception:
            return None


def _rows_are_alike(x: Any) -> bool:
    own = getattr(x, "is_fully_addressable", True) and not batch.is_keys(x)
    return own and bool((np.asarray(x) == np.asarray(x)[:1]).all())


def _uses(step: StepJaxpr, i: int) -> bool:
    jaxpr = step.jaxpr.jaxpr
    used = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    return any(v is jaxpr.invars[i] for v in used)


def is_kept(x: Any, placer: Placer) -> bool:
    """Whether a leaf is on the mesh as state is, which an earlier call returned: not split along the first axis."""
    how = x.layout if type(x) is Padded else placer.layout(x)
    return how is None or (isinstance(how, Layout) and how is not of_batch(x.shape, placer.mesh))
