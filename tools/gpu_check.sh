#!/usr/bin/env bash
# All that only a GPU can tell, in one go: bench, sanitizer, eval in both modes, GPU tests.
#
#     tools/gpu_check.sh [OUTPUT DIRECTORY]
#
# Every part runs whatever the others do; its log and its exit status are in the output directory. The bench is
# resumed if it is there already. About 15 minutes on one H200.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="src:lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0

part() { # name, command...
    local name=$1 begin=$SECONDS
    shift
    "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ $status -eq 0 ] || failed=1
    echo "$name: exit $status after $((SECONDS - begin)) s" | tee -a "$out/summary.txt"
}

part native_build "$python" -m outblas.runtime.native_build
part shipped_build "$python" -m outblas_lab.build.cubin_build
part host_cost "$python" benchmarks/host_cost.py --out "$out/host_cost.json"
part bench "$python" -m outblas bench --suite grid1000 --layout tn --out "$out/grid1000_tn_fp16_fp32_offline.parquet"
for tool in memcheck racecheck; do
    # API errors are left out: newer bindings probe an older driver for entry points that it does not have.
    part "$tool" compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 "$python" tools/sanitize.py
done
for mnk in 64_4096_64 4096_4096_4096 64_64_16384 127_1001_333; do
    common=(--mnk "$mnk" --acc fp32 --layout tn --warmup-seconds 1 --benchmark-seconds 5 --base-dir "$out/eval")
    part "eval_offline_$mnk" "$python" -m outblas eval "${common[@]}" --mode offline
    part "eval_server_$mnk" "$python" -m outblas eval "${common[@]}" --mode server --target-qps 100
done
part tests "$python" -m pytest -q tests/gpu tests/adversarial
echo "results: $out"
exit $failed
