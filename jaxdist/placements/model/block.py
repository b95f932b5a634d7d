"""A traced step as a flat list of operations: calls inlined, dead code dropped."""

import contextlib
import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxdist import compat
from jaxdist.errors import JaxdistError
from jaxdist.ir.interpreter import CONTROL_FLOW, called, has_effect
from jaxdist.ir.operations import ADDITION, CONTRACTION, LINEAR, SHAPE_ONLY
from jaxdist.placements.model import factors
from jaxdist.placements.model.values import Aval, Number, aval_of


@dataclass(eq=False)
class Node:
    """An operation."""

    eqn: JaxprEqn
    ins: tuple[int, ...]  # the numbers of its operands in the block
    outs: tuple[int, ...]  # the numbers of its results
    backward: bool  # differentiation made it
    calls: tuple[JaxprEqn, ...] = ()  # the calls that it was inlined from, outermost first
    # A list, as None is an answer too: an operation without factors is not described anew at each question.
    described: list[factors.Factors | None] = field(default_factory=list, init=False)  # its factors, once requested
    # its strategies, by its operands' placements: propagations of a block differ in few operations
    strategies: dict[Any, Any] = field(default_factory=dict, init=False)
    latest_key: Any = field(default=None, init=False)  # of the last propagation
    latest_strategies: Any = field(default=None, init=False)

    @property
    def line(self) -> str:
        """``file:line`` of the user's code; "" where JAX does not know it."""
        return next(filter(None, map(compat.user_line, (self.eqn, *self.calls))), "")

    @functools.cached_property
    def name(self) -> str:
        return self.eqn.primitive.name

    @functools.cached_property
    def kernel(self) -> str:
        """The name of a kernel; "" of other operations."""
        return compat.kernel_name(self.eqn)

    @property
    def label(self) -> str:
        """The name of the operation, and of a kernel its own."""
        return f"{self.name} {self.kernel}".strip()

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Let an error of a rule (of ours, or registered) name the operation and its line, if nothing else does."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, JaxdistError) and not getattr(error, "__notes__", ()):
                error.add_note(f"while jaxdist divided {self.name} at {self.line or 'an unknown line'}")
            raise

    @property
    def trip_count(self) -> int:
        """The number of times its bodies run; a `while` counts as one."""
        return self.eqn.params["length"] if self.name == "scan" else 1


T = TypeVar("T", bound=Hashable)


class UnionFind(Generic[T]):
    """A union-find over things that belong together."""

    def __init__(self) -> None:
        self._up: dict[T, T] = {}

    def of(self, a: T) -> T:
        """Return the representative of the class of `a`."""
        while (up := self._up.setdefault(a, a)) != a:
            # Path halving: the next walk from here is half as long.
            self._up[a] = self._up[up]
            a = up
        return a

    def tie(self, a: T, b: T) -> None:
        """Merge the classes of `a` and `b`."""
        self._up[self.of(a)] = self.of(b)


_KEEPS_ZERO = {"broadcast_in_dim", "convert_element_type", "reshape"}
_SAME = SHAPE_ONLY | {"convert_element_type"}
# More than summands may pass: `summands.linear` decides that, `added` only that nothing else needs the sum at once.
_SUMS = ADDITION | LINEAR | {"sub", "convert_element_type"}
TO_A_SUM = ADDITION | _SAME  # the operations between a term and the sum that it is part of
_DRAWS = {"random_bits", "random_fold_in", "random_gamma", "random_split"}


