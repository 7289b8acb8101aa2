"""`ds-sft env`: what is sent to workers, what is not, and that values arrive unchanged."""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_sft.errors import ConfigError
from ds_sft.run import launch_env
from ds_sft.run.launch_env import EnvFlags, choose, env_line, is_secret, run, write_private

ROOT = Path(__file__).parents[2]

NASTY = {
    "HF_EMPTY": "",
    "HF_SPACES": "  two  spaces, and around  ",
    "HF_EQUALS": "a=b==c",
    "HF_DOLLAR": "$HOME ${HOME} $(id) $$",
    "HF_QUOTES": "a \"double\" and a 'single' one",
    "HF_BACKTICK": "`id`",
    "HF_BACKSLASH": "\\n \\\\ \\$HOME C:\\dir\\",
    "HF_UNICODE": "Zürich 東京 é e\u0301 \u00a0no-break \u2028 🙂",
    "HF_UNICODE_WORD": "Zürich",
    "HF_PERCENT": "%n %h %u %% 100% 50%n",
    "HF_SHELL": "a;b && c | d > e < f * ? [x] {y} ~ # ! ^ & (z)",
    "HF_TAB": "\ttab\tand\x0bvertical\x1f\x85",
    "HF_CONTROL": "\x01\x02\x1b[31mred\x7f",
    "HF_TILDE": "~/cache",
    "HF_DASH": "-n",
    "HF_LONG": "x y" * 3000,
}


def clean_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **variables: str) -> None:
    """Only `variables` are set, and both places where DeepSpeed looks are empty directories."""
    for name in list(os.environ):
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "cwd")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_groups_that_workers_need_are_sent_and_nothing_else() -> None:
    sent = {
        "HF_HOME": "/cache",
        "WANDB_PROJECT": "p",
        "NCCL_DEBUG": "INFO",
        "TRITON_CACHE_DIR": "/t",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUDA_HOME": "/usr/local/cuda",
        "DS_ACCELERATOR": "cpu",
        "DS_SKIP_CUDA_CHECK": "1",
        "DEEPSPEED_TIMEOUT": "30",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }
    other = {"PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "RANK": "3", "OMP": "1"}
    chosen, withheld = choose({**other, **sent})
    assert chosen == sent
    assert list(chosen) == sorted(sent)
    assert withheld == []


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "x", True),
        ("HF_TOKEN", "x", True),
        ("HUGGING_FACE_HUB_TOKEN", "x", True),
        ("CUDA_SECRET_THING", "x", True),
        ("HF_PASSWORD", "x", True),
        ("HF_ENDPOINT", "https://me:pass@mirror.example/hf", True),
        ("HF_ENDPOINT", "https://mirror.example/hf", False),
        ("HF_TOKEN_PATH", "/home/me/token", False),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
    ],
)
def test_secrets_are_known_by_name_or_by_an_address_with_a_password(
    name: str, value: str, secret: bool
) -> None:
    assert is_secret(name, value) is secret


def test_secrets_stay_out_unless_asked_for_and_no_value_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = {"WANDB_API_KEY": "k-value", "HF_TOKEN": "t-value", "HUGGING_FACE_HUB_TOKEN": "u-val"}
    clean_shell(monkeypatch, tmp_path, HF_HOME="/cache-value", **secrets)

    run(EnvFlags())
    out = capsys.readouterr().out
    assert Path(".deepspeed_env").read_text() == "HF_HOME=/cache-value\n"
    assert "wandb login" in out
    assert "hf auth login" in out
    assert all(name in out for name in secrets)
    assert "value" not in out

    run(EnvFlags(include_secrets=True))
    out = capsys.readouterr().out
    assert "HF_TOKEN=t-value\n" in Path(".deepspeed_env").read_text()
    assert "prints the values into its log" in out
    assert "-value" not in out


