"""Let one rank of a job fail, and see how the job ends: every fault, launcher and wire.

    python benchmarks/faults.py --json faults.json --markdown faults.md
    python benchmarks/faults.py --faults sigkill,order_of_twins --launchers run

    python benchmarks/faults.py --kills 200 --seed 1

A fault (`known_faults.py`) declares the expected outcome: the job fails and names the rank, with that rank's exit
code if it chose one, or the job continues. Seconds run from the fault to the end of the last process. **hung**
jobs were killed after `--limit` seconds. **silent** ones should have failed, but every rank exited with 0, or no
line named the culprit. In **crash** ones, native code (gloo, MPI, JAX's coordinator) ended a process before it
could report the error. The exit code is 1 if anything is wrong. A full run takes about an hour on two cores.

With --kills, this many jobs with data workers get one SIGKILL each: for a rank, a worker, the
launcher, or the mpirun of `jaxdist run`, at a random moment. Everything must be gone within 10
seconds; under `jaxdist run`, if it survives, a second start must train again.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import report
from known_faults import BOOM, FAULTS, UNDISTURBED, Fault

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness import jobs  # shared with the tests: start jobs, and find leftover processes

HERE = Path(__file__).resolve().parent
JAXDIST_RUN = [sys.executable, "-m", "jaxdist", "run"]
WIRES = {"mpirun": ("xla", "mpi"), "run": ("xla", "mpi"), "run-env": ("xla",), "env": ("xla",)}
"""Communicators available to each launcher: MPI needs an MPI launcher."""


class Setting(NamedTuple):
    """The settings of a job with a fault.

    Attributes:
      launcher: "mpirun", "run" (`jaxdist run`), "run-env" (with ``--launcher env``) or "env" (by hand).
      communicator: "xla" or "mpi".
      size: the number of ranks.
      culprit: the rank, unless the fault fixes it.
      timeout: JAXDIST_TIMEOUT.
      limit: seconds after which a job counts as hung.
      late: delay in seconds of ranks that may be late.
      level: the ZeRO level.
      gone: seconds within which everything must be gone after the job has ended. Processes left by
      a rank have up to 2 s (`jaxdist.launch.command`).
      turns: the number of loop turns, or None for enough that ranks left alone notice.
    """

    launcher: str
    communicator: str
    size: int = 3
    culprit: int = 1
    timeout: float = 10.0
    limit: float = 75.0
    late: float = 25.0
    level: int = 0
    gone: float = 10.0
    turns: int | None = None


class Outcome(NamedTuple):
    """The outcome of a job.

    Attributes:
      fault: its name.
      launcher: see `Setting`.
      communicator: see `Setting`.
      seconds: from the fault to the end of the last process; None if one stays, or without a fault.
      codes: exit code of the launcher, or of each rank if started by hand; None if it did not end.
      named: the first line that names the culprit, or "".
      orphans: processes that outlived the job.
      problems: any of "hung", "silent", "unnamed", "failed", "code", "crash", "orphans", and
      "missed" (the fault did not occur, because a different one came first); empty if all is well.
    """

    fault: str
    launcher: str
    communicator: str
    seconds: float | None
    codes: list[int | None]
    named: str
    orphans: list[str]
    problems: list[str]


def run(name: str, setting: Setting) -> tuple[Outcome, str]:
    """Run a job with one fault.

    Args:
      name: a key of `FAULTS`.
      setting: the settings of the job.

    Returns:
      The outcome of the job, and all of its output.
    """
    fault = FAULTS[name]
    culprit = setting.culprit if fault.culprit is None else fault.culprit
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as scratch:
        job = _start(name, culprit, setting, scratch)
        try:
            by_hand = setting.launcher == "env"
            waited_for = [i for i in range(len(job.processes)) if not (by_hand and fault.stays and i == culprit)]
            ended, outside = _watch(job, waited_for, fault, setting.limit)
            codes = [p.poll() for p in job.processes]
            left = {str(p.pid) for i, p in enumerate(job.processes) if i not in waited_for}
            hung = len(ended) < len(waited_for)
            alive = [] if hung else job.alive(patience=setting.gone)
            orphans = [process for process in alive if process.split()[0] not in left]
        finally:
            job.kill()
        text = "".join(job.text(i, stream) for i in range(len(codes)) for stream in ("out", "err"))
        job.clean()
    marks = [outside] * bool(outside) if fault.outside else [float(t) for t in re.findall(r"FAULT (\d+\.\d+)", text)]
    seconds = round(max(ended.values()) - max(marks), 2) if marks and not hung else None
    named = naming(text, culprit)
    complete = text.count("END ") == setting.size
    problems = judge(fault, codes, culprit, complete, named, orphans, hung, bool(_CRASH.search(text)))
    if not marks and name != "none":
        problems.insert(0, "missed")
    return Outcome(name, setting.launcher, setting.communicator, seconds, codes, named, orphans, problems), text


def _start(name: str, culprit: int, setting: Setting, scratch: str, options: Sequence[str] = ()) -> jobs.Job:
    program = [str(HERE / "faulty.py"), name, "--culprit", str(culprit), "--level", str(setting.level)]
    program += ["--late", str(setting.late), "--scratch", scratch]
    program += ["--turns", str(setting.turns)] if setting.turns else []
    env = {"JAXDIST_TIMEOUT": f"{setting.timeout:g}", "JAXDIST_COMMUNICATOR": setting.communicator}
    if setting.launcher == "mpirun":
        return jobs.start_mpirun(setting.size, program, env)
    if setting.launcher == "env":
        return jobs.start_env(setting.size, program, env)
    how = ["--launcher", "env"] if setting.launcher == "run-env" else []
    job = jobs.Job()
    job.start([*JAXDIST_RUN, "-n", str(setting.size), *how, *options, *program], env)
    return job


def _watch(job: jobs.Job, waited_for: Sequence[int], fault: Fault, limit: float) -> tuple[dict[int, float], float]:
    """Return when each process ended, and when the launcher got its signal, or 0."""
    ended: dict[int, float] = {}
    sent = 0.0
    end = time.monotonic() + limit
    while len(ended) < len(waited_for) and time.monotonic() < end:
        for i in waited_for:
            if i not in ended and job.processes[i].poll() is not None:
                ended[i] = time.time()
        if fault.outside is not None and not sent and "READY" in job.text():
            sent = time.time()
            job.processes[0].send_signal(fault.outside)
        time.sleep(0.02)
    return ended, sent


# Output of native code when it ends a process that should have reported an error.
_CRASH = re.compile(
    r"terminate called|Check failure stack trace|Fatal Python error|MPI_ERRORS_ARE_FATAL|MPI_\w+ returned error code"
)


def judge(
    fault: Fault,
    codes: Sequence[int | None],
    culprit: int,
    complete: bool,
    named: str,
    orphans: Iterable[str],
    hung: bool,
    crashed: bool,
) -> list[str]:
    """Return deviations from the fault's declaration.

    Args:
      fault: the declaration.
      codes: the launcher's exit code, or each rank's if started by hand.
      culprit: the rank.
      complete: whether every rank came to the end of its script.
      named: the line that names the culprit, or "".
      orphans: processes that outlived the job.
      hung: whether it had to be killed.
      crashed: whether native code ended one of its processes.

    Returns:
      The same as `Outcome.problems`.
    """
    found = ["orphans"] * bool(list(orphans)) + ["crash"] * crashed
    if fault.expects == "named":  # waiting for a rank that is busy at its end is fine
        return found if named else [*found, "hung" if hung else "silent"]
    if hung:
        return [*found, "hung"]
    if fault.expects == "goes on":
        return found if complete and not any(codes) else [*found, "failed"]
    by_hand = len(codes) > 1
    if not any(codes):
        return [*found, "silent"]
    others = [code for rank, code in enumerate(codes) if not (by_hand and rank == culprit)]
    own = codes[culprit] if by_hand else codes[0]
    if fault.code:
        right = all(others) and own == fault.code
    else:  # skip a culprit that exits with 0, or that must be killed by hand
        right = all(others) and (bool(own) or (by_hand and (fault.code == 0 or fault.stays)))
    if not right:
        found.append("code")
    return found if named or fault.outside else [*found, "unnamed"]


# The speaker is not necessarily to blame.
_SPEAKER = re.compile(
    r"^\[jaxdist rank \d+\] |(?<!on )rank \d+( has waited|: )|timed out on rank \d+|MPI_ABORT.*"
    r"|process rank \d+ .* calling$"
)


class Kill(NamedTuple):
    """A SIGKILL for one process of a job with workers.

    Attributes:
      launcher: "mpirun", "run" or "run-env", as in `Setting`.
      communicator: see `Setting`.
      victim: "rank", "worker", "launcher", or "mpirun" (started by "run").
      which: an index among several, modulo their number.
      after: seconds after such a process exists.
      again: whether the job is started again (``--max-restarts 1``).
      size: the number of ranks.
    """

    launcher: str
    communicator: str
    victim: str
    which: int = 0
    after: float = 0.0
    again: bool = False
    size: int = 2


VICTIMS = {
    "mpirun": ("rank", "worker", "launcher"),
    "run": ("rank", "worker", "launcher", "mpirun"),
    "run-env": ("rank", "worker", "launcher"),
}
_VICTIM = {
    "rank": re.compile(r"\d+ \S*python\S* \S*faulty\.py "),
    "worker": re.compile(r"\d+ .*--multiprocessing-fork"),
    "mpirun": re.compile(r"\d+ \S*/(prterun|mpirun|mpiexec\S*) "),
}


class Killed(NamedTuple):
    """The outcome of a kill.

    Attributes:
      kill: the kill.
      seconds: time until everything was gone; None if it was not in time.
      code: exit code of the launcher; None if it survived and a second start trained.
      problems: any of "missed" (no such process existed), "orphans", "hung", "silent", "not started
      again"; empty if all is well.
    """

    kill: Kill
    seconds: float | None
    code: int | None
    problems: list[str]


def kill(plan: Kill, limit: float = 120.0, gone_seconds: float = 10.0) -> tuple[Killed, str]:
    """Start a job, kill one of its processes, and watch it end.

    Args:
      plan: the kill.
      limit: seconds within which such a process must exist, and a second start must train.
      gone_seconds: seconds within which everything must be gone.

    Returns:
      The outcome of the job, and all of its output.
    """
    setting = Setting(plan.launcher, plan.communicator, plan.size)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as scratch:
        job = _start(UNDISTURBED, 0, setting, scratch, ["--max-restarts", "1"] if plan.again else [])
        launcher = job.processes[0]
        try:
            found = _victims(job, plan.victim, limit)
            time.sleep(plan.after)
            found = _victims(job, plan.victim, 0.0) if found else []
            if not found:
                return Killed(plan, None, launcher.poll(), ["missed"]), job.everything()
            had = {int(entry.split()[0]) for entry in job.alive()}
            starts = job.text().count("READY")
            begin = time.monotonic()
            os.kill(found[plan.which % len(found)], signal.SIGKILL)
            goes_on = plan.again and plan.victim != "launcher"
            left = had
            while time.monotonic() < begin + gone_seconds and left:
                time.sleep(0.02)
                alive = {int(entry.split()[0]) for entry in job.alive()}
                left = alive & had | {launcher.pid} if launcher.poll() is None else alive & had
                left -= {launcher.pid} if goes_on else set()
            problems = ["orphans"] if left - {launcher.pid} else ["hung"] if left else []
            seconds = None if left else round(time.monotonic() - begin, 2)
            end = time.monotonic() + limit
            while goes_on and launcher.poll() is None and time.monotonic() < end:
                if job.text().count("READY") > starts and "restart 1 of 1" in job.text(0, "err"):
                    launcher.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.1)
            else:
                if goes_on and launcher.poll() != 0:  # 0: it had finished before
                    problems.append("not started again")
                return Killed(plan, seconds, launcher.poll(), _silent(plan, job, problems)), job.everything()
            if job.alive(patience=gone_seconds):
                problems.append("orphans")
            return Killed(plan, seconds, None, problems), job.everything()
        finally:
            job.kill()
            job.clean()


def _silent(plan: Kill, job: jobs.Job, problems: list[str]) -> list[str]:
    whole = job.text().count("END ") == plan.size
    return [*problems, "silent"] if job.processes[0].poll() == 0 and not whole else problems


def _victims(job: jobs.Job, kind: str, patience: float) -> list[int]:
    if kind == "launcher":
        return [job.processes[0].pid] if job.processes[0].poll() is None else []
    end = time.monotonic() + patience
    while True:
        pids = [int(entry.split()[0]) for entry in job.alive() if _VICTIM[kind].match(entry)]
        pids = [pid for pid in pids if pid != job.processes[0].pid]
        if pids or time.monotonic() > end or job.processes[0].poll() is not None:
            return sorted(pids)
        time.sleep(0.02)


def random_kill(random: Random, launchers: Sequence[str], communicators: Sequence[str], size: int) -> Kill:
    """Return a random kill: any process at any moment."""
    launcher = random.choice([name for name in launchers if name in VICTIMS])
    wire = random.choice([name for name in communicators if name in WIRES[launcher]])
    victim = random.choice(VICTIMS[launcher])
    after = random.uniform(0.0, 2.0 if victim == "worker" else 8.0)
    return Kill(
        launcher, wire, victim, random.randrange(100), after, launcher != "mpirun" and random.random() < 0.5, size
    )


def markdown_of_kills(results: dict[str, Any]) -> str:
    """Return a table with one row per kind of process, and the number of failures."""
    found = [Killed(Kill(*row["kill"]), *[row[key] for key in Killed._fields[1:]]) for row in results["kills"]]
    rows = []
    for launcher, victims in VICTIMS.items():
        for victim in victims:
            these = [k for k in found if (k.kill.launcher, k.kill.victim) == (launcher, victim)]
            times = [k.seconds for k in these if k.seconds is not None]
            again = sum(k.code is None for k in these)
            wrong = sum(bool(k.problems) for k in these)
            rows.append([launcher, victim, len(these), again, max(times, default=None), wrong])
    head = ["launcher", "killed", "jobs", "started again", "seconds, at most", "wrong"]
    bad = [f"{', '.join(k.problems)}: {k.kill}" for k in found if k.problems]
    return "\n\n".join(
        [report.table(head, rows), f"{len(found)} jobs of {results['size']} ranks with two workers each.", *bad]
    )


def naming(text: str, culprit: int) -> str:
    """Return the first line of a job's output that blames this rank, or "".

    The line is about the rank, or it is the rank's own traceback, marked as such. Output or an
    error from a rank is not enough, since ranks left alone produce those, too.
    """
    own = re.compile(rf"\[jaxdist rank {culprit}\] .*({BOOM}|uncaught|interrupted|KeyboardInterrupt|MemoryError)")
    # The last two are from mpirun and jaxdist run; a process's number follows its job's.
    about = re.compile(rf"\brank {culprit}\b|Process name: \[[^\]]*,{culprit}\]")
    for line in text.splitlines():
        if own.search(line) or about.search(_SPEAKER.sub("", line)):
            return line
    return ""


def markdown(results: dict[str, Any]) -> str:
    """Return a table with one row per job, and the number of failures."""
    outcomes = [Outcome(**row) for row in results["outcomes"]]
    rows = [
        [
            o.fault, o.launcher, o.communicator, None if o.seconds is None else f"{o.seconds:.1f}",
            " ".join("–" if code is None else str(code) for code in o.codes),
            "yes" if o.named else "no", len(o.orphans), ", ".join(o.problems) or "ok",
        ]
        for o in outcomes
    ]  # fmt: skip
    head = ["fault", "launcher", "wire", "seconds", "exit codes", "names the rank", "orphans", ""]
    count = lambda *words: sum(any(word in o.problems for word in words) for o in outcomes)
    summary = (
        f"{len(outcomes)} jobs of {results['size']} ranks: {count('hung')} hung, {count('silent', 'unnamed')} silent "
        f"(of these {count('unnamed')} failed without naming the rank), {count('code')} with another exit code than "
        f"they should, {count('crash')} ended by native code, {count('failed')} failed and should go on, "
        f"{count('orphans')} with orphans, {count('missed')} in which the fault did not come to be."
    )
    return f"{report.table(head, rows)}\n\n{summary}"


def rows(faults: Sequence[str], launchers: Sequence[str], communicators: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the valid combinations."""
    return [
        (name, launcher, communicator)
        for name in faults
        for launcher in launchers
        for communicator in communicators
        if communicator in WIRES[launcher] and not (FAULTS[name].outside and launcher == "env")
    ]


