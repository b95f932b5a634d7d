"""`register`: a rule for a primitive of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import Primitive

from jaxdist.placements import rules

Rule = Callable[[Mapping[str, Any], rules.Shapes, rules.Shapes], str | None]


def register(primitive: Primitive | str, rule: str | Rule) -> None:
    """Say what a primitive does to the dimensions of its operands, so that it runs on slices of the batch.

    A decorated step computes an operation that it knows nothing about whole on every device (and says so). A kernel
    that treats each example alone, or is a contraction, need not be: one line tells.

    Args:
      primitive: or its name.
      rule: as `numpy.einsum` describes an operation, ``"operands->results"``, with ``.`` for a dimension that is needed
        whole: a letter that no result has is summed over. Or ``rule(params, shapes of the operands, shapes of the
        results)``, which returns such a description, or None: computed whole.

    Raises:
      ValueError: a rule that is no such description.

    Example:
      >>> from jaxdist.placements import register
      >>> from jax.extend.core import Primitive
      >>> attention_p = Primitive("my_attention")  # queries, keys, values: (batch, time, heads, width)
      >>> register(attention_p, "b..., b..., b... -> b...")

    References:
      The sharding rules of Shardy (``OpShardingRule``).
    """
    name = primitive if isinstance(primitive, str) else primitive.name
    if isinstance(rule, str):
        rules.FACTORS[name] = _described(rule)
    elif callable(rule):
        rules.FACTORS[name] = lambda *of: None if (found := rule(*of)) is None else _described(found)(*of)
    else:
        raise ValueError(f"rule={rule!r}: a description such as 'b..., .d -> b.', or a function")


def _described(rule: str) -> rules.Rule:
    equation = rule.replace(" ", "")
    if equation.count("->") != 1 or set(equation) - set("->,.") - set(rules.LETTERS):
        raise ValueError(f"rule={rule!r}: expected a description such as 'b..., .d -> b.', or a function")
    return rules.einsum(equation)
