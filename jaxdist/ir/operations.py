"""The table of operations: properties that a primitive's name alone implies."""

from jax.extend.core import Primitive

from jaxdist import compat

# The result is the operand, perhaps in a different place.
SAME = frozenset({"copy", "copy_p", "device_put", "jaxdist_plain", "jaxdist_shard", "layout_constraint", "pvary",
                  "reshard", "sharding_constraint"})  # fmt: skip
# The result has each entry of the operand once, at negligible cost.
SHAPE_ONLY = frozenset({"copy", "copy_p", "reshape", "squeeze", "transpose"})
ADDITION = frozenset({"add", "add_any"})
# Linear in one operand: the result for a sum is the sum of the results.
LINEAR = SHAPE_ONLY | {"broadcast_in_dim", "conj", "dynamic_slice", "imag", "neg", "real", "reduce_sum", "rev", "slice"}
# Linear collectives whose result is at most as large as their operand.
ACROSS = frozenset({"all_to_all", "jaxdist_all_reduce", "jaxdist_reduce_scatter", "ppermute"})
CONTRACTION = frozenset({"conv_general_dilated", "dot_general"})
# Never moved into work that one device does for all: marks, code for each device, callbacks on the root.
FOR_ITSELF = frozenset({"debug_callback", "debug_print", "io_callback", "jaxdist_count", "jaxdist_own_code",
                        "jaxdist_plain", "jaxdist_shard", "pure_callback", "rng_uniform", "shard_map"})  # fmt: skip
# The results have the operand's dimensions, some of them longer or shorter.
SAME_RANK = frozenset({"concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "rev", "slice", "sort",
                       "split"})  # fmt: skip
# These are elementwise, though JAX has a special rule to batch them.
_OF_ENTRIES = frozenset({
    "add_any", "clamp", "convert_element_type", "copy_p", "device_put", "mesh_cast", "name", "optimization_barrier",
    "layout_constraint", "pvary", "random_gamma_grad", "reshard", "select_n", "sharding_constraint", "stop_gradient",
})  # fmt: skip
# JAX batches these like elementwise operations, but results may have more or fewer dimensions.
_OTHER_DIMENSIONS = frozenset({"from_edtype", "random_bits", "random_seed", "random_split", "random_unwrap",
                               "to_edtype"})  # fmt: skip
# Elementwise work that should not be repeated, or that has a place.
_DEAR = frozenset({"device_put", "optimization_barrier", "philox2x32", "philox4x32", "random_fold_in",
                   "random_gamma_grad", "reshard", "stage", "threefry2x32", "threefry4x32", "tie",
                   "with_memory_space_constraint"})  # fmt: skip


def is_elementwise(primitive: Primitive) -> bool:
    """Check whether entries of results depend only on the operands' entries at their position."""
    name = primitive.name  # JAX's registry of batching has its own operations in any version, and a user's
    return name in _OF_ENTRIES or (compat.batched_entry_by_entry(primitive) and name not in _OTHER_DIMENSIONS)


def is_deferrable(primitive: Primitive) -> bool:
    """Check whether an operation is cheap: if all its operands are deferred, its result is too."""
    return is_elementwise(primitive) and primitive.name not in _DEAR
