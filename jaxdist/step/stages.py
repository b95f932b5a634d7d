"""The stages of a call, as `jax.jit` has them: traced, lowered, and compiled, for the user's own arguments."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from jaxdist.compilation import modules
from jaxdist.compilation.program import CompilerOptions, Pinned, Program
from jaxdist.compilation.signature import Args, Leaf, PyTree, TreeDef, is_constant, structure_of_values, unflattener
from jaxdist.compilation.tracing import is_traced
from jaxdist.tracebacks import api_boundary

P = ParamSpec("P")
R = TypeVar("R")
Run = Callable[[Args, dict[str, PyTree], Pinned], PyTree]  # a step, for one program only


class Stage(Generic[P, R]):
    """A call's types and structures. The batch is whole, and keyword arguments that have a position are at it."""

    def __init__(self, program: Program, run: Run):
        self._program, self._run = program, run
        self._placed, self._step = program.placed, program.placed.step
        self._out_tree = self._step.tree
        if modules.has_split_objects(self._placed.signature.tree):  # their new state follows the step's own result
            self._out_tree = self._out_tree.children()[0]
        self.out_tree: TreeDef = structure_of_values(self._out_tree)

    def _of_arguments(self, values: Sequence[Leaf]) -> tuple[Args, dict[str, PyTree]]:
        """One value for each leaf, as positional and keyword arguments."""
        signature = self._placed.signature
        args, positional = unflattener(signature.tree)(values), len(signature.parameters) - len(signature.keywords)
        dynamic = [i for i, part in enumerate(signature.tree.children()) if not is_constant(part)]
        keywords = {signature.parameters[i]: args[i] for i in dynamic if i >= positional}
        return tuple(args[i] for i in dynamic if i < positional), keywords

    def _of_result(self, values: Sequence[Leaf]) -> PyTree:
        return unflattener(self._out_tree)(values[: self._out_tree.num_leaves])

    @property
    def in_avals(self) -> PyTree:
        """The types of the arguments."""
        return self._of_arguments(self._step.jaxpr.in_avals)

    @property
    def out_info(self) -> PyTree:
        """The types of the result."""
        avals: Any = self._step.jaxpr.out_avals
        return self._of_result([jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals])


class Traced(Stage[P, R]):
    """A step that was traced for a call: ``step.trace(*args)``."""

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The step, on the whole batch and on one device."""
        return self._step.jaxpr

    def lower(self) -> "Lowered[P, R]":
        """Return the program of all devices for this call, not compiled. Nothing is sent."""
        return Lowered(self._program, self._run)


class Lowered(Stage[P, R]):
    """The program of all devices for a call: ``step.lower(*args)``; `as_text`, `cost_analysis` as in `jax.stages`."""

    def __init__(self, program: Program, run: Run):
        super().__init__(program, run)
        self._lowered = program.lower()

        self.as_text, self.cost_analysis = self._lowered.as_text, self._lowered.cost_analysis

    def compile(self, compiler_options: CompilerOptions | None = None) -> "Compiled[P, R]":
        """Return the compiled program, with more of XLA's options than the step has. Nothing is sent."""
        program = self._program.with_options(compiler_options) if compiler_options else self._program
        lowered = program.lower() if compiler_options else self._lowered
        return Compiled(self._program, program, lowered.compile(), self._run)


class Compiled(Stage[P, R]):
    """A step that is compiled for the types of one call; `as_text` and analyses as in `jax.stages`.

    It is called like the step, with the process's own part of the batch, by every process.
    """

    def __init__(self, expected: Program, program: Program, compiled: jax.stages.Compiled, run: Run):
        super().__init__(program, run)
        self._pinned, self._compiled = Pinned(expected, program), compiled
        self.as_text, self.cost_analysis = compiled.as_text, compiled.cost_analysis
        self.memory_analysis = compiled.memory_analysis

    @api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced(args, kwargs):
            raise TypeError(
                f"step {self._program.name!r} is compiled for arrays, and this call is traced (jax.jit, jax.grad, "
                "jax.vmap, ...): call the step itself there"
            )
        return self._run(args, kwargs, self._pinned)

    @property
    def input_shardings(self) -> PyTree:
        """The sharding of each argument, as (positional arguments, keyword arguments)."""
        return self._of_arguments(self._program.by_leaf(self._compiled.input_shardings[0]))

    @property
    def output_shardings(self) -> PyTree:
        """The sharding of each part of the result."""
        return self._of_result(self._compiled.output_shardings)
