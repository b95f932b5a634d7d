"""Compare the values that ranks pass in a new call: each rank has a different part of the batch, and the same state."""

import itertools
import logging
from collections.abc import Collection, Sequence

import numpy as np

from jaxdist.agreement.description import list_ranks, unlike_the_root
from jaxdist.compilation.calling import Settings
from jaxdist.compilation.placed import PlacedStep
from jaxdist.compilation.program import ProgramCache
from jaxdist.compilation.signature import Leaf, Signature, is_keys
from jaxdist.mesh import AXIS
from jaxdist.placements.model.layouts import physical
from jaxdist.step import batch
from jaxdist.step.leaves import spans
from jaxdist.step.placer import Placer
from jaxdist.step.reading import Reader

_log = logging.getLogger("jaxdist")

Checksums = Sequence[int | None]  # of a call's data; None for leaves in parts on several processes
DifferingRanks = dict[int, list[int]]  # for each leaf that is not the same on all ranks, which ranks differ from rank 0


class ValueCheck:
    """The check of the values of one step's calls."""

    def __init__(self, name: str, settings: Settings, placer: Placer, cache: ProgramCache, reader: Reader):
        self.name, self._declared = name, settings.batch_argnums
        self._placer, self._cache, self._reader = placer, cache, reader
        self._warned = False  # that all ranks pass the same batch

    def check(
        self, signature: Signature, leaves: Sequence[Leaf], by_rank: Sequence[Checksums], differs: Collection[int]
    ) -> bool:
        """Compare the ranks' values in a new call. Returns whether they confirm the batch."""
        self._check_shared(signature, by_rank)
        parts = [x for x in (leaves[i] for i in signature.batch) if not spans(physical(x))]
        # With one place on the data axis all ranks pass the same rows, as they should.
        if len(self._placer.device_map.sharers) == 1 or not any(getattr(x, "size", 1) for x in parts):
            return True
        # A leaf in parts on several processes has no checksum: it is not known to differ.
        unequal = {i for i in differs if by_rank[0][i] is not None}
        if any(i in differs for i in signature.batch):
            self._check_equal_in_batch(signature, leaves, unequal)
            return True
        self._check_equal_batches(signature, leaves, unequal)
        return False

    def _check_equal_batches(self, signature: Signature, leaves: Sequence[Leaf], differs: Collection[int]) -> None:
        """All ranks pass the same batch: something else may be meant to be it; or it is state."""
        split = [k for k, a in enumerate(signature.arguments) if not set(a.positions).isdisjoint(signature.batch)]
        names = [signature.arguments[k].name for k in split]
        others = [
            argument.name for argument in signature.arguments
            if any(i in differs and not signature.is_batch[i] and np.ndim(leaves[i]) for i in argument.positions)
        ]  # fmt: skip
        returned = self._reader.returned(signature, leaves)
        if self._declared is None and (others or set(split).issubset(returned)):
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
                self.name, context.size, len(self._placer.device_map.sharers),
                ", mesh" * (len(self._placer.mesh.shape) > 1),
            )  # fmt: skip
        self._warned = True

    def _check_equal_in_batch(self, signature: Signature, leaves: Sequence[Leaf], differs: set[int]) -> None:
        """Refuse arrays in the batch that are the same on all ranks, where they may be for all examples as well."""
        names, said_by_name = signature.names, {n for n in self._declared or () if isinstance(n, str)}
        equal = {
            i for i in signature.batch
            if i not in differs and names[i] not in said_by_name and not spans(physical(leaves[i]))
        }  # fmt: skip
        equal_arguments = [
            [i for i in argument.positions if i in equal]
            for argument in signature.arguments if differs.isdisjoint(argument.positions)
        ]  # fmt: skip
        in_equal_arguments = list(itertools.chain(*equal_arguments))
        # Within an argument, equal rows are not a table but weights of examples without padding.
        alone = [[i] for i in sorted(equal.difference(in_equal_arguments)) if not _rows_are_equal(leaves[i])]
        for group in (*alone, *equal_arguments, in_equal_arguments):
            if not group or not self._may_be_whole(signature, leaves, group):
                continue
            same = [names[i] for i in group]
            others = [names[i] for i in signature.batch if i not in group]
            rows = np.shape(leaves[group[0]])[0]
            raise ValueError(
                f"step {self.name!r}: {batch.listed(same[:4])} ({rows} entries) is the same on all ranks, and the rest "
                "of the batch is not. It may be one array for all examples (the weights of classes), or each rank's "
                f"part that happens to be the same. Say which: batch_argnums={batch.argnums(others)}: it is one for "
                f"all; or batch_argnums={batch.argnums([*others, *same])}: each rank has its own part of it. "
                f"{batch.INDICES}"
            )

    def _may_be_whole(self, signature: Signature, leaves: Sequence[Leaf], group: Sequence[int]) -> bool:
        """Check whether the step can be traced with leaves of the batch as one for all, and reads them."""
        without = signature.with_batch([i for i in signature.batch if i not in group])
        if self._reader.error_if_read(without, leaves) is not None:
            return False
        step = self._cache.jaxpr(without, self._placer.types(without, leaves)).jaxpr.jaxpr
        used = {id(v) for v in (*step.outvars, *(v for eqn in step.eqns for v in eqn.invars))}
        return any(id(step.invars[i]) in used for i in group)

    def _check_shared(self, signature: Signature, by_rank: Sequence[Checksums]) -> None:
        """Refuse a batch if ranks with the same part of it pass different values."""
        for ranks in self._placer.device_map.sharers:
            for i in signature.batch:
                if others := unlike_the_root([by_rank[rank][i] for rank in ranks]):
                    raise ValueError(
                        f"step {self.name!r}: batch leaf {signature.names[i]} is not the same on rank {ranks[0]} and "
                        f"rank {list_ranks([ranks[k] for k in others])}, which pass one part of the batch: on the mesh "
                        f"{dict(self._placer.mesh.shape)} they have the same place on the axis {AXIS!r}. Read the "
                        "examples of that place on each of them: jaxdist.loader(..., mesh=) does, or "
                        "take x[ctx.rows(len(x), mesh)]"
                    )

    def check_state(self, step: str, placed: PlacedStep, data: Sequence[Leaf], differs: DifferingRanks) -> None:
        """Rank 0's state is used on all ranks. State that is only read must not differ; for other state, warn."""
        names = placed.signature.names
        must_be_equal = set(placed.unreturned)
        for argument in placed.signature.arguments if self._declared is None else ():
            sizes = batch.sizes([data[i] for i in argument.positions])
            if len(set(sizes) - {None}) == 1:  # it could as well be the batch
                must_be_equal.update(argument.positions)
        for i in sorted(must_be_equal.intersection(differs)):
            raise ValueError(
                f"step {step!r}: state leaf {names[i]} is not the same on rank 0 and rank "
                f"{list_ranks(differs[i])}. If each rank has its own part of it, it belongs to the batch: name its "
                "argument in batch_argnums. If the ranks should have the same (a number, or a key, from which each "
                "example gets numbers of its own), pass it, or decorate the step that made it with "
                f"jaxdist.data_parallel. {batch.INDICES}"
            )
        differ = sorted(differs)
        if differ and self._placer.context.is_root:
            also = f" (and {len(differ) - 1} other leaves)" if len(differ) > 1 else ""
            _log.warning(
                "step %r: state leaf %s%s is not the same on rank 0 and rank %s: all continue with rank 0's value",
                step, names[differ[0]], also, list_ranks(differs[differ[0]]),
            )  # fmt: skip


def _rows_are_equal(x: Leaf) -> bool:
    return not is_keys(x) and bool((np.asarray(x) == np.asarray(x)[:1]).all())
