"""`ds-sft env`: the variables of this shell that workers on other hosts need, in `.deepspeed_env`.

`deepspeed --hostfile` starts the ranks over pdsh and ssh, where almost nothing of the shell that
typed the command exists. DeepSpeed reads `~/.deepspeed_env`, then `./.deepspeed_env` (or what
DS_ENV_FILE names), and types every line of it into the remote shell as `export NAME=value; `.

Owns: which variables are sent, which are secrets, and the spelling under which a value survives
DeepSpeed's reader, pdsh and the remote shell unchanged.

Invariants: the file has mode 0600 from its first byte and appears only when whole; each line is
`NAME=value`, with no comment and no blank line; no value is ever printed.

Leaves to others: ranks of one host, and launchers started by `srun` or `--no_ssh`, which inherit
the environment and never read the file; PYTHON*, UCX* and MLFLOW* variables, which DeepSpeed sends
by itself. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_sft.errors import ConfigError
from ds_sft.run.atomic import partial_path

FORWARDED_PREFIXES = (
    "CUDA_",
    "DS_SKIP_",
    "GLOO_",
    "HF_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH_",
    "TRANSFORMERS_",
    "TRITON_",
    "WANDB_",
)
"""Groups of variables that are sent, and why.

- HF_, TRANSFORMERS_: where models and tokenizers are cached, and whether the Hub may be asked;
  a worker that disagrees downloads again, or finds nothing.
- WANDB_: mode, project, entity, directory: rank 0 may live on another host than the shell.
- NCCL_, GLOO_: network interfaces, protocols, debugging; ranks that disagree do not connect.
- PYTORCH_, TORCH_, CUDA_: allocator, collective timeouts, where extensions are built, CUDA_HOME.
- TRITON_: its kernel cache must not lie on a slow shared home on some hosts only.
- OMP_: CPU threads per rank; CPU Adam is useless with the wrong number.
- DS_SKIP_: DeepSpeed's own switches for its op builder must agree with the launching host.
"""

FORWARDED_NAMES = (
    "DEEPSPEED_TIMEOUT",
    "DS_ACCELERATOR",
    "HUGGING_FACE_HUB_TOKEN",
    "TOKENIZERS_PARALLELISM",
)
"""Single variables that are sent: the collective timeout and the device, on which ranks must agree;
the tokenizer's threads; the token's older name, which the rule for secrets then withholds."""

NEVER_FORWARDED = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Set by DeepSpeed's launcher on every node, from the slots of the hostfile."""

_SECRET_NAME = re.compile(r"(_TOKEN|_KEY|_APIKEY)$|SECRET|PASSWORD|PASSWD|CREDENTIAL")
_NOT_SECRET = frozenset({"HF_HUB_DISABLE_IMPLICIT_TOKEN"})
_SECRET_VALUE = re.compile(r"://[^/@\s]+@")  # a user name or password within an address
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class EnvFlags:
    """Write the variables that workers need into the file that `deepspeed --hostfile` reads."""

    out: Path = Path(".deepspeed_env")
    """File to write. DeepSpeed reads `.deepspeed_env` in the home and in the current directory."""

    include_secrets: bool = False
    """Also write keys and tokens. DeepSpeed's launcher prints every value it sends into its log."""

    name: tuple[str, ...] = ()
    """More variables to send, by name; each must be set in this shell."""


def run(flags: EnvFlags) -> None:
    """The `ds-sft env` command; raises ConfigError."""
    chosen, withheld = choose(os.environ, flags.name, include_secrets=flags.include_secrets)
    lines = [env_line(name, value) for name, value in chosen.items()]
    replaced = _names_in(flags.out)
    write_private(flags.out, "".join(f"{line}\n" for line in lines))

    print(f"[env] wrote {flags.out}: {len(chosen)} variables: {' '.join(chosen) or '(none)'}")
    if dropped := sorted(replaced - set(chosen)):
        print(f"[env] no longer in the file: {' '.join(dropped)}")
    if withheld:
        print(
            f"[env] left out, they look like secrets: {' '.join(withheld)}. Workers find the key in"
            " ~/.netrc (`wandb login`) and the token in its file (`hf auth login`) on each host;"
            " --include-secrets sends them all the same."
        )
    if secrets := [name for name in chosen if is_secret(name, chosen[name])]:
        print(
            f"[env] WARNING: {' '.join(secrets)} included: DeepSpeed's launcher prints the values"
            " into its log, and they show in the process lists of all hosts."
        )
    if note := _note_where_deepspeed_reads(flags.out):
        print(note)


