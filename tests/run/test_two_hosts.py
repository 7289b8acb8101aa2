"""`deepspeed --hostfile` for real: two hosts on one machine, pdsh, ssh, our trainer over them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from harness import Result, Training, launch_many
from sshd import FIRST, SECOND, SECOND_NAME, TwoHosts, can_isolate, launcher, two_hosts
from test_launch_env import NASTY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORKER_VARIABLES = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
STEPS = 6


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path / "hosts") as running:
        yield running


def bare_environment() -> dict[str, str]:
    """This shell without what `.deepspeed_env` must bring, so that nothing gets there past it."""
    ours = (*WORKER_VARIABLES, *NASTY, "DS_ENV_FILE")
    return {name: value for name, value in os.environ.items() if name not in ours}


def start(command: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a launcher in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str]:
    """Exit code and output of a launcher; one that does not end fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        output, _ = process.communicate()
        pytest.fail(f"the launch did not end within {timeout} s; its output:\n{output[-6000:]}")
    return process.returncode, output


def kill_group(process: subprocess.Popen[str]) -> None:
    """End a launcher at once. Not by SIGTERM: a local DeepSpeed launcher leaves its ranks behind,
    and a pdsh one runs `pkill -f` for every DeepSpeed job on its hosts."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def start_on_hosts(
    hosts: TwoHosts, cwd: Path, arguments: list[str], **variables: str
) -> subprocess.Popen[str]:
    """`ds-sft env` in a shell with the variables that workers need, then `deepspeed --hostfile`."""
    shell = {**bare_environment(), **WORKER_VARIABLES, **variables, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "ds_sft", "env"], cwd=cwd, env=shell, check=True)
    # PYTHONPATH is one of the few names that DeepSpeed sends by itself: the checkout is importable
    # on the hosts whether or not the package is installed.
    environment = {
        **bare_environment(),
        "PDSH_SSH_ARGS_APPEND": hosts.ssh_args,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    where = ["--hostfile", str(hosts.hostfile), "--no_ssh_check", "--master_addr", FIRST]
    command = [*launcher(), *where, "--master_port", str(harness.free_port()), *arguments]
    return start(command, cwd, environment)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank on each host wrote its environment, then the sum over a collective of both.

    Without our trainer: when a test of this is red, look at the machine first.
    """
    work = tmp_path_factory.mktemp("dumped")
    script = work / "dump.py"
    script.write_text(
        "import json, os, pathlib, socket, sys\n"
        "out = pathlib.Path(sys.argv[1]) / f\"rank-{os.environ['RANK']}\"\n"
        "arrived = dict(os.environ)\n"
        "out.with_suffix('.env').write_text(json.dumps(arrived))\n"
        # ssh knows nothing of the virtual environment, where the ninja is that DeepSpeed builds by.
        "os.environ['PATH'] = os.path.dirname(sys.executable) + ':' + os.environ['PATH']\n"
        "import torch\n"
        "import deepspeed\n"
        "deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        "deepspeed.init_distributed('gloo')\n"
        "total = torch.tensor([float(os.environ['RANK']) + 1])\n"
        "torch.distributed.all_reduce(total)\n"
        "said = [arrived['SSH_CONNECTION'].split()[2], socket.gethostname(), total.item()]\n"
        "out.with_suffix('.sum').write_text(json.dumps(said))\n"
        "torch.distributed.destroy_process_group()\n"
        "os._exit(0)\n"  # the teardown of Python aborts now and then
    )
    arguments = ["--no_local_rank", str(script), str(work)]
    with two_hosts(work / "hosts") as hosts:
        status, output = finish(start_on_hosts(hosts, work, arguments, **NASTY))
        assert status == 0, output[-4000:] + hosts.logs()
    return work


def test_nasty_values_arrive_unchanged_in_a_remote_process(dumped: Path) -> None:
    """`ds-sft env` -> DeepSpeed's launcher -> pdsh -> ssh -> shell -> a rank's environment."""
    for rank in range(2):
        arrived = json.loads((dumped / f"rank-{rank}.env").read_text())
        assert arrived["WORLD_SIZE"] == "2"
        assert {name: arrived.get(name) for name in NASTY} == NASTY
        assert {name: arrived.get(name) for name in WORKER_VARIABLES} == WORKER_VARIABLES


def test_both_hosts_take_part_in_a_collective(dumped: Path) -> None:
    second_name = SECOND_NAME if can_isolate() else socket.gethostname()
    said = [json.loads((dumped / f"rank-{rank}.sum").read_text()) for rank in range(2)]
    assert said == [[FIRST, socket.gethostname(), 3.0], [SECOND, second_name, 3.0]]


def train_arguments(model: Path, data: Path, out: Path, **changes: object) -> list[str]:
    """The golden recipe, in fp32, for a few steps, as words for the launcher."""
    short = {"--num-train-steps": STEPS, "--hf-export-dtype": "float32"}
    short |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return ["--module", "ds_sft.train", *map(str, harness.flags(model, data, out, short))]


def test_a_run_that_moves_from_one_host_to_two_and_back_is_the_run_that_stayed(
    hosts: TwoHosts, tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    """Two steps on one rank, two on two hosts with a rank each, two on one rank again."""
    moved, stayed = tmp_path / "moved", tmp_path / "stayed"

    def words(out: Path, **changes: object) -> list[str]:
        return train_arguments(tiny_model, tiny_data, out, **changes)

    def at_home(*runs: list[str]) -> list[Result]:
        results = launch_many(1, [Training(run[2:]) for run in runs], tmp_path / "work")
        assert [result.codes for result in results] == [[0]] * len(runs), results[-1].text[-3000:]
        return results

    at_home(words(stayed), words(moved, stop_after=2))
    status, output = finish(start_on_hosts(hosts, tmp_path, words(moved, stop_after=4)))
    assert status == 0, output[-6000:] + hosts.logs()
    assert f"resumed from {moved}/checkpoints-temp/step-1 at step 2" in output
    (last,) = at_home(words(moved))
    assert "step-3 was written by 2 ranks, 1 read it" in last.text

    assert json.loads((moved / "finished").read_text())["completed"] == STEPS
    got, want = (harness.metrics(out) for out in (moved, stayed))
    for column in ("label", "lr", "target_tokens", "tokens"):  # the same packs, in order
        assert [row[column] for row in got] == [row[column] for row in want]
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(got, want, strict=True)]
    assert max(apart) <= 1e-5
    final, reference = (harness.weights(out / f"hf/step-{STEPS - 1}") for out in (moved, stayed))
    start_weights = harness.weights(tiny_model)
    assert harness.relative_update_error(final, reference, start_weights) <= 2e-5


def test_a_host_with_another_disk_under_out_is_refused_by_name(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with two_hosts(tmp_path / "hosts", private_on_second=out) as hosts:
        arguments = train_arguments(tiny_model, tiny_data, out)
        status, output = finish(start_on_hosts(hosts, tmp_path, arguments))
    assert status == 2, output[-6000:] + hosts.logs()
    errors = [line for line in output.splitlines() if "error: " in line]
    assert len(errors) == 1, output[-6000:]
    assert SECOND_NAME in errors[0]
    assert str(out) in errors[0]
    assert not (out / "metrics.jsonl").exists()