def test_extra_names_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean_shell(monkeypatch, tmp_path, MY_DIR="/d", HF_HOME="/c")
    run(EnvFlags(name=("MY_DIR",)))
    assert Path(".deepspeed_env").read_text() == "HF_HOME=/c\nMY_DIR=/d\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NOT_SET", "NOT_SET: not set"),
        ("CUDA_VISIBLE_DEVICES", "slots of the hostfile"),
        ("MY_TOKEN", "--include-secrets"),
    ],
)
def test_an_extra_name_that_cannot_be_sent_is_refused(name: str, words: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "MY_TOKEN": "hidden"}
    with pytest.raises(ConfigError, match=re.escape(words)) as refusal:
        choose(environ, (name,))
    assert "hidden" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_cuda_visible_devices_is_never_sent() -> None:
    assert choose({"CUDA_VISIBLE_DEVICES": "0,1"}) == ({}, [])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HF_X", "a\nb", "HF_X holds a newline"),
        ("HF_X", "a\r", "HF_X holds a carriage return"),
        ("HF_X", "a\0b", "HF_X holds a NUL"),
        ("HF_X", "a\udcff", "HF_X is not valid UTF-8"),
        ("HF-X", "a", "'HF-X' is not a name"),
        ("HF_X\n", "a", "'HF_X\\n' is not a name"),
    ],
)
def test_what_no_line_can_carry_is_refused_by_name(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        env_line(name, value)


def test_a_refused_value_leaves_the_old_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clean_shell(monkeypatch, tmp_path, HF_X="a\nb")
    Path(".deepspeed_env").write_text("OLD=1\n")
    with pytest.raises(ConfigError, match="HF_X"):
        run(EnvFlags())
    assert Path(".deepspeed_env").read_text() == "OLD=1\n"


def test_the_file_is_private_from_its_first_byte_under_any_umask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / ".deepspeed_env"
    target.write_text("old")
    target.chmod(0o644)
    (tmp_path / ".deepspeed_env.partial").write_text("left over")  # 0644, of a killed run
    modes: list[int] = []
    real_fsync = os.fsync

    def watch(handle: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    before = os.umask(0)
    try:
        write_private(target, "A=1\n")
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert target.read_text() == "A=1\n"
    assert list(tmp_path.iterdir()) == [target]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_private(tmp_path / "missing" / "x", "")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        write_private(tmp_path, "")


def test_names_lost_from_a_hand_written_file_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean_shell(monkeypatch, tmp_path, HF_HOME="/c")
    Path(".deepspeed_env").write_text("MINE=value\nHF_HOME=/old\n")
    run(EnvFlags())
    out = capsys.readouterr().out
    assert "no longer in the file: MINE" in out
    assert "value" not in out


def test_a_file_that_deepspeed_would_not_read_comes_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean_shell(monkeypatch, tmp_path)
    run(EnvFlags(out=tmp_path / "other"))
    assert f"export DS_ENV_FILE={tmp_path / 'other'}" in capsys.readouterr().out
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "other"))
    run(EnvFlags(out=tmp_path / "other"))
    assert "DS_ENV_FILE" not in capsys.readouterr().out
    monkeypatch.delenv("DS_ENV_FILE")
    (tmp_path / "home" / ".deepspeed_env").write_text("A=1\n")
    run(EnvFlags())
    assert f"reads {tmp_path / 'home' / '.deepspeed_env'} as well" in capsys.readouterr().out


def test_flags_parse_from_a_command_line() -> None:
    arguments = ["--out", "x", "--include-secrets", "--name", "A", "B"]
    flags = tyro.cli(EnvFlags, args=arguments)
    assert flags == EnvFlags(out=Path("x"), include_secrets=True, name=("A", "B"))
    assert tyro.cli(EnvFlags, args=[]) == EnvFlags()


def test_the_module_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, ds_sft.run.launch_env as m;"
        "print(sorted({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"


# --- DeepSpeed's own reader, and a real shell -------------------------------------------------


