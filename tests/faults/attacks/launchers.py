"""A scheduler: SLURM on one node, started here with a separate configuration.

On Debian: `apt-get install slurmctld slurmd slurm-client munge`. Its daemons run as root.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from tests.faults.attacks import ENDLESS, Absent, attack, durable, expect, last_logged_step
from tests.faults.attacks.several import TOGETHER
from tests.faults.processes import ROOT

CONFIGURATION = """\
ClusterName=faults
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# As in docs/many_devices.md, with two tasks on this node.
JOB = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --time=2
#SBATCH --signal=TERM@60 --requeue --open-mode=append
cd {root}
srun --kill-on-bad-exit=1 {command}
echo "srun ended with $?"
test -f {workdir}/results.json || scontrol requeue $SLURM_JOB_ID
"""


def command(workdir: pathlib.Path) -> str:
    """The command of a run of hours, without checkpoints before a signal."""
    words = [*TOGETHER, ENDLESS, "--config.checkpoint_every=100000", f"--workdir={workdir}"]
    return " ".join(f"'{word}'" for word in (sys.executable, "-m", "rope_jax.main", *words))


def wait_until(condition, event: str, seconds: float = 300) -> None:
    """Waits for a condition, which is checked twice a second."""
    deadline = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < deadline, f"{event}: not within {seconds} s")
        time.sleep(0.5)


@contextlib.contextmanager
def slurm(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Starts SLURM with all its files in a folder; yields the environment of its commands."""
    host, ports = socket.gethostname().partition(".")[0], []
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.socket() as first, socket.socket() as second:
        for free_socket in (first, second):
            free_socket.bind(("127.0.0.1", 0))
            ports.append(free_socket.getsockname()[1])
    configuration, key = folder / "slurm.conf", folder / "key"
    configuration.write_text(
        CONFIGURATION.format(host=host, folder=folder, ports=ports, cores=os.cpu_count())
    )
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "seed"}
    munge = ["munged", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    paths = {
        "PATH": os.pathsep.join((os.environ["PATH"], "/usr/sbin")),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
    }
    variables = os.environ | paths | {"JAX_PLATFORMS": "cpu", "SLURM_CONF": str(configuration)}
    try:
        for daemon in (munge, ["slurmctld", "-c"], ["slurmd", "-c", "-N", host]):
            subprocess.run(daemon, env=variables, check=True, timeout=60)
        yield variables
    finally:
        for name in ("slurmd", "slurmctld", "munged"):
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                end(psutil.Process(int((folder / f"{name}.pid").read_text())))


def end(daemon: psutil.Process) -> None:
    """Ends a daemon with its children; kills it if need be."""
    daemon.terminate()
    try:
        daemon.wait(20)
    except psutil.TimeoutExpired:
        for process in (daemon, *daemon.children(recursive=True)):
            process.kill()


@attack("SLURM: a signal before the end of the time, requeued, resumed", slow=True)
def slurm_job(folder, number, rng):
    if not shutil.which("slurmctld", path="/usr/sbin") or os.geteuid() != 0:
        raise Absent("slurmctld is not installed, or this is not root")
    workdir, output, job = folder / "run", folder / "out.txt", folder / "job.sh"
    job.write_text(JOB.format(root=ROOT, command=command(workdir), workdir=workdir))
    log_text = lambda: output.read_text() if output.exists() else ""
    with slurm(folder) as variables:

        def call(*words: str) -> str:
            done = subprocess.run(
                words, env=variables, check=True, text=True, capture_output=True, timeout=60
            )
            return done.stdout

        job_id = call("sbatch", "--parsable", f"--output={output}", str(job)).strip()
        wait_until(lambda: "srun ended with" in log_text(), "the signal ends the step")
        expect("srun ended with 0" in log_text(), log_text()[-3000:])
        first = durable(workdir)
        expect(
            first >= last_logged_step(workdir) > 0, f"step {first} is on disk: {log_text()[-3000:]}"
        )
        wait_until(lambda: "PENDING" in call("squeue", "-h", "-o%T"), "the job is requeued")
        call("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        wait_until(lambda: f"found step {first} of" in log_text(), "the job resumes")
        wait_until(
            lambda: log_text().count("srun ended with") == 2, "the second signal ends the step"
        )
        call("scancel", job_id)
        wait_until(lambda: not call("squeue", "-h"), "the job is cancelled")
    expect(log_text().count("srun ended with 0") == 2, log_text()[-3000:])
    expect("Traceback" not in log_text(), log_text()[-3000:])
    second = durable(workdir)
    expect(second >= max(last_logged_step(workdir), first + 1), f"{second} steps after {first}")
