"""A transformer with a kernel for its attention, compiled for devices that are not here."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax._src.cudnn import (
    fused_attention_stablehlo as cudnn,  # private: it asks the GPU, which is not here, what it can
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from test_plan import for_gpus, for_tpus

import jaxdist
from jaxdist.planning.elsewhere import Elsewhere

pytestmark = pytest.mark.optimised

ROWS, TIME, HEADS, DIM = 32, 256, 8, 64
WIDTH = HEADS * DIM
HEADS_CUT: dict[str, Any] = {"layouts": {"in": 2, "out": 0}}


def by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def by_splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((TIME, TIME))] * HEADS)
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    by_head = [x.swapaxes(1, 2) for x in (q / DIM**0.5, k, v)]
    return jnp.einsum("bhtd->bthd", jax.vmap(kernel)(*by_head))


def planned(attend: Any, **settings: Any) -> tuple[Any, ...]:
    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["embedding"][tokens]
        q, k, v = jnp.moveaxis(jnp.einsum("btw,wchd->btchd", x, p["in"]), 2, 0)
        x = x + jnp.einsum("bthd,hdw->btw", attend(q, k, v), p["out"])
        logits = (x @ p["embedding"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def step(p: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    shapes = {"embedding": (512, WIDTH), "in": (WIDTH, 3, HEADS, DIM), "out": (HEADS, DIM, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    over = jaxdist.parallel if settings else jaxdist.data_parallel
    return over(step, **settings), params, jax.ShapeDtypeStruct((ROWS, TIME), jnp.int32)


def compiled(topology: str, step: Any, *args: Any) -> str:
    elsewhere = Elsewhere(step, args, topology, ())
    text = elsewhere.forecast.ahead().program.lower().compile().as_text()
    assert text
    assert not re.search(r" all-gather(-start)?\(", text)
    return text


def shapes_of_kernels(text: str, target: str) -> set[tuple[int, ...]]:
    """Those of 16-bit results of its custom calls."""
    calls = re.findall(rf"= (.*?) custom-call\(.*?custom_call_target=\"{target}", text)
    return {tuple(map(int, shape.split(","))) for call in calls for shape in re.findall(r"bf16\[([\d,]+)\]", call)}


@for_gpus
@pytest.mark.parametrize(("mesh", "rows", "heads"), [({}, 4, 8), ({"data": 2, "model": 4}, 16, 2)], ids=str)
def test_cudnn_gets_examples_and_heads(
    mesh: dict[str, int], rows: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    with jax.enable_x64(False):
        text = compiled("8xH100", *planned(by_cudnn, **(HEADS_CUT | {"mesh": mesh} if mesh else {})))
    for target in ('__cudnn\\$fmhaSoftmax"', "__cudnn\\$fmhaSoftmaxBackward"):
        assert shapes_of_kernels(text, target) == {(rows, heads, TIME, DIM)}


@for_tpus
@pytest.mark.parametrize(("mesh", "rows", "heads"), [({}, 4, 8), ({"data": 2, "model": 4}, 16, 2)], ids=str)
def test_splash_attention_gets_examples_and_heads(mesh: dict[str, int], rows: int, heads: int) -> None:
    with jax.enable_x64(False):
        text = compiled("v5e:2x4", *planned(by_splash, **(HEADS_CUT | {"mesh": mesh} if mesh else {})))
    assert shapes_of_kernels(text, "tpu_custom_call") == {(rows, heads, TIME, DIM)}
