"""flax nnx: modules and optimizers as arguments of a step, changed in place, as under `nnx.jit`.

Before a call the objects among the arguments are split, together, into a graph (a constant of the program) and a state
of arrays. In the step they are put together again; their new state is one more part of its result.
"""

import dataclasses
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from jaxdist.compilation.calling import apply
from jaxdist.compilation.signature import Args, PyTree, TreeDef
from jaxdist.errors import StepError

if TYPE_CHECKING:
    from flax import nnx

T = TypeVar("T")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class NnxArrays:
    """The arrays of one argument that has objects in it."""

    state: PyTree  # its part of the state of all objects, or None if earlier arguments have all of its variables
    graph: "nnx.GraphDef | None"  # of all objects, in the first of the arguments; else None
    position: int  # among the arguments that have objects

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[str, PyTree], ...], tuple["nnx.GraphDef | None", int]]:
        return (("", self.state),), (self.graph, self.position)

    @classmethod
    def tree_unflatten(cls, graph_and_position: tuple["nnx.GraphDef | None", int], children: Args) -> "NnxArrays":
        return cls(children[0], *graph_and_position)


def has_objects(tree: PyTree) -> bool:
    """Check whether a tree contains objects of nnx."""
    if "flax.nnx" not in sys.modules:  # then nobody has made one
        return False
    from flax import nnx

    # A State holds ordinary values: such a step returns the next State.
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (nnx.State, nnx.Pytree, nnx.Variable, NnxArrays)))
    return any(isinstance(x, (nnx.Pytree, nnx.Variable)) for x in leaves)


def has_split_objects(tree: TreeDef) -> bool:
    """Check whether the arguments with this structure have a `NnxArrays` among them."""
    return any((part.node_data() or (None,))[0] is NnxArrays for part in tree.children())


def with_copied_containers(args: T) -> T:
    """Copy the containers of the arguments, as `jax.jit` does, but not objects of nnx, which change in place."""
    return jax.tree.map(
        lambda x: x if has_objects(x) else jax.tree.map(lambda leaf: leaf, x), args, is_leaf=lambda x: x is not args
    )


def split(args: Sequence[PyTree]) -> tuple[Args, list[PyTree]]:
    """Return the arguments with a `NnxArrays` for each that has objects, and these objects."""
    from flax import nnx

    # Split together: a variable that two arguments share stays one, and its state is in the first of them.
    positions = [i for i, x in enumerate(args) if has_objects(x)]
    objects = [args[i] for i in positions]
    with nnx.update_context("jaxdist"):  # takes the cache that nnx.cached_partial offers, which insists on it
        graph, state = nnx.split(objects)
    split_args = list(args)
    for k, i in enumerate(positions):
        split_args[i] = NnxArrays(state.get(k), graph if k == 0 else None, k)
    return tuple(split_args), objects


def run(step: Callable[..., PyTree], args: Sequence[PyTree], keywords: Sequence[str]) -> PyTree:
    """Call a step with the objects of its arguments put together; what `update` wants follows its result."""
    positions = [i for i, x in enumerate(args) if type(x) is NnxArrays]
    if not positions:
        return apply(step, args, keywords)
    from flax import nnx

    parts: list[NnxArrays] = [args[i] for i in positions]
    graph: Any = parts[0].graph  # which only the first has
    objects = nnx.merge(graph, _joined(parts))
    variables = _variables(objects)
    merged_args = list(args)
    for i, x in zip(positions, objects, strict=True):
        merged_args[i] = x
    result = apply(step, merged_args, keywords)
    if has_objects(result):
        raise StepError(
            "the step returns an object of nnx. Objects are changed in place: pass it as an argument, and return "
            "arrays only (nnx.state(model) is one tree of them)"
        )
    new_graph, state = nnx.split(objects)
    # Two variables that changed places leave the graph as it was: `update` would then give each the other's value.
    if new_graph != graph or any(map(operator.is_not, _variables(objects), variables)):
        raise StepError(
            "the step changes what its nnx objects are made of, not only their values: a variable, or an attribute "
            "that is not an array, has changed or moved. Create all variables (also those of sow and of metrics) "
            "before the first step, set attributes (model.train(), model.eval()) outside it, and change values in "
            "place: model.kernel[...] = new"
        )
    return result, tuple(NnxArrays(state.get(k), p.graph, k) for k, p in enumerate(parts))


def update(objects: Sequence[PyTree], result: PyTree) -> PyTree:
    """Put the state that `run` returned back into the caller's objects, and return the step's own result."""
    from flax import nnx

    result, parts = result
    nnx.update(objects, _joined(parts))
    return result


def _variables(objects: PyTree) -> "list[nnx.Variable]":
    from flax import nnx

    return [x for _, x in nnx.iter_graph(objects) if isinstance(x, nnx.Variable)]


def _joined(parts: Sequence[NnxArrays]) -> "nnx.State":
    from flax import nnx

    return nnx.State({p.position: p.state for p in parts if p.state is not None})