class DeepSpeedReader:
    """Runs DeepSpeed's launcher up to the command that it would start, and keeps that command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        runner = importlib.import_module("deepspeed.launcher.runner")
        self._main = runner.main
        self.env_file = directory / ".deepspeed_env"
        self._hostfile = directory / "hostfile"
        self._hostfile.write_text("host-a slots=1\nhost-b slots=1\n")
        self._command: list[str] = []
        done = SimpleNamespace(wait=lambda: 0, returncode=0)

        def popen(command: list[str], env: dict[str, str]) -> SimpleNamespace:
            self._command = command
            return done

        monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_PATHS", [str(directory)])
        monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_NAME", ".deepspeed_env")
        monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=popen))
        # main() installs handlers that would stay in the test process.
        monkeypatch.setattr(
            runner, "signal", SimpleNamespace(signal=lambda *_: None, SIGINT=2, SIGTERM=15)
        )
        monkeypatch.setattr(runner.PDSHRunner, "backend_exists", lambda _: True)

    def exports(self, content: str) -> str:
        """The export statements that DeepSpeed makes from a `.deepspeed_env` with this content."""
        self.env_file.write_text(content, encoding="utf-8")
        hosts = ["--hostfile", str(self._hostfile), "--no_ssh_check", "--master_addr", "host-a"]
        self._main([*hosts, "--quiet", "train.py"])
        return next(part for part in self._command if part.startswith("export "))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DeepSpeedReader:
    return DeepSpeedReader(monkeypatch, tmp_path)


def after_pdsh(command: str) -> str:
    """What pdsh makes of a command on rank 7 of `host` (pdsh(1)); the two-host test runs pdsh."""
    fills = {"%n": "7", "%h": "host", "%u": "me", "%%": "%"}
    return re.sub(r"%[nhu%]", lambda match: fills[match[0]], command)


def read_back(exports: str, names: list[str], shell: str = "bash") -> list[str]:
    """The variables as a program started from the exporting shell sees them."""
    dump = "import json, os, sys; print(json.dumps([os.environ.get(n) for n in sys.argv[1:]]))"
    result = subprocess.run(
        [shell, "-c", f'{exports} exec "$0" -c "$@"', sys.executable, dump, *names],
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert result.stderr == b""
    values: list[str] = json.loads(result.stdout)
    return values


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_nasty_values_survive_deepspeeds_reader_pdsh_and_the_shell(
    reader: DeepSpeedReader, shell: str
) -> None:
    exports = reader.exports("".join(f"{env_line(n, v)}\n" for n, v in NASTY.items()))
    assert read_back(after_pdsh(exports), list(NASTY), shell) == list(NASTY.values())


text = st.text(
    st.one_of(
        st.sampled_from("\"'$`\\%nhu=! \t~#;&|<>(){}[]*?"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"),
    ),
    max_size=30,
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(values=st.lists(text, min_size=1, max_size=20))
def test_any_value_survives_deepspeeds_reader_pdsh_and_bash(
    reader: DeepSpeedReader, values: list[str]
) -> None:
    names = [f"HF_{number}" for number in range(len(values))]
    lines = [f"{env_line(*pair)}\n" for pair in zip(names, values, strict=True)]
    assert read_back(after_pdsh(reader.exports("".join(lines))), names) == values


def test_deepspeed_still_dies_on_blank_lines_and_comments(reader: DeepSpeedReader) -> None:
    """The reason why the file holds neither; should this fail one day, comments may come back."""
    for content in ("A=1\n\nB=2\n", "# a comment\nA=1\n"):
        with pytest.raises(ValueError, match="not enough values"):
            reader.exports(content)


def test_hostfile_example_is_read_by_deepspeeds_own_parser() -> None:
    runner = importlib.import_module("deepspeed.launcher.runner")
    pool = runner.fetch_hostfile(str(ROOT / "hostfile.example"))
    assert dict(pool) == {"node-0": 8, "node-1": 8}


def test_every_group_is_justified_in_the_docstring() -> None:
    source = Path(launch_env.__file__).read_text()
    doc = source.split("FORWARDED_PREFIXES = ", 1)[1].split('"""')[1]
    assert [p for p in launch_env.FORWARDED_PREFIXES if p not in doc] == []
