#!/usr/bin/env bash
# Real runs on a GPU: the demo's recipe for six steps with each setting that has code of its own there, one that is killed and resumed, and
# the whole demo. Every line says OK or FAILED; logs and runs are kept in the folder that it names.
#   bash benchmarks/device_runs.sh [cuda|cpu]        (cpu: without what only a GPU has; checks the script itself)
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
device="${1:-cuda}"
python="$(command -v "${PYTHON:-python3}")"
python="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
folder="$(mktemp -d)" && cd "$folder" && echo "runs in $folder"
recipe="$root/recipes/demo/demo.toml"
short=(--set train.minutes=0 --set train.steps=6 --set eval.prompts=16)

failed=0
try() { # name, then settings
    local name="$1" began=$SECONDS
    shift
    if timeout -k 10 600 "$python" -m headrace train "$recipe" --name "$name" "$@" >"$name.log" 2>&1; then
        echo "OK      $name in $((SECONDS - began)) s: $(grep 'held-out reward' "$name.log" | tail -n 1)"
    else
        echo "FAILED  $name after $((SECONDS - began)) s, see $folder/$name.log" && tail -n 5 "$name.log"
        tail -n 20 "runs/$name/logs/engine.log" 2>/dev/null
        failed=1
    fi
}

only=()
[ "$device" = cuda ] && only=(weight_sync.kind=cuda_ipc train.offload_optimizer=true)
for setting in "${only[@]}" lora.rank=16 train.weights=bfloat16 orchestration.placement=shared; do
    try "${setting%%=*}" "${short[@]}" --set "$setting"
done

"$python" -m headrace train "$recipe" --name killed "${short[@]}" --set train.steps=12 --set checkpoint.every=2 >killed.log 2>&1 &
run=$!
for _ in $(seq 600); do
    if grep -q "step 5/" killed.log || ! kill -0 "$run" 2>/dev/null; then break; fi
    sleep 0.5
done
kill -KILL "$run"
if timeout -k 10 600 "$python" -m headrace train --resume runs/killed >>killed.log 2>&1; then
    echo "OK      killed at step 5 and resumed: $(grep 'held-out reward' killed.log | tail -n 1)"
else
    echo "FAILED  resumed, see $folder/killed.log" && tail -n 5 killed.log
    failed=1
fi

[ "$device" = cuda ] && try demo
exit $failed