def _listed(known: Iterable[str]) -> Any:
    def words(text: str) -> list[str]:
        found = text.split(",")
        for word in found:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of: {', '.join(known)}")
        return found

    return words


def main() -> None:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in FAULTS if name != UNDISTURBED]
    parser.add_argument("--faults", type=_listed(names), default=names, help=f"some of {','.join(names)}")
    parser.add_argument("--launchers", type=_listed(WIRES), default=list(WIRES), help=f"some of {','.join(WIRES)}")
    parser.add_argument(
        "--communicator", dest="communicators", type=_listed(("xla", "mpi")), default=["xla", "mpi"], help="xla,mpi"
    )
    parser.add_argument("-n", type=int, default=3, help="ranks; default: 3")
    parser.add_argument("--culprit", type=int, default=1, help="the rank that fails; default: 1")
    parser.add_argument("--timeout", type=float, default=10.0, help="the jobs' JAXDIST_TIMEOUT; default: 10")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds after which a job hangs; default: 75")
    parser.add_argument("--late", type=float, help="seconds that late ranks are late; default: 2.5 timeouts")
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of jaxdist.zero; default: 0")
    parser.add_argument("--kills", type=int, default=0, help="so many random kills, in place of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the kills; default: 0")
    parser.add_argument("--logs", type=Path, help="folder for what the jobs write")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what jobs that are wrong have written")
    report.add_arguments(parser, pictures=False)
    args = parser.parse_args()
    if not 0 <= args.culprit < args.n or args.n < 2:
        parser.error(f"--culprit {args.culprit} is not one of -n {args.n} ranks, or there is no other")
    late = 2.5 * args.timeout if args.late is None else args.late
    limit = max(args.limit, late + 45.0)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    kills: list[Killed] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no job behind
    try:
        if args.kills:
            _kill_all(args, kills)
        else:
            _have_all(args, limit, late, outcomes)
    except KeyboardInterrupt:
        print("interrupted: the rest was not run", file=sys.stderr)
    found = {"command": report.command(), "machine": report.machine(), "size": args.n}
    if args.kills:
        report.write(args, {**found, "kills": [k._asdict() for k in kills]}, markdown_of_kills)
        sys.exit(any(k.problems for k in kills))
    report.write(args, {**found, "outcomes": [o._asdict() for o in outcomes]}, markdown)
    sys.exit(any(o.problems for o in outcomes))