def choose(
    environ: Mapping[str, str], extra: tuple[str, ...] = (), *, include_secrets: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Which variables of `environ` go into the file, and the names of the secrets that do not.

    Both are sorted by name. Raises ConfigError for an extra name that is not set, that DeepSpeed's
    launcher sets itself, or that is a secret while secrets stay out.
    """
    for name in extra:
        if name in NEVER_FORWARDED:
            raise ConfigError(
                f"--name {name}: DeepSpeed's launcher sets it on every node; choose devices by the"
                " slots of the hostfile or by `deepspeed --include`"
            )
        if name not in environ:
            raise ConfigError(f"--name {name}: not set in this shell; export it, or drop the flag")
        if is_secret(name, environ[name]) and not include_secrets:
            raise ConfigError(
                f"--name {name}: looks like a secret, and DeepSpeed's launcher prints what it"
                " sends; drop it, or add --include-secrets"
            )
    names = sorted({name for name in environ if _is_forwarded(name)} | set(extra))
    withheld = [n for n in names if is_secret(n, environ[n]) and not include_secrets]
    return {n: environ[n] for n in names if n not in withheld}, withheld


def is_secret(name: str, value: str) -> bool:
    """Whether the value must stay out of logs: by its name, or an address with a password in it."""
    by_name = _SECRET_NAME.search(name) is not None and name not in _NOT_SECRET
    return by_name or _SECRET_VALUE.search(value) is not None


def env_line(name: str, value: str) -> str:
    r"""One line of the file, without its newline; raises ConfigError for what no line can carry.

    DeepSpeed strips the value, puts it between double quotes if a character asks for it (anything
    outside `[\w@%+=:,./-]`), and pdsh replaces %n, %h, %u and %% in the command before ssh sends
    it. So `\`, `"`, `$` and backtick get a backslash; `""`, which ends and reopens DeepSpeed's
    quotes and adds nothing, goes after each `%`, and around a value that strip() would shorten.
    Each of these is itself a character that makes DeepSpeed add its quotes.
    """
    if not _IDENTIFIER.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name that a shell can export: unset it here")
    for char, word in (("\n", "a newline"), ("\r", "a carriage return"), ("\0", "a NUL")):
        if char in value:
            raise ConfigError(
                f"{name} holds {word}, which DeepSpeed's line-based file cannot carry: unset it,"
                " or put its content into a file on each host"
            )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name} is not valid UTF-8, and DeepSpeed would fail to read the file: unset it"
        ) from None
    escaped = re.sub(r'[\\"$`]', r"\\\g<0>", value).replace("%", '%""')
    if value != value.strip():
        escaped = f'""{escaped}""'
    return f"{name}={escaped}"


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text`, readable by its owner only; raises ConfigError, naming the path."""
    partial = partial_path(path)
    try:
        partial.unlink(missing_ok=True)
        # O_EXCL: a file or link that somebody else puts there is not written through.
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from error


def _is_forwarded(name: str) -> bool:
    if name in NEVER_FORWARDED:
        return False
    return name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES


def _names_in(path: Path) -> set[str]:
    """Names in the file that is about to be replaced: a hand-written one must not go unnoticed."""
    if not path.is_file():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {line.split("=", 1)[0].strip() for line in lines if "=" in line}


def _note_where_deepspeed_reads(out: Path) -> str | None:
    """A line of advice when DeepSpeed, started from this directory, would not read only `out`."""
    wanted = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    read = [(folder / wanted).absolute() for folder in (Path.home(), Path())]
    if out.absolute() not in read:
        return (
            f"[env] DeepSpeed will read {read[1]}, not this file:"
            f" export DS_ENV_FILE={out.absolute()} before you start it"
        )
    others = [str(path) for path in read if path != out.absolute() and path.is_file()]
    return f"[env] DeepSpeed reads {others[0]} as well" if others else None
