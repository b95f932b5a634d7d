"""Turn a step into its program: trace it once per structure and types, place it on a mesh, emit and compile it.

In this order: `calling` and `signature` describe a call; `tracing`; `placed`; `program`. This folder does not take the
arrays of a call, only their types, and the layouts of arrays that are in shards.
"""
