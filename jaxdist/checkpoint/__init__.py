"""`save`, `restore` and `latest_step`: checkpoints that know nothing of ranks, ZeRO levels or communicators.

Orbax reads and writes the arrays, each process those of its own shards. Which files make up a checkpoint is agreed on
here, since orbax waits in a barrier for a process that has failed: a checkpoint is written into a directory with a
name that readers pass over, and gets its own when every rank has said that its part is on disk.

    path/12/default/…                    the checkpoint of step 12, in orbax's format
    path/15.orbax-checkpoint-tmp/…       one that is being written, or whose writers were killed
"""

from jaxdist.checkpoint.reading import latest_step, read_all, restore
from jaxdist.checkpoint.writing import Saving, save

__all__ = ["Saving", "latest_step", "read_all", "restore", "save"]
