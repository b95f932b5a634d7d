"""A step's options, and the arguments of a call in the order of its parameters."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from jaxdist.compilation.signature import Args, Kwargs, Leaf, PyTree, Static
from jaxdist.mesh import Sizes


class Calling:
    """The signature of one step, and its static arguments."""

    def __init__(self, step: Callable[..., PyTree], static_argnums: Sequence[int], static_argnames: Sequence[str]):
        try:
            self._signature = inspect.signature(step)
        except (TypeError, ValueError):  # of C
            self._signature = None
        self._parameters = list(self._signature.parameters.values()) if self._signature else []
        self._names = [p.name for p in self._parameters]
        self.static = self.named("static", static_argnums, static_argnames)

    def named(self, kind: str, argnums: Sequence[int], argnames: Sequence[str]) -> frozenset[str]:
        """The names of the parameters that two options give, by position and by name."""
        for n in argnums:
            if not -len(self._names) <= n < len(self._names):
                raise ValueError(f"{kind}_argnums={n}: the step has {len(self._names)} parameters")
        unknown = set(argnames).difference(self._names)
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in self._parameters):
            raise ValueError(f"{kind}_argnames={sorted(unknown)}: the step's parameters are {self._names}")
        return frozenset(self._names[n] for n in argnums).union(argnames)

    def arrange(self, args: Args, kwargs: Kwargs) -> tuple[Args, tuple[str, ...]]:
        """All arguments of a call in the order of the parameters, constants as `Static`."""
        if self._signature is not None:
            # Arguments passed by name go to their position where they have one, so both spellings are one program.
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        keywords = tuple(kwargs)
        values = (*args, *kwargs.values())
        if self.static:
            named = zip(self.of(len(values), keywords), values, strict=True)
            values = tuple(_static(name, x) if name in self.static else x for name, x in named)
        return values, keywords

    def of(self, count: int, keywords: Collection[str] = ()) -> list[str]:
        """Return the name of each argument of a call, for messages."""
        names, places = [], count - len(keywords)
        for p in self._parameters:
            if p.kind is p.VAR_POSITIONAL:
                names += [f"{p.name}[{i}]" for i in range(places - len(names))]
            elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                names.append(p.name)
        names += [f"argument {i}" for i in range(len(names), places)]
        return [*names[:places], *keywords]


def apply(step: Callable[..., PyTree], args: Sequence[PyTree], keywords: Sequence[str]) -> PyTree:
    """Call a step with what `Calling.arrange` returns."""
    places = len(args) - len(keywords)
    return step(*args[:places], **dict(zip(keywords, args[places:], strict=True)))


def _static(name: str, value: Leaf) -> Static:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"the static argument {name} is a {type(value).__name__}, which has no hash: a constant of the program is "
            "compared with its value in earlier calls. Pass a tuple, say, or a frozen dataclass"
        ) from None
    return Static(value)


AnyMesh = Mesh | Sizes | Literal["auto"]
# The dimension to cut, by a regular expression for the names of leaves of the state; or the model's own annotations.
Layouts = Mapping[str, int | None] | Literal["annotations"]
Batch = int | str
Compression = Literal["bf16", "fp16"]
AUTO: Literal["auto"] = "auto"
ANNOTATIONS: Literal["annotations"] = "annotations"
COMPRESSIONS = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Settings:
    """A step's options: the arguments of `jaxdist.data_parallel`."""

    step: Callable[..., PyTree]  # the function
    calling: Calling  # how it is called
    batch_argnums: tuple[Batch, ...] | None  # which arguments are the batch, if the user has said so
    donate: bool  # whether state that the step returns is donated
    donate_argnums: frozenset[str]  # names of arguments that are
    check_finite: bool  # whether NaN and infinity in the result are errors
    check_every: int  # calls between comparisons of the devices' copies; 0 for never
    verify: bool  # whether each program is compared with the step before it runs
    mesh: AnyMesh | None  # the devices, or the sizes of the axes of all of the job's
    layouts: Layouts | None  # along the model axis, if the user has said so
    bucket_bytes: int | None  # of a message of gradients
    compress: Compression | None  # the dtype for sending gradients
    compiler_options: tuple[tuple[str, object], ...]  # XLA's, by name

    def entries(self) -> list[tuple[str, str]]:
        """Return names and values of the options that must agree between ranks."""
        mesh: object = self.mesh
        if isinstance(mesh, Mesh):
            # The text of a mesh does not say which devices it has, or in which order.
            mesh = dict(mesh.shape), [device.id for device in mesh.devices.flat]
        values: dict[str, object] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"donate_argnums": sorted(self.donate_argnums), "mesh": mesh}
        return [(f"option {name}", repr(value)) for name, value in values.items() if name not in ("step", "calling")]
