"""From a step to its program: traced once per structure and types, placed on a mesh, emitted, and compiled.

In this order: `calling` and `signature` say what a call is; `tracing`; `placed`; `program`. The arrays of a call are
no business of this folder: it takes their types, and the layouts of those that are in shards.
"""
