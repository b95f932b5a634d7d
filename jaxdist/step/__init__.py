"""The decorated step: arguments are sorted into state and batch; it is traced once, placed, lowered, and called.

| where | what |
|---|---|
| `data_parallel`, `calling` | the decorator, its settings, and the arguments in order |
| `decorated` | the decorated step |
| `calls`, `known` | a call of it: new, which ranks compare, or known; memory that is gone |
| `signature`, `reading`, `batch` | the arguments by structure: constants, state, the batch; results like them |
| `placer` | state and batches are put onto the mesh |
| `tracing`, `modules` | the step as a jaxpr; objects of nnx |
| `program`, `placed` | the programs of a step; one of them: place, bucket, lower |
| `forecast` | the step on devices that are not here; which mesh is the fastest |
| `finite` | NaN by name |
"""
