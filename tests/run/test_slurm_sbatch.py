"""`scripts/slurm.sbatch` under a Slurm of three small scripts: what it starts, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm.sbatch"
JOB_ID = 123456

FAKE_SCONTROL = """#!/bin/bash
echo "$*" >>"$CALLS/scontrol"
if [[ "$1 $2" == "show hostnames" ]]; then printf 'node-3\\nnode-7\\n'; fi
"""
FAKE_SRUN = """#!/bin/bash
# One task a node, each with the SLURM_NODEID that Slurm would give it; srun's own flags come first.
printf '%s\\n' "$@" >"$CALLS/srun"
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
# A slow one: the step has ended before the script's own handler of the signal has.
FAKE_TOUCH = """#!/bin/bash
command -p touch "$@"
sleep 0.3
"""
FAKE_DEEPSPEED = """#!/bin/bash
printf '%s\\n' "$@" >"$CALLS/node-$SLURM_NODEID"
cp hostfile.* "$CALLS/hostfile-$SLURM_NODEID"
case "$MODE" in
    finish) touch "$OUT/finished" ;;
    crash) exit 7 ;;
    stop) for _ in {1..200}; do [[ -f "$OUT/stop" ]] && exit 1; sleep 0.05; done; exit 9 ;;
esac
"""


class Job:
    """The script in a job of two nodes, `node-3` and `node-7`, with its calls recorded."""

    def __init__(self, directory: Path) -> None:
        self.calls, self.out, bin_dir = directory / "calls", directory / "run", directory / "bin"
        for folder in (self.calls, bin_dir):
            folder.mkdir()
        fakes = {
            "scontrol": FAKE_SCONTROL, "srun": FAKE_SRUN, "deepspeed": FAKE_DEEPSPEED,
            "touch": FAKE_TOUCH,
        }  # fmt: skip
        for name, text in fakes.items():
            (bin_dir / name).write_text(text)
            (bin_dir / name).chmod(0o755)
        self.directory = directory
        self.environment = {
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "OUT": str(self.out),
            "SLURM_JOB_ID": str(JOB_ID),
            "SLURM_JOB_NODELIST": "node-[3,7]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_PER_NODE": "a100:4",
            "SLURM_CPUS_PER_TASK": "64",
        }

    def start(self, mode: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            cwd=self.directory,
            env={**self.environment, "MODE": mode},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, mode: str, *arguments: str) -> tuple[int, str]:
        process = self.start(mode, *arguments)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def recorded(self, name: str) -> list[str]:
        return (self.calls / name).read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_script_is_valid_bash() -> None:
    result = subprocess.run(
        ["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_one_launcher_a_node_with_one_hostfile_and_the_given_arguments(job: Job) -> None:
    given = ["--recipe", "qwen3-8b", "--data", "a b", "--out", str(job.out)]
    status, output = job.run("finish", *given)
    assert status == 0, output
    assert f"finished: {job.out}" in output
    for node in range(2):
        call = job.recorded(f"node-{node}")
        hostfile = str(job.directory / f"hostfile.{JOB_ID}")
        assert call == [
            *("--no_ssh", "--node_rank", str(node), "--hostfile", hostfile),
            *("--master_addr", "node-3", "--master_port", str(10000 + JOB_ID % 20000)),
            *("--module", "ds_sft.train", *given),
        ]
        assert job.recorded(f"hostfile-{node}") == ["node-3 slots=4", "node-7 slots=4"]
    assert "--kill-on-bad-exit=1" in job.recorded("srun")
    assert "--cpus-per-task=64" in job.recorded("srun")
    assert list(job.directory.glob("hostfile.*")) == []


def test_success_is_read_from_the_finished_file_not_from_the_exit_code(job: Job) -> None:
    status, output = job.run("quiet end", "--out", str(job.out))
    assert status == 1
    assert f"{job.out}/finished is not there" in output


def test_a_crash_keeps_its_exit_code_and_does_not_queue_again(job: Job) -> None:
    status, output = job.run("crash", f"--out={job.out}")
    assert status == 7, output
    assert all("requeue" not in call for call in job.recorded("scontrol"))


@pytest.mark.parametrize(("restarts", "status", "queued"), [("0", 0, True), ("50", 1, False)])
def test_the_warning_before_the_time_limit_stops_the_run_and_queues_the_job_again(
    job: Job, restarts: str, status: int, queued: bool
) -> None:
    job.out.mkdir()
    (job.out / "stop").touch()  # of the run before, which would end this one at once
    job.environment["SLURM_RESTART_COUNT"] = restarts
    process = job.start("stop", "--out", str(job.out))
    deadline = time.monotonic() + 20
    while not (job.calls / "node-1").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (job.out / "stop").exists()
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == status, output
    assert (job.out / "stop").exists()
    assert (f"requeue {JOB_ID}" in job.recorded("scontrol")) is queued


def test_without_out_nothing_is_started(job: Job) -> None:
    status, output = job.run("finish", "--data", "x")
    assert status == 2
    assert "--out" in output
    assert not (job.calls / "srun").exists()
