"""Hosts made of namespaces: each with its own name, network card, /dev/shm, process ids and sshd.

A host is a process tree: its first process (sshd) is process 1 of a pid namespace, and the kernel kills it when the
test's process dies. With it go all that ran there, and with the last process the card and the bridge. So nothing has
a name outside, nothing outlives the tests, and runs beside each other don't meet.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import jobs

_MEND = "apt-get install -y openssh-server iproute2, and root with CAP_SYS_ADMIN (docker run --privileged)"
_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# XLA_FLAGS, which the tests set and which must be the same on every rank, goes along.
# TMPDIR: two hosts must not share MPI's session folders either. /tmp itself stays: the scripts may lie there.
_SSHD_CONFIG = """
ListenAddress 0.0.0.0
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/user_key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
SetEnv TMPDIR=/run/tmp
AcceptEnv XLA_FLAGS
"""
_SSH_CONFIG = """
Host *
    IdentityFile /etc/ssh/user_key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    GlobalKnownHostsFile /dev/null
    LogLevel ERROR
    SendEnv XLA_FLAGS
"""
_BOOT = """
set -e
hostname {name}
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mkdir /run/sshd /run/tmp
mount --bind {etc}/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf
mount --bind {etc} /etc/ssh
ip link set lo up
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link add port type veth peer name container
ip link set port master docker0 up
ip link set container up
ip link set docker0 up
echo ready
exec {sshd} -D -e
"""


class Unavailable(Exception):
    """No hosts can be made here; says why, and the mend."""


class Hosts:
    """`count` hosts node1, node2, … at 10.77.0.1, 10.77.0.2, … on one bridge. Root's ssh from each to each works.

    Each also has the two usual traps: its own name in its /etc/hosts is 127.0.1.1, as Debian's installer writes it, and
    a bridge docker0 with the same address as everyone else's. Every host sees all of the disk, the folder for keys and
    configuration too.
    """

    def __init__(self, count: int, folder: Path):
        if os.geteuid() != 0:
            raise Unavailable(f"not root; needed: {_MEND}")
        tools = ["ip", "tc", "unshare", "nsenter", "mount", "hostname", "ssh", "ssh-keygen", "sshd"]
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        lacking = [tool for tool in tools if shutil.which(tool, path=path) is None]
        if lacking:
            raise Unavailable(f"no {', '.join(lacking)}; needed: {_MEND}")
        self.names = [f"node{i + 1}" for i in range(count)]
        self._folder = folder
        self._env = {**os.environ, "PATH": path}
        self._roots: dict[str, subprocess.Popen[str]] = {}
        self._configure(str(shutil.which("sshd", path=path)))
        try:
            self._boot("bridge", "set -e; ip link add br0 type bridge; ip link set br0 up; echo ready; exec sleep inf")
            for i, name in enumerate(self.names):
                self._boot(name, (folder / f"{name}.boot").read_text())
                pid = self._roots[name].pid
                self._ip("bridge", f"link add port{i} type veth peer name eth0 netns {pid}")
                self._ip("bridge", f"link set port{i} master br0 up")
                self._ip(name, f"addr add 10.77.0.{i + 1}/24 dev eth0")
                self._ip(name, "link set eth0 up")
            for name in self.names:
                self._wait_for_sshd(name)
        except BaseException:
            self.close()
            raise

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that, run here, runs `command` on the host; environment and folder stay."""
        pid = self._roots[host].pid
        there = ["env", f"--chdir={Path.cwd()}"]  # entering another mount namespace leads to /
        own = f"--pid=/proc/{pid}/ns/pid_for_children"
        return ["nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", own, "--", *there, *command]

    def start(
        self, job: jobs.Job, host: str, command: Sequence[str], env: Mapping[str, str | None] | None = None
    ) -> None:
        """Start one process of the job on the host, as if typed there."""
        job.start(self.command(host, command), {"TMPDIR": "/run/tmp", **(env or {})})

    def run(
        self, host: str, command: Sequence[str], env: Mapping[str, str | None] | None = None, timeout: float = 120.0
    ) -> jobs.Result:
        """Run a command on the host to its end; afterwards nothing may run on any host."""
        job = jobs.Job()
        self.start(job, host, command, env)
        result = job.finish(timeout)[0]
        self.check_idle()
        return result

    def link(self, host: str, state: str) -> None:
        """Take the host's network card `down`, or `up` again."""
        self._ip(host, f"link set eth0 {state}")

    def processes(self, host: str) -> list[str]:
        """pid (as seen here) and command line of what runs on the host, its sshd left out."""
        space = Path(f"/proc/{self._roots[host].pid}/ns/pid_for_children").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or (entry / "ns" / "pid").readlink() != space:
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                inner = re.search(r"^NSpid:.*\s(\d+)$", (entry / "status").read_text(), re.MULTILINE)
            except OSError:  # it ended meanwhile
                continue
            if command and inner and inner[1] != "1":  # empty: a zombie
                found.append(f"{entry.name} {command}")
        return found

    def check_idle(self, patience: float = 10.0) -> None:
        """Fail if a process is left on some host `patience` seconds later; it is killed."""
        end = time.monotonic() + patience
        while left := {host: found for host in self.names if (found := self.processes(host))}:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            self.kill()
            raise AssertionError(f"processes outlived their job: {left}")

    def kill(self) -> None:
        """End all that runs on the hosts, and mend the cards."""
        for host in self.names:
            for process in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.split()[0]), signal.SIGKILL)
            self.link(host, "up")

    def close(self) -> None:
        """End the hosts."""
        for process in self._roots.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _configure(self, sshd: str) -> None:
        key = self._folder / "user_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        for name in self.names:
            etc = self._folder / name
            etc.mkdir()
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(etc / "host_key")], check=True)
            for file in (key, key.with_suffix(".pub")):
                shutil.copy(file, etc)
            (etc / "sshd_config").write_text(_SSHD_CONFIG)
            (etc / "ssh_config").write_text(_SSH_CONFIG)
            table = ["127.0.0.1 localhost", f"127.0.1.1 {name}"]
            table += [f"10.77.0.{i + 1} {other}" for i, other in enumerate(self.names) if other != name]
            (etc / "hosts").write_text("\n".join(table) + "\n")
            boot = _BOOT.format(name=name, etc=shlex.quote(str(etc)), sshd=sshd)
            (self._folder / f"{name}.boot").write_text(boot)

    def _boot(self, name: str, script: str) -> None:
        log = self._folder / f"{name}.log"
        unshare = "unshare --mount --uts --ipc --net --pid --mount-proc --kill-child sh -c"
        with log.open("wb") as err:
            process = subprocess.Popen(
                [*unshare.split(), script],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True, env=self._env,
                start_new_session=True, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)),
            )  # fmt: skip
        self._roots[name] = process
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise Unavailable(f"namespaces can't be made here ({log.read_text().strip()}); needed: {_MEND}")

    def _wait_for_sshd(self, host: str, patience: float = 10.0) -> None:
        end = time.monotonic() + patience
        while True:
            command = self.command(self.names[0], ["ssh", host, "true"])
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=self._env, check=False)
            if done.returncode == 0:
                return
            if time.monotonic() > end:
                log = (self._folder / f"{host}.log").read_text()
                raise Unavailable(f"ssh {host}: {done.stderr.strip()}; its sshd says: {log.strip()}; needed: {_MEND}")
            time.sleep(0.05)

    def _ip(self, host: str, arguments: str) -> None:
        # In the network of the host, but with the process ids of here: `netns PID` means those.
        entered = ["nsenter", f"--target={self._roots[host].pid}", "--net", "ip", *arguments.split()]
        done = subprocess.run(entered, capture_output=True, text=True, timeout=30, env=self._env, check=False)
        if done.returncode != 0:
            raise Unavailable(f"{host}: ip {arguments}: {done.stderr.strip()}; needed: {_MEND}")
