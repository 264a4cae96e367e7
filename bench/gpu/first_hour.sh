#!/usr/bin/env bash
# Measures this checkout on one GPU, step by step; cut off at any time, the next start goes on. See docs/gpu.md.
#
#   bench/gpu/first_hour.sh [--out DIR] [--dry] [...]    (--help lists all)
#
# OUT     folder for results, where --out is not given; default: out/first-hour
# KIT     folder whose enter.sh puts vLLM on PYTHONPATH; default: .gpukit, if it is there. Then this project is built
#         and installed beside it; without a kit, the environment's own installation is measured.
# PYTHON  default: .venv/bin/python if it is there, else python3
set -euo pipefail
export SPECROLLOUT_BEGAN=${SPECROLLOUT_BEGAN:-$(date +%s)} PYTHONUNBUFFERED=1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
kit=${KIT:-$root/.gpukit}
if [ -e "$kit/enter.sh" ]; then
  echo "kit: $kit"
  # shellcheck disable=SC1091
  source "$kit/enter.sh"
  # it prints the folder that this project is installed in, whose name begins with the code's digest
  site=$("$python" "$root/bench/gpu/source.py" --root "$root" "$@")
  digest=${site##*/}
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} SPECROLLOUT_SOURCE=${digest%%-*}
fi
case " $* " in *" --help "* | *" --out "* | *" --out="*) out=() ;; *) out=(--out "${OUT:-$root/out/first-hour}") ;; esac
# not from the folder this is started in: what is measured is what is installed
export PYTHONSAFEPATH=1
exec "$python" -c "from vllm_specrollout.cli import main; main()" bench gpu "${out[@]}" "$@"
