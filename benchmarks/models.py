"""The models of the benchmarks in plain NumPy: weights and each rank's batch, from one seed for all frameworks."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np


class Mlp(NamedTuple):
    """Linear layers of these widths with GELU between them, on vectors."""

    widths: tuple[int, ...]
    rows: int = 64  # of a rank's batch


class LeNet(NamedTuple):
    """The LeNet of examples/mnist.py, on images of 28 x 28 x 1.

    Attributes:
      patches: in JAX, compute convolutions as products with a matrix of patches whose last
      dimension is the batch; XLA's own take two to three times as long on CPUs.
    """

    rows: int = 64
    patches: bool = True


class Gpt(NamedTuple):
    """A byte-level GPT: pre-norm, tied embedding, no biases, no dropout."""

    layers: int
    width: int
    heads: int
    context: int
    rows: int = 8


Model = Mlp | LeNet | Gpt

MODELS: dict[str, Model] = {
    "MLP-10M": Mlp((784, *[1024] * 10, 10)),
    "MLP-0.4M": Mlp((784, *[256] * 4, 10)),
    "MLP-deep": Mlp((784, *[64] * 101, 10)),
    "LeNet": LeNet(),
    "GPT-10M": Gpt(layers=6, width=384, heads=6, context=64),
    "LeNet-conv": LeNet(patches=False),
}
TINY: dict[str, Model] = {
    "MLP-tiny": Mlp((12, 16, 10), rows=4),
    "GPT-tiny": Gpt(layers=2, width=32, heads=2, context=8, rows=2),
}
"""For tests of the benchmarks."""

LEARNING_RATE = 1e-3
VOCABULARY = 256


def find(name: str) -> Model:
    """Return the model with this name."""
    return (MODELS | TINY)[name]


def init(model: Model) -> Any:
    """Return its weights: a list of layers ``{"w", "b"}``, or the GPT's dict."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    def affine(*shape: int) -> dict[str, np.ndarray]:
        # Scaled so that 100 layers keep a signal, and gradients are not denormal.
        return {"w": normal(*shape, scale=(2 / np.prod(shape[:-1])) ** 0.5), "b": normal(shape[-1], scale=0.4)}

    match model:
        case Mlp():
            return [affine(a, b) for a, b in itertools.pairwise(model.widths)]
        case LeNet():  # filters: height, width, in, out
            return [affine(*s) for s in ((5, 5, 1, 6), (5, 5, 6, 16), (400, 120), (120, 84), (84, 10))]
        case Gpt():
            d = model.width
            matrices = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
            ones = np.ones(d, np.float32)
            return {
                "embed": normal(VOCABULARY, d, scale=0.02),
                "place": normal(model.context, d, scale=0.02),
                "layers": [
                    {"norm1": ones, "norm2": ones} | {k: normal(*s, scale=s[0] ** -0.5) for k, s in matrices.items()}
                    for _ in range(model.layers)
                ],
                "norm": ones,
            }


def batch(model: Model, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of a rank."""
    rng = np.random.default_rng(1 + rank)
    if isinstance(model, Gpt):
        text = rng.integers(0, VOCABULARY, (model.rows, model.context + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]
    shape = (28, 28, 1) if isinstance(model, LeNet) else (model.widths[0],)
    return rng.normal(size=(model.rows, *shape)).astype(np.float32), rng.integers(0, 10, model.rows).astype(np.int32)


def batches(model: Model, ranks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Join the batches of several ranks."""
    inputs, targets = zip(*(batch(model, rank) for rank in ranks), strict=True)
    return np.concatenate(inputs), np.concatenate(targets)


def leaves(tree: Any) -> list[np.ndarray]:
    """Return the arrays of a tree of dicts and lists."""
    if isinstance(tree, np.ndarray):
        return [tree]
    return [x for child in (tree.values() if isinstance(tree, dict) else tree) for x in leaves(child)]


def parameters(model: Model) -> int:
    """Return the number of parameters."""
    return sum(x.size for x in leaves(init(model)))
