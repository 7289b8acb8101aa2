# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh, from the repository root: the project's own environment.
#
# Owns finding a Python, making .venv, and installing the versions of constraints.txt into it. What
# is installed already is reused: each set of packages leaves a stamp that names the files it was
# made from. DS_SFT_VENV names another directory than .venv; PYTHON another interpreter.

VENV=${DS_SFT_VENV:-.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac

die() {
  echo "error: $*" >&2
  exit 1
}

# Prints the first interpreter that runs and is new enough. It is started, not just looked up: a
# version manager leaves commands on PATH that only say that their version is not selected.
find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$name"
      return 0
    fi
  done
  return 1
}

# DeepSpeed compiles operators when it first needs them; better said now than after the install.
need_compiler() {
  local header
  command -v c++ >/dev/null || command -v g++ >/dev/null ||
    die "no C++ compiler on PATH, and DeepSpeed compiles its operators: install g++"
  header=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -f "$header" ] || die "$header is missing: install Python's headers (Debian: python3-dev)"
}

pip_install() {
  local log=$VENV/install.log
  if ! "$VENV/bin/python" -m pip install --disable-pip-version-check -c constraints.txt "$@" \
    </dev/null >"$log" 2>&1; then
    die "pip install $* failed: $(grep -m1 -i '^ *error' "$log" || tail -n 1 "$log") (log: $log)"
  fi
}

# What a stamp holds: the pins, the project's requirements, and where the editable install points.
stamp_text() {
  echo "$(cat constraints.txt pyproject.toml | cksum) $PWD"
}

# installed NAME: was the set NAME installed from the present pins?
installed() {
  [ "$(cat "$VENV/ds_sft-$1.stamp" 2>/dev/null)" = "$(stamp_text)" ]
}

mark_installed() {
  stamp_text >"$VENV/ds_sft-$1.stamp"
}

# make_venv NAME REQUIREMENT: .venv with torch, then the project as REQUIREMENT says (`.`, `.[dev]`).
make_venv() {
  local name=$1 requirement=$2 python torch clear
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || die "no Python 3.11 or newer found: set PYTHON=/path/to/python3"
    echo "[install] ${VENV#"$PWD/"} with $("$python" --version)"
    clear=()
    [ ! -f "$VENV/pyvenv.cfg" ] || clear=(--clear) # an environment that broke
    "$python" -m venv ${clear[@]+"${clear[@]}"} "$VENV" >/dev/null 2>&1 ||
      die "$python -m venv $VENV failed: install Python's venv module (Debian: python3-venv)"
  fi
  export PATH=$VENV/bin:$PATH
  unset PYTHONHOME
  need_compiler
  if installed "$name"; then
    echo "[install] ${VENV#"$PWD/"} is up to date: reused"
    return 0
  fi
  # torch alone and pinned first: whatever resolves it later then finds it there, and cannot
  # choose another build of several gigabytes.
  torch=$(grep '^torch==' constraints.txt)
  echo "[install] $torch"
  pip_install "$torch"
  echo "[install] $requirement"
  pip_install -e "$requirement"
  mark_installed "$name"
}