@dataclass(eq=False)
class Block:
    """The body of a step, a loop or a branch."""

    avals: list[Aval] = field(default_factory=list)  # the logical type of each value
    inputs: list[int] = field(default_factory=list)  # the values that it takes
    constants: dict[int, Any] = field(default_factory=dict)  # by value
    nodes: list[Node] = field(default_factory=list)  # in order
    # `nodes`, plus dead operations: marks of parameters that the optimizer ignores
    traced: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)  # the values that it returns
    uses: list[int] = field(default_factory=list)  # for each value, its uses as operand or output
    outermost: bool = False  # it is the step's own body, which runs once

    @functools.cached_property
    def numbers(self) -> dict[int, Number | None]:
        """Map each constant to its value if it is a single number, else to None."""
        return {i: _number(value) for i, value in self.constants.items()}

    @functools.cached_property
    def makers(self) -> dict[int, Node]:
        """Map each value to the operation that produces it."""
        return {o: node for node in self.nodes for o in node.outs}

    @functools.cached_property
    def input_index(self) -> dict[int, int]:
        """Map each input to its position."""
        return {i: k for k, i in enumerate(self.inputs)}

    @functools.cached_property
    def last_user(self) -> dict[int, Node]:
        """Map each value to the last operation that takes it: the only one, for a value with one use."""
        return {i: node for node in self.nodes for i in node.ins}

    @functools.cached_property
    def users(self) -> dict[int, list[int]]:
        """Map each value to the positions of the operations that take it."""
        users: dict[int, list[int]] = {}
        for k, node in enumerate(self.nodes):
            for i in dict.fromkeys(node.ins):
                users.setdefault(i, []).append(k)
        return users

    @functools.cached_property
    def before_products(self) -> frozenset[int]:
        """Return the values that some product, loop or branch depends on."""
        values: set[int] = set()
        for node in reversed(self.nodes):
            if node.name in CONTRACTION | CONTROL_FLOW or not values.isdisjoint(node.outs):
                values.update(node.ins)
        return frozenset(values)

    def source(self, i: int) -> int:
        """Follow changes of shape and dtype back to the value that this one comes from."""
        while (maker := self.makers.get(i)) is not None and maker.name in _SAME:
            i = maker.ins[0]
        return i

    def shapes(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.avals[i].shape for i in values]

    def factors(self, node: Node) -> factors.Factors | None:
        """Return the loops of an operation."""
        if not node.described:
            shapes = self.shapes(node.ins), self.shapes(node.outs)
            # Draws for one of several keys may depend on the others.
            known = node.name not in _DRAWS or compat.draws_by_key(self.avals[node.ins[0]].dtype)
            node.described.append(factors.factors(node.eqn.primitive, node.eqn.params, *shapes) if known else None)
        return node.described[0]

    def is_zero(self, i: int) -> bool:
        """Check whether the program says that each entry of a value is 0."""
        while i not in self.numbers and (maker := self.makers.get(i)) and maker.name in _KEEPS_ZERO:
            i = maker.ins[0]
        return i in self.numbers and bool(self.numbers[i] == 0)

    def new(self, aval: Aval) -> int:
        """Add a value, and return its number."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def count_uses(self) -> None:
        """Compute `uses`."""
        self.uses = [0] * len(self.avals)
        for i in (*self.outputs, *(i for node in self.nodes for i in node.ins)):
            self.uses[i] += 1


def flatten(closed: ClosedJaxpr, backward: bool = False) -> Block:
    """Flatten a jaxpr into a block."""
    block = Block()
    block.inputs = [block.new(aval_of(v)) for v in closed.jaxpr.invars]
    block.outputs = _inline(block, closed.jaxpr, closed.consts, block.inputs, backward, ())
    used = set(block.outputs)
    live: list[Node] = []
    for node in reversed(block.nodes):
        # A callback for its effect alone has no result that something could use.
        if any(i in used for i in node.outs) or has_effect(node.eqn):
            live.append(node)
            used.update(node.ins)
    block.traced, block.nodes = block.nodes, live[::-1]
    block.count_uses()
    return block


def _inline(
    block: Block, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[int], backward: bool, calls: tuple[JaxprEqn, ...]
) -> list[int]:
    env: dict[Var, int] = {}

    def constant(aval: Aval, value: Any) -> int:
        i = block.new(aval)
        block.constants[i] = _without_mesh(value)
        return i

    for v, value in zip(jaxpr.constvars, consts, strict=True):
        env[v] = constant(aval_of(v), value)
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Var | Literal) -> int:
        return constant(aval_of(atom), atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        ins = tuple(map(read, eqn.invars))
        in_backward = backward or compat.in_backward_pass(eqn)
        if eqn.primitive.name == "custom_linear_solve":  # differentiation is over: only the solution itself is left
            body, operands = compat.linear_solve(eqn.params, ins)
        else:
            body, operands = called(eqn) or compat.of_transformer_engine(eqn), ins
        if body is not None:
            outs: Sequence[int] = _inline(block, body.jaxpr, body.consts, operands, in_backward, (*calls, eqn))
        else:
            outs = tuple(block.new(aval_of(v)) for v in eqn.outvars)
            block.nodes.append(Node(eqn, ins, tuple(outs), in_backward, calls))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _without_mesh(value: Any) -> Any:
    """A constant without the mesh that JAX keeps in its type, which would meet the step's own."""
    if not isinstance(value, jax.Array) or len(value.sharding.device_set) == 1 or not value.is_fully_addressable:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data: Any = np.asarray(jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return np.asarray(value)


def _number(value: Any) -> Number | None:
    """Return a constant that is a single number, else None."""
    with contextlib.suppress(TypeError):  # a token, for example, has no dtype
        dtype = jnp.result_type(value)
        if np.ndim(value) == 0 and dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended):
            return cast(Number, np.asarray(value)[()])
    return None


def added(block: Block, outputs: frozenset[int]) -> frozenset[int]:
    """Return values that reach some outputs by additions, reshapes and constant factors only."""
    values = {block.outputs[k] for k in outputs}
    for node in reversed(block.nodes) if outputs else ():
        scaled = node.name in ("mul", "div") and any(i in block.constants for i in node.ins)
        if (scaled or node.name in _SUMS) and node.outs[0] in values:
            # A second use would add the value up in each iteration anyway.
            values.update(i for i in node.ins if block.uses[i] == 1)
    return frozenset(values)
