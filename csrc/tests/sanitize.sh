#!/usr/bin/env bash
# The C++ core under AddressSanitizer and UndefinedBehaviorSanitizer: random operations for so many seconds, shared out
# over the cores; what they should yield, tests/csrc says. `make sanitize` runs it, and so does CI. Rounds differ from run
# to run unless SEED is set; a round that fails says how to repeat it.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-60}
out=${SANITIZED:-build/sanitized}
flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
  -D_GLIBCXX_ASSERTIONS -Wall -Wextra -Icsrc)

compiler=""
for one in ${CXX:-} g++ clang++ c++; do
  probe=$(mktemp)
  if echo 'int main() { return 0; }' | "$one" "${flags[@]}" -x c++ - -o "$probe" 2>/dev/null && "$probe" 2>/dev/null; then
    compiler=$one
  fi
  rm -f "$probe"
  [ -z "$compiler" ] || break
done
if [ -z "$compiler" ]; then
  echo "sanitize: skipped: no C++ compiler here builds programs with -fsanitize=address,undefined that run"
  exit 0
fi

mkdir -p "$out"
cores=$(nproc)
printf '%s\n' csrc/core/*.cc csrc/tests/*.cc | xargs -P "$cores" -I{} sh -c '
  source=$1; out=$2; shift 2
  object="$out/$(basename "${source%.cc}").o"
  [ "$object" -nt "$source" ] && [ -z "$(find csrc -name "*.h" -newer "$object")" ] || "$@" -c "$source" -o "$object"
' sh {} "$out" "$compiler" "${flags[@]}"

objects=()
for source in csrc/core/*.cc csrc/tests/*.cc; do objects+=("$out/$(basename "${source%.cc}").o"); done
"$compiler" "${flags[@]}" "${objects[@]}" -o "$out/fuzz_core"

seed=${SEED:-$(date +%s)}
pids=()
for ((i = 0; i < cores; ++i)); do
  "$out/fuzz_core" $(((seconds + cores - 1) / cores)) $((seed * 1000000 + i * 100000000000000)) &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
