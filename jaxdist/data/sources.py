"""The sources of a loader: arrays, objects with examples by index, and streams."""

import ast
import copy
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_NO_LITERAL = ValueError, SyntaxError, TypeError, RecursionError, MemoryError


class Arrays:
    """A pytree of arrays with one entry per example, as a source."""

    def __init__(self, tree: Any):
        found: dict[int | str, str] = {}  # lengths, each with the first array that has it
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            is_array = isinstance(x, np.ndarray | jax.Array) and x.ndim and not isinstance(x, np.ma.MaskedArray)
            length = len(x) if is_array else f"a {'' if np.ndim(x) else 'scalar '}{type(x).__name__}"
            found.setdefault(length, "source" + jax.tree_util.keystr(path))
        (length, *_), shown = found or [0], ", ".join(f"{name}: {what}" for what, name in found.items())
        if len(found) != 1 or isinstance(length, str):
            raise ValueError(
                f"the arrays of a data set have one length, the number of examples; found {shown or 'no arrays'}. "
                "(A list means a list of examples; a dict or tuple means its parts)"
            )
        self.tree, self.length = jax.tree.map(np.asarray, tree), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        # Copy, since a transform may write into it.
        return jax.tree.map(lambda x: x[index : index + 1].copy()[0], self.tree)

    def ends(self) -> int:
        """Return a digest of the first and last example, to detect a source that is only a part."""
        return digest([x[[0, -1]] for x in jax.tree.leaves(self.tree) if len(x) and not x.dtype.hasobject])


def check_examples(source: Any) -> None:
    """Refuse a source of batches, such as torch's `DataLoader`."""
    if (size := getattr(source, "batch_size", None)) is None:
        return
    inner = "its data set (.dataset)" if hasattr(source, "dataset") else "a source of examples"
    raise TypeError(
        f"a {type(source).__name__} with batch_size={size} yields batches, and jaxdist.loader makes batches of "
        f"examples: pass {inner}, or leave the loader out and pass this rank's rows of each batch to the step, "
        "x[ctx.rows(len(x))]"
    )


def is_stream(source: Any) -> bool:
    """Check whether a source only iterates, or is a function of the epoch that returns such."""
    # torch's iterable data sets have a __getitem__, which raises.
    iterates = any(kind.__name__ == "IterableDataset" for kind in type(source).__mro__)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not iterates:
        return False
    if not callable(source) or hasattr(source, "__iter__"):
        check_iterable(source)
    return True


def check_iterable(source: Any) -> None:
    """Refuse objects that are not iterable, or that can be read only once."""
    kind = type(source).__name__
    if isinstance(source, str | bytes) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        raise TypeError(
            f"expected a source with __len__ and __getitem__, an iterable of examples, or a function of the epoch that "
            f"returns one, not a {kind}"
        )
    if iter(source) is source:
        raise TypeError(
            f"a {kind} can be read only once, but a source is read in each epoch and after a restart. Pass a "
            "function of the epoch that returns it, or a class with __iter__"
        )


def open_epoch(source: Any, epoch: int) -> Iterator[Any]:
    """Return one epoch's examples of a stream; for grain's, a `grain.DatasetIterator`."""
    import grain  # slow to import

    if callable(source) and not hasattr(source, "__iter__"):
        source = source(epoch)
        if hasattr(source, "__next__"):
            return source
    if isinstance(source, grain.MapDataset):
        source = source.to_iter_dataset()
    if isinstance(source, grain.IterDataset):
        return iter(source)
    check_iterable(source)
    source = copy.copy(source)  # its position belongs to this iterator alone
    return _shuffled(source, epoch) if hasattr(source, "set_epoch") else iter(source)


def _shuffled(source: Any, epoch: int) -> Iterator[Any]:
    source.set_epoch(epoch)
    try:
        yield from source
    except Exception as error:
        # Hugging Face's datasets 5 cannot shuffle the shards after .take or .skip, and raises before the first example.
        if type(error).__name__ != "DataSourcesShufflingDisallowed":
            raise
        source.set_epoch(0)
        yield from source


def as_text(state: Any) -> str | None:
    """Write the state of a stream as a Python literal, or return None if that would change it."""
    try:
        text = repr(state)
        return text if ast.literal_eval(text) == state else None
    except _NO_LITERAL:
        return None


def of_text(text: str) -> Any:
    """Read a state that `as_text` wrote."""
    try:
        return ast.literal_eval(text)
    except _NO_LITERAL:
        raise ValueError(f"not the state of a stream: {text[:80]!r}") from None


def digest(example: Any) -> int:
    """Return a digest to tell examples apart."""
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(example))
    return zlib.crc32(b"".join(repr(x.tolist()).encode() if x.dtype.hasobject else x.tobytes() for x in leaves))


def stacked(examples: list[tuple[int, Any]], count: int) -> Any:
    """Stack examples into a batch of `count`, 0 or all; their indices are for messages."""
    form = lambda example: (jax.tree.structure(example), [np.shape(leaf) for leaf in jax.tree.leaves(example)])
    (first, like), *_ = examples
    expected = form(like)
    for i, example in examples:
        if example is None or form(example) != expected:
            raise ValueError(
                f"example {i} of the data set has the shapes {_shapes(example)}, and example {first} {_shapes(like)}: "
                "pad or crop in transform=, and filter a stream (.to_iter_dataset())"
            )
    if any(isinstance(leaf, np.ma.MaskedArray) for leaf in jax.tree.leaves(like)):
        raise TypeError(f"example {first} of the data set has a masked array: return its data and its mask")
    return jax.tree.map(lambda *leaves: np.stack(leaves)[:count], *(example for _, example in examples))


def _shapes(example: Any) -> str:
    """Show shapes next to the leaves' paths, since a node of the user's own may refuse to hold them."""
    leaves = jax.tree_util.tree_leaves_with_path(example)
    return ", ".join(f"{jax.tree_util.keystr(path)} {np.shape(x)}".lstrip() for path, x in leaves) or repr(example)
