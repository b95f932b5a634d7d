"""A rank without JAX: `rank.py WHAT [WORD]...`; words are for whoever looks for the process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
rank = int(next(os.environ[name] for name in NAMES if name in os.environ))
what, words = sys.argv[1], sys.argv[2:]


def save(*_: object) -> None:
    time.sleep(4.0 * rank)  # longer than a job has that failed by itself
    Path(f"saved-{rank}").touch()
    print("saved", flush=True)
    sys.exit(3)


if what == "environment":
    Path(f"{rank}.json").write_text(json.dumps(dict(os.environ)))
elif what == "given":
    names = ("PJRT_NPROC", "OMP_NUM_THREADS", "JAXDIST_COMMUNICATOR")
    print(json.dumps([[os.environ[name] for name in names], [*{f"site {k}" for k in range(20)}], words]))
elif what == "words":
    print("out", rank, os.environ["PYTHONHASHSEED"])
    print("err", rank, file=sys.stderr)
elif what == "lines":
    for i in range(300):
        print("rank", rank, "of", 3, "line", i)
elif what == "long":
    print("x" * (3 << 20) + "\n" + "y\n" * 900, end="")
elif what == "bar":
    sys.stderr.write("\r10%\r20%")
    sys.stderr.flush()
    time.sleep(60)
elif what == "fails":
    if rank == 1:
        time.sleep(0.5)
        sys.exit(7)
    signal.signal(signal.SIGTERM, lambda *_: None)  # as if stuck in a collective
    time.sleep(60)
elif what == "is killed":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif what == "leaves one":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words])
elif what == "waits":
    print("ready", flush=True)
    time.sleep(60)
elif what == "ends":
    print("ready", flush=True)
    time.sleep(2)
elif what == "saves":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
    print("ready", flush=True)
    time.sleep(60)
elif what == "ignores":
    print([s.name for s in map(signal.Signals, (1, 2, 15)) if signal.getsignal(s) is signal.SIG_IGN], flush=True)
    time.sleep(60)
elif what == "floods":
    threading.Thread(target=lambda: (time.sleep(300), os._exit(0)), daemon=True).start()
    Path(f"{words[0]}-{rank}").write_text(str(os.getpid()))
    while rank == 0:
        print("progress " * 10, file=sys.stderr, flush=True)
    time.sleep(300)
elif what == "kills mpirun":
    folder = os.environ.get("PMIX_SERVER_TMPDIR")
    Path("seen.json").write_text(json.dumps([folder, folder and Path(folder).is_dir()]))
    above = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(above), signal.SIGKILL)  # which cannot clean up
    time.sleep(60)
elif what == "tries":
    print("TRY", os.environ["JAXDIST_RESTARTS"], flush=True)
    sys.exit(3)
else:
    raise ValueError(what)
