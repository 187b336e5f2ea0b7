#!/usr/bin/env bash
# One GRPO update of a 1.5B model on one GPU: model-FLOPs utilisation, memory, decoding. Takes less than five minutes.
# With mesh as its first word: updates of 1.5B and 8B models with answers of 1k and 32k tokens on all GPUs of the machine,
# as shards, and as tensor x context. Needs 36 GB of disk in $TMPDIR.
# Says so, and ends with 0, where there is no CUDA device. --tiny --device cpu tries its way without one (mesh --ranks 4).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
if ! "$python" -c 'import torch, transformers' 2>/dev/null; then
    echo "$python has no torch or no transformers: make venv, or PYTHON=/path/to/python $0" >&2
    exit 2
fi
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
module=bench_gpu
if [ "${1:-}" = mesh ]; then
    module=bench_gpu_mesh
    shift
fi
exec "$python" -m agentrl.bench.$module "$@"
