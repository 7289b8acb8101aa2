import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_sft import cli
from ds_sft.errors import CheckpointError, ConfigError, TrainingDiverged


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds_sft", *words], capture_output=True, text=True, check=False,
        env={**os.environ, **env},
    )  # fmt: skip


def test_help_answers_in_half_a_second_with_a_line_for_each_command() -> None:
    before = os.times()
    done = run("--help")
    after = os.times()
    # CPU time: the wall clock of a busy machine says little.
    spent = sum(after[2:4]) - sum(before[2:4])
    assert done.returncode == 0
    assert spent < 0.5
    for name, line in cli.COMMANDS.items():
        assert f"  {name:<9} {line}\n" in done.stdout
    assert "ds-sft prepare --input" in done.stdout


def test_no_command_prints_the_same_as_help(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    assert capsys.readouterr().out == cli.overview() + "\n"


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from ds_sft import __version__

    cli.main(["--version"])
    assert capsys.readouterr().out == f"ds-sft {__version__}\n"


@pytest.mark.parametrize("words", [("verify", "x" * 256), ("inspect", "x" * 5000)])
def test_a_path_that_is_too_long_is_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {'x' * 100}... cannot be used: file name too long\n"


def test_what_this_user_may_not_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path / "meta.json"))

    monkeypatch.setattr("ds_sft.run.verify.verify", refused)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(tmp_path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path}/meta.json cannot be used: permission denied\n"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("pla", "error: unknown command `pla`: did you mean `plan`?\n"),
        ("exports", "error: unknown command `exports`: did you mean `export`?\n"),
        ("xyz", "error: unknown command `xyz`: use recipes, prepare, plan, fit, train, export, "
         "verify, reshard, inspect, doctor, env\n"),
    ],
)  # fmt: skip
def test_an_unknown_command_is_one_line_and_exit_code_2(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([word])
    assert ended.value.code == 2
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_can_be_imported_and_has_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_commands_are_the_ones_that_can_be_run() -> None:
    assert cli.COMMANDS.keys() == cli._MAINS.keys() | cli._FLAGS.keys()
    for name, flags, function in cli._FLAGS.values():
        module = importlib.import_module(name)
        assert callable(getattr(module, function))
        assert isinstance(getattr(module, flags), type)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a"), 2), (CheckpointError("a"), 2), (TrainingDiverged("a"), 1)],
)
def test_our_errors_become_a_line_and_their_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, cli.reporting():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == "error: a\n"


def test_an_error_over_several_lines_is_joined(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), cli.reporting():
        raise ConfigError("one\n  two")
    assert capsys.readouterr().err == "error: one two\n"


def test_other_ranks_end_with_the_same_code_in_silence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as ended, cli.reporting():
        raise ConfigError("a")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_a_lost_console_is_no_success_in_training() -> None:
    with pytest.raises(BrokenPipeError), cli.reporting():
        raise BrokenPipeError


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), cli.reporting():
        raise ZeroDivisionError


def test_ctrl_c_is_one_word_and_the_shells_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, cli.reporting():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    code = "from ds_sft import cli; cli.overview = lambda: 'x' * 2_000_000; cli.main([])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 0
    process.stderr.close()


@pytest.mark.parametrize("command", ["--help", "recipes"])
def test_a_stdout_without_room_is_one_line_and_a_closed_one_none(command: str) -> None:
    words = [sys.executable, "-m", "ds_sft", command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    closed = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *words], capture_output=True, text=True, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_file_without_room_is_not_taken_for_stdout() -> None:
    with pytest.raises(OSError, match="No space"), cli._tidy_pipe():
        Path("/dev/full").write_text("x")
