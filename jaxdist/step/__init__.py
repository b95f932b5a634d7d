"""The calls of a decorated step: its arguments are read, compared between ranks, and brought to its program's mesh.

In this order: `decorated`; `calls`, which knows earlier calls by `cached_call`; `reading` and `batch`, which tell the
batch from the state; `placer`. The programs are of `jaxdist.compilation`.
"""
