"""`register`: a rule for a primitive of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import Primitive

from jaxdist.placements import rules

Rule = Callable[[Mapping[str, Any], rules.Shapes, rules.Shapes], str | None]


def register(primitive: Primitive | str, rule: str | Rule) -> None:
    """Describe how a primitive treats the dimensions of its operands, so that it runs on slices of the batch.

    By default, every device computes an unknown operation as a whole, and a message says so. Describe kernels that
    treat each example separately, or that are contractions.

    Args:
      primitive: the primitive, or its name.
      rule: a description like `numpy.einsum`'s, ``"operands->results"``. Use ``.`` for a dimension that must not be
        split. A letter that occurs in no result is summed over. Or a function ``rule(params, shapes of the operands,
        shapes of the results)`` that returns such a description, or None to compute the whole operation.

    Raises:
      ValueError: the description is invalid.

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
