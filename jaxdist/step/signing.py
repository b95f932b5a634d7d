"""What a call of a step is made of (`Signature`): which leaves are data, and which arguments are the batch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxdist.agreement.description import list_ranks, unlike_the_root
from jaxdist.errors import StepError
from jaxdist.mesh import AXIS
from jaxdist.placements.layouts import Padded, physical
from jaxdist.runtime.context import Context, parts_of_ranks
from jaxdist.step import batch
from jaxdist.step.placer import Placer, checksum, spans
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.reading import Reader
from jaxdist.step.settings import Settings
from jaxdist.step.signature import NUMBERS, Signature, Static, is_array, leaf_name

_log = logging.getLogger("jaxdist")


class Signer:
    """Tells the signatures of one step's calls.

    Args:
      name: of the step, for messages.
      settings: of the step.
      placer: onto the devices of the step.
      cache: traces the step for a signature and the types of its leaves.

    Attributes:
      failed: why the step could not be traced for the latest call; None: it could, or did not have to be.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        placer: Placer,
        cache: ProgramCache,
    ):
        self._name, self._calling, self._declared = name, settings.calling, settings.batch
        self._placer, self._cache = placer, cache
        self._made: dict[Any, Signature] = {}
        self.failed: Exception | None = None
        self._lengths: Sequence[int | None] | None = None  # of the latest call's leaves on the root: all read these
        self._several = True  # devices that a batch would be split over
        self._warned = False  # that all ranks come with the same batch

    def describe(
        self,
        args: tuple[Any, ...],
        keywords: tuple[str, ...] = (),
        several: bool | None = None,
        lengths: Sequence[int | None] | None = None,
    ) -> Signature:
        """The signature of a call, as far as this rank can tell by itself.

        A Python number is data, as under `jax.jit`, unless the step needs it as a number, to choose a branch or a
        shape: then those of its type are constants. In modules of equinox all are, as under `equinox.filter_jit`.

        Args:
          args: of the call, in order.
          keywords: names of the last ones.
          several: whether it is for several devices; None: as the placer's mesh is.
          lengths: of its leaves on the root, where ranks have parts of several lengths.

        Raises:
          TypeError: an argument that is said to be a batch is none.
        """
        self._several = self._placer.mesh.size > 1 if several is None else several
        self._lengths = lengths
        leaves = jax.tree.leaves(args)
        fixed = _in_equinox(args)
        signature = self._sign(args, keywords, fixed)
        data = signature.data(leaves)
        kinds = {type(data[i]) for i in signature.state}
        constant = [NUMBERS[:k] for k, kind in enumerate(NUMBERS, 1) if kind in kinds]
        for types in [(), *constant] if constant else []:
            tried = self._sign(args, keywords, fixed | {i for i, x in enumerate(leaves) if type(x) in types})
            try:
                self._cache.jaxpr(tried, self._cache.types(tried, tried.data(leaves)))
            except StepError:
                break
            except TypeError:  # of a tracer that is used as a number
                continue
            return self._one(tried)
        return self._one(signature)

    def settle(
        self, signature: Signature, args: tuple[Any, ...], call: int, context: Context
    ) -> tuple[Signature, dict[int, list[int]]]:
        """The signature of a call that the ranks have agreed on, from the values that each of them comes with.

        Args:
          signature: as this rank has told it.
          args: of the call.
          call: its number.
          context: the job.

        Returns:
          The signature; and the leaves that are not the same on all ranks, with the ranks where they are not as on the
          root (all, where a leaf lies on several processes).

        Raises:
          ValueError: (on every rank) which arguments are the batch can't be told.
        """
        leaves = signature.data(jax.tree.leaves(args))
        if context.size == 1 or not leaves:
            return signature, {}
        mine = [_value(x, self._placer) for x in leaves]
        everyone = context.control.exchange(f"values of step {self._name}, call {call}", mine, context.timeout)
        differs = {}
        for i, values in enumerate(zip(*everyone, strict=True)):
            if others := list(range(context.size)) if values[0] is None else unlike_the_root(values):
                differs[i] = others
        if self._declared is None and self._placer.parts > 1:
            # What lies on all processes may be of a loader, or the first argument's shards.
            first = signature.arguments[0][1]
            own = {i for i in differs if mine[i] is not None or i not in first}
            if any(mine[i] is None for i in own):  # nor is it the batch if the step returns its next value
                kept = self._reader(signature, leaves).carried()
                own = {i for i in own if mine[i] is not None or i not in kept}
            signature = self._one(self._read(signature, leaves, own))
        self._check_shared(signature, self._by_parts(signature, leaves, everyone, call, context))
        self._check_alike(signature, leaves, differs)
        seen = [i for i in signature.batch if getattr(leaves[i], "size", 1)]  # without entries all are alike
        parts = self._placer.parts
        if seen and parts > 1 and not any(i in differs for i in seen) and not self._warned:
            self._warned = True
            if context.is_root:
                of = "rank::size]" if parts == context.size else "own[0]::parts], where own, parts = ctx.parts(mesh)"
                _log.warning(
                    "step %r: all %d ranks pass the same batch, so each example counts %d times. Give each rank "
                    "its own part: jaxdist.loader does, or take x[%s",
                    self._name, context.size, parts, of,
                )  # fmt: skip
        return signature, differs

    def _one(self, signature: Signature) -> Signature:
        """The same object for the same signature: programs are kept by it."""
        return self._made.setdefault(signature.key, signature)

    def _sign(self, args: tuple[Any, ...], keywords: tuple[str, ...], numbers: frozenset[int]) -> Signature:
        leaves, tree = jax.tree.flatten(args)
        marked = [x if is_array(x) and i not in numbers else Static(x) for i, x in enumerate(leaves)]
        marked = jax.tree.unflatten(tree, marked)
        paths, tree = jax.tree_util.tree_flatten_with_path(marked)
        parameters = self._calling.of(len(args), keywords)
        names = tuple(leaf_name(parameters, path) for path, _ in paths)
        signature = Signature(tree, (False,) * len(names), names, tuple(parameters), keywords, numbers)
        leaves = [x for _, x in paths]
        if self._declared is not None:
            self._check_declared(args, parameters)
            return signature.with_batch(self._chosen(signature, leaves))
        return self._read(signature, leaves)

    def bad_constant(self, args: tuple[Any, ...], keywords: tuple[str, ...]) -> TypeError | None:
        """The error of a leaf that is no array and can't be a constant of the program, if there is one."""
        parameters = self._calling.of(len(args), keywords)
        for path, x in jax.tree_util.tree_leaves_with_path(args):
            try:
                if not is_array(x):
                    hash(x)
            except TypeError:
                return TypeError(
                    f"step {self._name!r}: argument {leaf_name(parameters, path)} is of type {type(x).__qualname__}, "
                    "neither an array nor hashable. If it holds arrays, register the class "
                    "(jax.tree_util.register_dataclass); if it is a constant, make it hashable (a frozen dataclass, "
                    "say) or close over it"
                )
        return None

    def _read(self, signature: Signature, leaves: Sequence[Any], differs: Collection[int] | None = None) -> Signature:
        reader = self._reader(signature, leaves)
        try:
            return reader.read(differs, self._several)
        except batch.AmbiguousError as error:
            raise ValueError(f"step {self._name!r}: {error}") from None
        finally:
            self.failed = reader.failed

    def _reader(self, signature: Signature, leaves: Sequence[Any]) -> Reader:
        lengths = enumerate(self._lengths or ())
        own = [n for i, n in lengths if n is not None and i not in signature.numbers]
        return Reader(signature, leaves, self._placer, self._cache, own)

    def _check_alike(self, signature: Signature, leaves: Sequence[Any], differs: Collection[int]) -> None:
        """Refuse an array in the batch that is the same on all ranks, where it may be one for all examples as well."""
        named = {n for n in self._declared or () if isinstance(n, str)}
        found = self._reader(signature, leaves).alike(differs, named)
        if found is None:
            return
        names, own = signature.names, next(at for _, at, _ in signature.arguments if found in at)
        others = [
            name for _, at, name in signature.arguments if at is not own and not set(at).isdisjoint(signature.batch)
        ]
        rest = (*others, *(names[i] for i in own if i != found and signature.is_batch[i]))
        each = (*others, next(name for _, at, name in signature.arguments if at is own), names[found])
        raise ValueError(
            f"step {self._name!r}: {names[found]} ({leaves[found].shape[0]} entries) is the same on all ranks, and the "
            "rest of the batch is not. It may be one array for all examples (the weights of classes), or each rank's "
            f"part that happens to be the same. Say which: batch_argnums={rest!r}: it is one for all; or "
            f"batch_argnums={each!r}: each rank has its own part of it. {batch.INDICES}"
        )

    def _by_parts(
        self,
        signature: Signature,
        leaves: Sequence[Any],
        everyone: Sequence[Sequence[int | None]],
        call: int,
        context: Context,
    ) -> list[dict[int, Sequence[int | None]]]:
        """What each rank passes as each of its parts of the batch: a value for each leaf."""
        passed = parts_of_ranks(context, self._placer.passed)
        if all(len({passed[rank] for rank in ranks}) == 1 for ranks in self._placer.shared):
            return [dict.fromkeys(own, values) for own, values in zip(passed, everyone, strict=True)]
        mine: dict[int, list[int | None]] = {part: [None] * len(leaves) for part in passed[context.rank]}
        for i in signature.batch:
            if not spans(physical(leaves[i])):
                rows = len(leaves[i]) // len(mine)
                for k, values in enumerate(mine.values()):
                    values[i] = checksum(leaves[i][k * rows : (k + 1) * rows])
        return context.control.exchange(f"parts of step {self._name}, call {call}", mine, context.timeout)

    def _check_shared(self, signature: Signature, everyone: Sequence[Mapping[int, Sequence[int | None]]]) -> None:
        """Refuse a batch of which ranks that have one part of it pass others."""
        for part, ranks in enumerate(self._placer.shared):
            for i in signature.batch:
                if others := unlike_the_root([everyone[rank][part][i] for rank in ranks]):
                    raise ValueError(
                        f"step {self._name!r}: batch leaf {signature.names[i]} is not the same on rank {ranks[0]} and "
                        f"rank {list_ranks([ranks[k] for k in others])}, which pass one part of the batch: on the mesh "
                        f"{dict(self._placer.mesh.shape)} they have the same place on the axis {AXIS!r}. Read the "
                        "examples of that place on each of them: jaxdist.loader(..., mesh=) does, or "
                        "take x[own[0]::parts], where own, parts = ctx.parts(mesh)"
                    )

    def _check_declared(self, args: tuple[Any, ...], parameters: Sequence[str]) -> None:
        assert self._declared is not None
        for n in self._declared:
            if isinstance(n, int) and not -len(args) <= n < len(args):
                raise TypeError(
                    f"step {self._name!r} got {len(args)} arguments, and batch_argnums={tuple(self._declared)} names "
                    "one that was not passed: pass the batch, or batch_argnums=() if the step has none"
                )
        paths = jax.tree_util.tree_leaves_with_path(args)
        names = [leaf_name(parameters, path) for path, _ in paths]
        whole = {n if isinstance(n, str) else parameters[n] for n in self._declared}
        for name, (_, leaf) in zip(names, paths, strict=True):
            if not is_array(leaf) and any(_is_in(name, of) for of in whole):
                raise TypeError(
                    f"batch leaf {name} is {leaf!r}, not an array: what is not one entry an example belongs to "
                    "the state, or batch_argnums names the wrong argument"
                )
        for n in self._declared:
            if isinstance(n, str) and not any(_is_in(name, n) for name in [*names, *parameters]):
                raise TypeError(
                    f"step {self._name!r} has no argument {n!r}, which batch_argnums names: there are "
                    f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
                )

    def _chosen(self, signature: Signature, leaves: Sequence[Any]) -> list[int]:
        """Leaves with entries of the arguments that are said to be the batch; all leaves of one that has no entries."""
        assert self._declared is not None
        chosen: list[int] = []
        for of in {n if isinstance(n, str) else signature.parameters[n]: None for n in self._declared}:
            at = [i for i, name in enumerate(signature.names) if _is_in(name, of)]
            sizes = [None] * len(at) if len(at) == 1 else batch.sizes([leaves[i] for i in at])
            keys = [batch.is_keys(leaves[i]) for i in at]
            arrays = {n for n, key in zip(sizes, keys, strict=True) if not key}
            cut = [i for i, n, key in zip(at, sizes, keys, strict=True) if n is not None and (not key or n in arrays)]
            chosen += cut or at
        return chosen


def _in_equinox(args: Any) -> frozenset[int]:
    """Positions of the Python numbers in modules of equinox."""
    if "equinox" not in sys.modules:  # then nobody has made one
        return frozenset()
    from equinox import Module

    found, position = [], 0
    for part in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, Module)):
        leaves = jax.tree.leaves(part)
        if isinstance(part, Module):
            found += [position + i for i, x in enumerate(leaves) if isinstance(x, NUMBERS)]
        position += len(leaves)
    return frozenset(found)


def _is_in(name: str, of: str) -> bool:
    """Whether a leaf belongs to an argument, or to a part of one."""
    return name == of or name.startswith((of + "[", of + "."))


def _value(x: Any, placer: Placer) -> int | None:
    """What is compared of a leaf: nothing of one that is on the mesh; None: it lies on several processes, in parts."""
    if type(x) is Padded or spans(x):
        return 0 if placer.layout(x) is None else None
    return checksum(x)
