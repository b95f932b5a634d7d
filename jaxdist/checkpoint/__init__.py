"""`save`, `restore`, `latest_step`, `export`: checkpoints for any number of ranks and ZeRO level.

Orbax writes the arrays: each process its own shards, into a directory that readers ignore. Once
every rank has reported that its part is on disk, the root adds a manifest and renames the
directory. (Orbax's own barriers would wait for a failed process.)

    path/12/default/…                    the arrays of step 12, in orbax's format
    path/12/manifest.json                each leaf's shape, dtype and digest, or its value
    path/15.….orbax-checkpoint-tmp/…     an unfinished checkpoint, or one whose writers were killed
    path/.jaxdist-lock                   the job that saves into the directory
"""

from jaxdist.checkpoint.checksum import digest
from jaxdist.checkpoint.formats import export, write
from jaxdist.checkpoint.reading import latest_step, read_all, restore
from jaxdist.checkpoint.writing import Saving, save

__all__ = ["Saving", "digest", "export", "latest_step", "read_all", "restore", "save", "write"]
