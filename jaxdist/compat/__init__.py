"""Every private or version-dependent touch of JAX, mpi4jax, grain and Python, with its reason; nothing else has any.

| where | what |
|---|---|
| `tracing`, `jaxprs` | what is being traced and its types; equations, and binding them anew |
| `arrays` | arrays and their memory |
| `compilation`, `devices` | the compiler; backends, and devices that are not here |
| `config`, `distributed` | `jax.config`; `jax.distributed` |
| `ending` | how Python ends a process |
| `workers` | what grain's workers share with their rank |
"""

# ruff: noqa: F401

from jaxdist.compat.arrays import adopt, bits_of, release_dropped, sharding_of
from jaxdist.compat.compilation import (
    compiler_knows,
    for_any_device,
    listed_groups,
    on_compile,
    programs,
    say_on_host,
)
from jaxdist.compat.config import platforms_asked, settings, use_settings
from jaxdist.compat.devices import (
    backend_started,
    cpu_threads,
    cpu_threads_asked,
    cpus_elsewhere,
    gloo_at,
    gpus_elsewhere,
)
from jaxdist.compat.distributed import (
    distributed_ids,
    key_value_store,
    mpi_status_ignore,
    quiet_distributed,
)
from jaxdist.compat.ending import before_threads_end, on_exit_code
from jaxdist.compat.jaxprs import (
    batched_entry_by_entry,
    bind,
    call,
    closed,
    composite_p,
    context_of,
    draws_by_key,
    expanded,
    in_backward_pass,
    linear_solve,
    makes_bits_by_place,
    name_stack,
    scan_split,
    scatter_add,
    threefry,
    user_line,
    with_constants_as_inputs,
)
from jaxdist.compat.tracing import (
    all_gather_invariant_p,
    checking_types,
    is_pmapped,
    manual_axes,
    other_collectives,
    psum_invariant_p,
    pvary_p,
    reduce_scatter_p,
    shard_map_p,
    trace_settings,
    trace_state_clean,
    under_no_mesh,
    varying_axes,
    with_weak_type,
)
from jaxdist.compat.workers import end_with_parent, forget_name, start_quiet_tracker
