"""`save`, `restore`, `latest_step` and `export`: checkpoints that know nothing of ranks, ZeRO levels or communicators.

Orbax writes the arrays, each process those of its own shards. Which files make up a checkpoint is agreed on here, since
orbax waits in a barrier for a process that has failed: a checkpoint is written into a directory with a name that
readers pass over, and gets its own when every rank has said that its part is on disk.

    path/12/default/…                    the checkpoint of step 12, in orbax's format
    path/12/saved-3-after-2.json         its record: checksums, files, and its place in the order of saving
    path/15.….orbax-checkpoint-tmp/…     one that is being written, or whose writers were killed
    path/9.damaged/…                     one that a restore found damaged and passed over
    path/.jaxdist-lock                   which job saves into the directory
"""

from jaxdist.checkpoint.background import Saving
from jaxdist.checkpoint.export import export, write
from jaxdist.checkpoint.reading import latest_step, read_all, restore
from jaxdist.checkpoint.writing import save

__all__ = ["Saving", "export", "latest_step", "read_all", "restore", "save", "write"]
