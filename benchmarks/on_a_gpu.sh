#!/usr/bin/env bash
# The first half hour on an H100 or H200: three commands of at most ten minutes each.
#
#   bash benchmarks/on_a_gpu.sh 1    correctness: every launcher once, then the GPU tests
#   bash benchmarks/on_a_gpu.sh 2    speed: launch parameters, counters, the main rows of the suite
#   bash benchmarks/on_a_gpu.sh 3    end to end: the demo, a 0.5B trainer by phase, updates
#
# Results go to $OUT, at most eight files per command. suite.json and training.json are files of
# pytest-benchmark for benchmarks/results. Each stage has its own time limit, and an interrupted
# pytest saves what it has measured.
# TINY=cpu or TINY=cuda runs the stages at toy size on that device, to test the script. A CPU leaves
# out the GPU tests and the demo.
set -u -o pipefail
step=${1:?1, 2 or 3}
out=${OUT:-runs/on_a_gpu}; mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
scratch=$(mktemp -d); trap 'rm -rf "$scratch"' EXIT
tiny=${TINY:+--tiny --device $TINY}
device=${TINY:-cuda}
part() { timeout "$1" "$python" -m benchmarks.on_a_gpu "$2" --seconds "$(($1 - 20))" $tiny 2>&1 | tee "$out/$2.txt"; }
suite() {  # NAME SECONDS EXPRESSION: run these tests of the suite
  local name=$1 left=$2 tests=$3
  [ "$left" -ge 40 ] || { echo "no time left"; return; }
  timeout -s INT -k 15 $((left - 20)) "$python" -m pytest benchmarks -q -p no:cacheprovider -k "$tests" \
    --device "$device" ${TINY:+--quick} --benchmark-max-time 0.3 --benchmark-json "$out/$name.json" 2>&1 | cut -c1-150 | tail -80
}
say() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }

case $step in
1)
  say "machine"
  nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit --format=csv,noheader || true
  say "every launcher once"
  part 120 smoke
  say "tests that need a GPU"
  # 12 processes, since most of the time goes to compilation. An interrupted pytest still lists
  # failures.
  [ "$device" = cpu ] || timeout -s INT -k 15 430 "$python" -m pytest -q -m gpu -n 12 -p no:cacheprovider \
    tests/kernels tests/ppo/test_trainer.py --durations 8 > "$out/tests.txt" 2>&1
  [ "$device" = cpu ] || grep -E '^(FAILED|ERROR)|passed|failed' "$out/tests.txt" | cut -c1-180 | tail -40
  ;;
2)
  say "row kernels"
  part 100 rows
  say "their program sizes: rows for kernels/fastppo_kernels/triton/programs.py"
  timeout 120 "$python" -m benchmarks.tune --seconds 100 $tiny 2>&1 | tee "$out/programs.txt"
  say "fused head, by chunk size"
  part 100 head
  say "counters of the loss kernel"
  command -v ncu > /dev/null && timeout 60 ncu --clock-control none -k regex:_ppo_loss_kernel -c 1 -s 2 --metrics \
gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,l1tex__t_sector_hit_rate.pct,lts__t_sector_hit_rate.pct,sm__inst_issued.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active \
    "$python" -m benchmarks.on_a_gpu once $tiny 2>&1 | tee "$out/counters.txt" | grep __
  say "rows of the suite, the main ones first"
  suite suite $((585 - SECONDS)) "test_case and not torch.compile and not update"
  ;;
3)
  say "the demo"
  [ "$device" = cpu ] || { timeout 100 "$python" -m fastppo demo --device "$device" --output_dir "$scratch/demo" \
    > "$out/demo.txt" 2>&1; echo "exit $?"; tail -6 "$out/demo.txt" | cut -c1-160; }
  say "a 0.5B trainer"
  part 300 trainer
  say "updates of the suite"
  suite training $((585 - SECONDS)) "test_case and update"
  ;;
*) echo "1, 2 or 3" >&2; exit 2 ;;
esac
say "end"
