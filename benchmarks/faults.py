"""What becomes of a job when one rank fails: every fault under every launcher, over both wires.

    python benchmarks/faults.py --json faults.json --markdown faults.md
    python benchmarks/faults.py --faults sigkill,order_of_twins --launchers run

    python benchmarks/faults.py --kills 200 --seed 1

A fault (`known_faults.py`) says what it should lead to: the job fails and names the rank, with that rank's exit code
where it chose one, or it goes on. Seconds are those from the fault to the end of the last process. **hung** jobs were
killed after `--limit` seconds; **silent** ones should have failed, and every rank ended with 0 or no line named the
culprit; in **crash** ones native code (gloo, MPI, JAX's coordinator) ended a process before an error could say what was
wrong. The exit code is 1 if anything is wrong. In full it takes about an hour on two cores.

With --kills, so many jobs with workers of a data set get a SIGKILL each: one of their processes (a rank, a worker, the
launcher, the mpirun of `jaxdist run`), at a random moment. Within 10 seconds all that ran then has to be gone; under
`jaxdist run`, if it lives, a second start has to come to training.
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
from harness import jobs  # how the tests start them, and find what they leave behind

HERE = Path(__file__).resolve().parent
JAXDIST_RUN = [sys.executable, "-m", "jaxdist", "run"]
WIRES = {"mpirun": ("xla", "mpi"), "run": ("xla", "mpi"), "run-env": ("xla",), "env": ("xla",)}
"""Launcher -> communicators that it can have: only under MPI is there MPI."""


class Setting(NamedTuple):
    """How a job with a fault is started.

    Attributes:
      launcher: "mpirun", "run" (`jaxdist run`), "run-env" (with ``--launcher env``) or "env" (by hand).
      communicator: "xla" or "mpi".
      size: of the job.
      culprit: the rank, where the fault leaves that free.
      timeout: JAXDIST_TIMEOUT.
      limit: seconds after which a job hangs.
      late: seconds that ranks are late which may be.
      level: of `jaxdist.zero`.
      gone: seconds within which all that ran has to be gone once the job has ended. What a rank has left
        behind has up to 2 (`jaxdist.launch.command`).
      turns: of the loop; None: so many that ranks which are left alone can notice.
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
    """What became of a job.

    Attributes:
      fault: its name.
      launcher: as in `Setting`.
      communicator: as in `Setting`.
      seconds: from the fault to the end of the last process; None if one did not end, or there was no fault.
      codes: exit code of the launcher, or by hand of each rank; None: it did not end.
      named: the first line that names the culprit, "" if there is none.
      orphans: processes that outlived the job.
      problems: of "hung", "silent", "unnamed", "failed", "code", "crash", "orphans", and "missed" (the fault did not
        come to be: another one was faster); nothing if all is as it should be.
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
    """Have one fault.

    Args:
      name: of `FAULTS`.
      setting: of the job.

    Returns:
      What became of the job, and all that it wrote.
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
    """When processes ended; and when the launcher got its signal, or 0."""
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


# What native code says when it ends a process that should have ended with an error.
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
    """What is not as the fault declares it.

    Args:
      fault: what it declares.
      codes: of the launcher alone, or by hand of each rank.
      culprit: the rank.
      complete: whether every rank came to the end of its script.
      named: the line that names the culprit, or "".
      orphans: what outlived the job.
      hung: whether it had to be killed.
      crashed: whether native code ended a process of it.

    Returns:
      As `Outcome.problems`.
    """
    found = ["orphans"] * bool(list(orphans)) + ["crash"] * crashed
    if fault.expects == "named":  # a rank that is busy at its end may be waited for
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
    else:  # a culprit that ends with 0 by itself, or that has to be killed by hand, is left out
        right = all(others) and (bool(own) or (by_hand and (fault.code == 0 or fault.stays)))
    if not right:
        found.append("code")
    return found if named or fault.outside else [*found, "unnamed"]


# Who speaks is not who is to blame.
_SPEAKER = re.compile(
    r"^\[jaxdist rank \d+\] |(?<!on )rank \d+( has waited|: )|timed out on rank \d+|MPI_ABORT.*"
    r"|process rank \d+ .* calling$"
)


class Kill(NamedTuple):
    """A SIGKILL for one process of a job with workers.

    Attributes:
      launcher: "mpirun", "run" or "run-env", as in `Setting`.
      communicator: likewise.
      victim: "rank", "worker", "launcher", or "mpirun" (that of "run").
      which: of several; the rest of a division counts.
      after: seconds from when there is such a process.
      again: whether the job is started again (``--max-restarts 1``).
      size: of the job.
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
    """What became of it.

    Attributes:
      kill: what was done.
      seconds: until everything that ran was gone; None if it was not in time.
      code: exit code of the launcher; None if it lives on with a second start, which came to training.
      problems: of "missed" (there was no such process), "orphans", "hung", "silent", "not started again"; nothing if
        all is as it should be.
    """

    kill: Kill
    seconds: float | None
    code: int | None
    problems: list[str]


def kill(plan: Kill, limit: float = 120.0, gone_seconds: float = 10.0) -> tuple[Killed, str]:
    """Start a job, kill one of its processes, and see it end.

    Args:
      plan: which.
      limit: seconds until there has to be such a process, and until a second start has to come to training.
      gone_seconds: within which all that ran has to be gone.

    Returns:
      What became of the job, and all that it wrote.
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
                if goes_on and launcher.poll() != 0:  # 0: it had come to its end before
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
    """Any process at any moment."""
    launcher = random.choice([name for name in launchers if name in VICTIMS])
    wire = random.choice([name for name in communicators if name in WIRES[launcher]])
    victim = random.choice(VICTIMS[launcher])
    after = random.uniform(0.0, 2.0 if victim == "worker" else 8.0)
    return Kill(
        launcher, wire, victim, random.randrange(100), after, launcher != "mpirun" and random.random() < 0.5, size
    )


def markdown_of_kills(results: dict[str, Any]) -> str:
    """A row for each kind of process, then how many were wrong."""
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
    """The first line of a job's output that says that this rank is to blame; "" if there is none.

    It is about the rank, or it is the rank's own traceback, marked as such. That a rank speaks, or ends with an error,
    is not enough: so do those that were left alone.
    """
    own = re.compile(rf"\[jaxdist rank {culprit}\] .*({BOOM}|uncaught|interrupted|KeyboardInterrupt|MemoryError)")
    # The last two are mpirun's and jaxdist run's; the number of a process stands after its job's.
    about = re.compile(rf"\brank {culprit}\b|Process name: \[[^\]]*,{culprit}\]")
    for line in text.splitlines():
        if own.search(line) or about.search(_SPEAKER.sub("", line)):
            return line
    return ""


def markdown(results: dict[str, Any]) -> str:
    """A row for each job, then how many were wrong."""
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
    """Those that there can be."""
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
    """The matrix."""
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no job is left behind
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
