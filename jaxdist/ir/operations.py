"""The table of operations: what the passes know of a primitive by its name alone.

How its dimensions follow from those of the operands is in `jaxdist.placements.rules`.
"""

from __future__ import annotations

SAME = frozenset({"copy", "copy_p", "device_put", "jaxdist_plain", "jaxdist_shard", "pvary", "reshard",
                  "sharding_constraint"})  # fmt: skip
"""The result is the operand, perhaps elsewhere."""

SHAPE_ONLY = frozenset({"copy", "copy_p", "reshape", "squeeze", "transpose"})
"""The result has the operand's entries, each once, and takes no work worth a name."""

ADDITION = frozenset({"add", "add_any"})

LINEAR = SHAPE_ONLY | {"broadcast_in_dim", "dynamic_slice", "expand_dims", "neg", "reduce_sum", "rev", "slice"}
"""Of one operand: of a sum, the result is the sum of the results."""

CHEAP = SHAPE_ONLY | {"broadcast_in_dim", "convert_element_type", "div", "mul", "neg"}
"""May stand between what makes a tensor and its collective, without making that later."""

CARRIES = (
    ADDITION | (SAME - {"device_put", "pvary", "reshard", "sharding_constraint"})
    | {"clamp", "convert_element_type", "max", "min", "neg", "optimization_barrier", "reduce_precision",
       "stop_gradient", "sub"}
)  # fmt: skip
"""What comes out is a next value of an operand of its shape."""

CONTRACTION = frozenset({"conv_general_dilated", "dot_general"})

FACTORISATION = {"cholesky": 1 / 3, "eig": 25, "eigh": 9, "geqrf": 2, "hessenberg": 10 / 3, "householder_product": 2,
                 "lu": 2 / 3, "qr": 4, "schur": 25, "svd": 20, "triangular_solve": 1, "tridiagonal": 4 / 3}  # fmt: skip
"""Of matrices: FLOPs, over the product of both dimensions and the smaller one (Golub and Van Loan, *Matrix
Computations*)."""

FOR_ITSELF = frozenset({"debug_callback", "debug_print", "io_callback", "jaxdist_count", "jaxdist_plain",
                        "jaxdist_shard", "pure_callback", "rng_uniform", "shard_map"})  # fmt: skip
"""Not to be moved into what one device computes for all: marks, the user's own code for each device, and what is called
on the root."""

SAME_RANK = frozenset({"concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "rev", "slice", "sort",
                       "split"})  # fmt: skip
"""The results have the operand's dimensions, some of them longer or shorter."""

ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
    "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to",
    "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg", "nextafter", "not",
    "optimization_barrier", "or", "polygamma", "population_count", "pow", "random_fold_in", "random_gamma_grad",
    "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "threefry2x32", "xor", "zeta", "name", "pvary", "reshard",
    "sharding_constraint", "mesh_cast", "device_put", "random_clone",
})  # fmt: skip
"""Operands and results have the same dimensions, and an entry of a result is made of those at its place."""

DEFERRABLE = ELEMENTWISE - {
    "device_put", "optimization_barrier", "random_fold_in", "random_gamma_grad", "reshard", "threefry2x32",
}  # fmt: skip
"""Cheap to compute where all that they take is deferred: what they make is deferred too."""
