"""Two hosts on one machine: a real sshd of the test's own on 127.0.0.1 and another on 127.0.0.2.

Each sshd has its own port, keys and configuration in the test's directory, and touches nothing in
~/.ssh or /etc/ssh. Where the kernel allows it (root, CAP_SYS_ADMIN), each runs in namespaces of its
own, which buys three things:

- pid: all that was started over ssh dies with the sshd, whatever state the test left it in, and
  the `pkill -f` with which DeepSpeed stops a pdsh job reaches this job's processes only;
- uts: the second host has a host name of its own, so that a message can be seen to name it;
- mount: the second host can have another disk at a path (`private_on_second`), a tmpfs.

Without them the two hosts still work, and stopping goes through the process tree.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

FIRST, SECOND = "127.0.0.1", "127.0.0.2"
SECOND_NAME = "second-host"
SSHD = "/usr/sbin/sshd"  # sshd insists on an absolute path, and sbin is not on everybody's PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHosts:
    """Two running hosts and how to reach them."""

    directory: Path
    """Keys, configurations, sshd logs and the hostfile."""
    hostfile: Path
    """Both hosts, one slot each."""
    ssh_args: str
    """Options that lead any ssh client to these hosts; pdsh takes them in PDSH_SSH_ARGS_APPEND."""

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.directory.glob("sshd-*.log")))


def require_two_host_tools() -> None:
    """Skip where sshd or pdsh is missing and this user cannot install them; root must not skip."""
    missing = [tool for tool in ("pdsh", "ssh", "ssh-keygen") if shutil.which(tool) is None]
    missing += [] if os.path.exists(SSHD) else ["sshd"]
    if not missing:
        return
    message = f"missing {', '.join(missing)}: run scripts/install_two_host_deps.sh as root"
    if os.geteuid() == 0:
        pytest.fail(message)
    pytest.skip(message)


def can_isolate() -> bool:
    """Whether namespaces may be made here: root in a container often may not."""
    command = ["unshare", "--pid", "--uts", "--mount", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def two_hosts(directory: Path, private_on_second: Path | None = None) -> Iterator[TwoHosts]:
    """Run both hosts until the block ends; `private_on_second` is another disk on the second."""
    require_two_host_tools()
    isolated = can_isolate()
    if private_on_second is not None and not isolated:
        pytest.skip("mount namespaces are not permitted here (needs root with CAP_SYS_ADMIN)")
    directory.mkdir(parents=True)
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)]
        subprocess.run(command, check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's privilege separation wants it

    port = _free_port()
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for number, address in enumerate((FIRST, SECOND), start=1):
            config = _server_config(directory, number, address, port)
            setup = ""
            if address == SECOND and isolated:
                setup = f"hostname {SECOND_NAME}; "
                if private_on_second is not None:
                    setup += f"mount -t tmpfs none '{private_on_second}'; "
            daemons.append(_start(config, setup, isolated, directory / f"sshd-{number}.log"))
        for number, address in enumerate((FIRST, SECOND)):
            _wait_for_banner(address, port, daemons[number], directory)
        yield _describe(directory, port)
    finally:
        for daemon in daemons:
            _stop(daemon)


def _server_config(directory: Path, number: int, address: str, port: int) -> Path:
    config = directory / f"sshd-{number}.config"
    config.write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {directory / 'host_key'}\n"
        f"AuthorizedKeysFile {directory / 'user_key.pub'}\nStrictModes no\nUsePAM no\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nPrintMotd no\n"
        f"PermitRootLogin prohibit-password\nPidFile {directory / f'sshd-{number}.pid'}\n"
    )
    return config


def _describe(directory: Path, port: int) -> TwoHosts:
    client = directory / "ssh.config"
    client.write_text(
        f"Host *\n  User {getpass.getuser()}\n  Port {port}\n"
        f"  IdentityFile {directory / 'user_key'}\n  IdentitiesOnly yes\n  BatchMode yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        "  ControlPath none\n"
    )
    hostfile = directory / "hostfile"
    hostfile.write_text(f"{FIRST} slots=1\n{SECOND} slots=1\n")
    return TwoHosts(directory=directory, hostfile=hostfile, ssh_args=f"-F {client}")


def _start(config: Path, setup: str, isolated: bool, log: Path) -> subprocess.Popen[bytes]:
    command = [SSHD, "-D", "-e", "-f", str(config)]
    if isolated:
        namespaces = ["unshare", "--pid", "--uts", "--mount", "--fork", "--kill-child"]
        shell = ["sh", "-ec", f'{setup}exec "$@"', "sh"]
        command = [*namespaces, "--mount-proc", *shell, *command]
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    """Kill the sshd with everything under it, however many sessions it has forked."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(daemon.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    daemon.kill()
    daemon.wait(timeout=30)


def _free_port() -> int:
    """A port that is free on all addresses just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _wait_for_banner(
    address: str, port: int, daemon: subprocess.Popen[bytes], directory: Path
) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and daemon.poll() is None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), timeout=5) as connection,
        ):
            if connection.recv(4) == b"SSH-":
                return
        time.sleep(0.05)
    logs = "".join(path.read_text() for path in sorted(directory.glob("sshd-*.log")))
    pytest.fail(f"sshd on {address}:{port} does not answer; its log:\n{logs}")


def launcher() -> list[str]:
    """The `deepspeed` command of the Python that runs the tests."""
    return [str(Path(sys.executable).with_name("deepspeed"))]
