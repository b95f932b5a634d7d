"""The decorated step: its arguments are told apart, it is traced once, placed, lowered, and called.

| where | what |
|---|---|
| `data_parallel`, `settings` | the decorator, and what it was given |
| `decorated`, `method` | the decorated step, and a call of it |
| `preparing`, `latest` | what a call runs: what is looked at each time, and what only the first time |
| `calling`, `signature`, `signing`, `batch` | the arguments in order, by structure: constants, state, the batch |
| `entering`, `placer` | ranks that come with something new compare it; state and batches are put onto the mesh |
| `tracing`, `matching`, `effects`, `modules` | the step as a jaxpr; what of its result is state; objects of nnx |
| `program_cache`, `program` | the programs of a step; one of them: place, bucket, lower |
| `stages`, `forecast` | `lower` and `trace`; the step on devices that are not here |
| `donation`, `finite`, `debugging` | memory that is used again; NaN by name; `jax.disable_jit` and the like |
"""
