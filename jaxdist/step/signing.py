"""What a call of a step is made of (`Signature`): which leaves are data, and which arguments are the batch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist.agreement.description import unlike_the_root
from jaxdist.errors import StepError
from jaxdist.mesh import AXIS
from jaxdist.placements.layouts import Padded
from jaxdist.runtime.context import Context
from jaxdist.step import batch
from jaxdist.step.placer import Placer, abstract, checksum, spans
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.settings import Settings
from jaxdist.step.signature import NUMBERS, Signature, Static, is_array, leaf_name
from jaxdist.step.tracing import carried

_log = logging.getLogger("jaxdist")


class Signer:
    """Tells the signatures of one step's calls.

    Args:
      name: of the step, for messages.
      settings: of the step.
      placer: onto the devices of the step.
      cache: traces the step for a signature and the types of its leaves.
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
        self._warned = False  # that all ranks come with the same batch

    def describe(self, args: tuple[Any, ...], keywords: tuple[str, ...] = ()) -> Signature:
        """The signature of a call, as far as this rank can tell by itself.

        A Python number is data, as under `jax.jit`, unless the step needs it as a number, to choose a branch or a
        shape: then those of its type are constants. In modules of equinox all are, as under `equinox.filter_jit`.

        Args:
          args: of the call, in order.
          keywords: names of the last ones.

        Raises:
          TypeError: an argument that is said to be a batch is none.
        """
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
        lengths = [self._length(leaves, at) for _, at, _ in signature.arguments]
        if self._declared is None:
            arguments = [  # what lies on all processes may be of a loader, or the first argument's shards
                batch.Argument(name, n, n is not None and any(i in differs and (k or mine[i] is not None) for i in at))
                for k, ((_, at, name), n) in enumerate(zip(signature.arguments, lengths, strict=True))
            ]
            signature = self._one(self._read(signature, arguments, leaves))
        seen = [i for i in signature.batch if getattr(leaves[i], "size", 1)]  # without entries all are alike
        if seen and not any(i in differs for i in seen) and not self._warned:
            self._warned = True
            if context.is_root:
                _log.warning(
                    "step %r: all %d ranks pass the same batch, so each example counts %d times. Give each rank "
                    "its own part: jaxdist.loader does, or take x[rank::size]",
                    self._name, context.size, context.size,
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
            return signature.with_batch(self._chosen(signature))
        arguments = [batch.Argument(name, self._length(leaves, at)) for _, at, name in signature.arguments]
        return self._read(signature, arguments, leaves)

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

    def _read(self, signature: Signature, arguments: Sequence[batch.Argument], leaves: Sequence[Any]) -> Signature:
        def with_batch(reading: Sequence[int]) -> Signature:
            return signature.with_batch([i for k in reading for i in signature.arguments[k][1]])

        def returned() -> list[int]:
            types = [abstract(x) for x in leaves]
            try:
                found = carried(self._cache.jaxpr(signature, types), types)
            except Exception:  # it will come again when the step is traced as it is called
                return []
            return [k for k, (_, at, _) in enumerate(signature.arguments) if at and found.issuperset(at)]

        def traces(reading: tuple[int, ...]) -> bool:
            tried = with_batch(reading)
            types = self._cache.types(tried, leaves)
            if self._placer.processes == 1:  # what is no batch can't be twice as long
                types = [
                    jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype) if is_batch else a
                    for a, is_batch in zip(types, tried.is_batch, strict=True)
                ]
            try:
                self._cache.jaxpr(tried, types)
            except Exception:
                return False
            return True

        try:
            return with_batch(batch.which(arguments, returned, traces))
        except batch.AmbiguousError as error:
            raise ValueError(f"step {self._name!r}: {error}") from None

    def _length(self, leaves: Sequence[Any], at: Sequence[int]) -> int | None:
        return batch.length([leaves[i] for i in at], self._is_kept)

    def _is_kept(self, x: Any) -> bool:
        """Whether a leaf is on the mesh as state is, which an earlier call returned: not split along the first axis."""
        if type(x) is Padded:
            return x.layout.dim != 0 or x.layout.groups > 1
        own = getattr(x, "sharding", None)
        if getattr(own, "mesh", None) != self._placer.mesh:
            return False
        spec = getattr(own, "spec", ())
        return not (spec and spec[0] in (AXIS, (AXIS,)))

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

    def _chosen(self, signature: Signature) -> list[int]:
        assert self._declared is not None
        whole = {n if isinstance(n, str) else signature.parameters[n] for n in self._declared}
        return [i for i, name in enumerate(signature.names) if any(_is_in(name, of) for of in whole)]


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