def _kill_all(args: argparse.Namespace, kills: list[Killed]) -> None:
    random = Random(args.seed)
    while len(kills) < args.kills:
        killed, text = kill(random_kill(random, args.launchers, args.communicators, args.n))
        print(f"{len(kills)}: {killed}", file=sys.stderr, flush=True)
        if "missed" in killed.problems:
            continue
        if args.logs:
            (args.logs / f"kill.{args.seed}.{len(kills)}").write_text(f"{killed}\n{text}")
        if args.verbose and killed.problems:
            print(text, file=sys.stderr, flush=True)
        kills.append(killed)


def _have_all(args: argparse.Namespace, limit: float, late: float, outcomes: list[Outcome]) -> None:
    for name, launcher, communicator in rows(args.faults, args.launchers, args.communicators):
        setting = Setting(launcher, communicator, args.n, args.culprit, args.timeout, limit, late, args.level)
        outcome, text = run(name, setting)
        outcomes.append(outcome)
        said = ", ".join(outcome.problems) or "ok"
        print(
            f"{name} {launcher} {communicator}: {said} {outcome.seconds} {outcome.codes}", file=sys.stderr, flush=True
        )
        if args.logs:
            (args.logs / f"{name}.{launcher}.{communicator}").write_text(text)
        if args.verbose and outcome.problems:
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
