"""The decorated step: its arguments are told apart, it is traced once, placed, lowered, and called.

| where | what |
|---|---|
| `data_parallel`, `settings` | the decorator, and what it was given |
| `decorated` | the decorated step, and a call of it |
| `calls`, `known` | the calls of a step: one that is new, which ranks compare; one that is known |
| `calling`, `signature`, `reading`, `batch` | the arguments in order, by structure: constants, state, the batch |
| `placer` | state and batches are put onto the mesh |
| `tracing`, `matching`, `effects`, `modules` | the step as a jaxpr; what is kept like which argument; objects of nnx |
| `program_cache`, `program` | the programs of a step; one of them: place, bucket, lower |
| `forecast`, `choice` | the step on devices that are not here; which mesh is the fastest |
| `donation`, `finite` | memory that is used again; NaN by name |
"""
