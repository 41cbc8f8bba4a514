#!/usr/bin/env bash
# Check a GPU in a few minutes: numbers, speed, memory, and a few updates of the tiny demo.
#
#   launch/gpu_check.sh [flags] [-- arguments for benchmarks/gpu_check.py]
#
# --python=FILE      Python with a JAX of its own (default python3)
# --shapes=real|tiny widths of real models, or toys for the CPU (default: real where a GPU is)
# --layers=N         layers of each model (default 4)
# --budget=SECONDS   for the whole script (default 280)
# --updates=N        updates of the tiny demo (default 3; 0 leaves it out)
# --dry-run          print every command and run none
# --help             this text
#
# Uses no network and installs nothing. Without a GPU it says so and checks toys on the CPU.
# Exit 0: all holds; 1: a check failed; 2: usage, or no usable JAX.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=lib.sh
source "$ROOT/launch/lib.sh"

SWITCHES=""
VALUES="python shapes layers budget updates"
PYTHON=python3 SHAPES="" LAYERS=4 BUDGET=280 UPDATES=3
parse_flags "$@"
[[ $SHAPES =~ ^(|real|tiny)$ ]] || die "--shapes=$SHAPES: choose real or tiny"
need_number --layers "$LAYERS" 1
need_number --budget "$BUDGET" 10
need_number --updates "$UPDATES" 0

cd "$ROOT"
if [[ -z $DRY_RUN ]]; then
    command -v "$PYTHON" >/dev/null || die "--python=$PYTHON: not found"
    "$PYTHON" -c 'import jax, flax, optax, numpy' ||
        die "--python=$PYTHON: it needs jax, flax, optax and numpy; name a Python that has them"
fi
if [[ -n $DRY_RUN ]] || command -v nvidia-smi >/dev/null; then
    run nvidia-smi "--query-gpu=name,driver_version,memory.total,memory.used" \
        "--format=csv,noheader" || note "nvidia-smi failed: the driver does not work here"
fi
if [[ -n $DRY_RUN ]]; then
    SHAPES=${SHAPES:-real}
else
    platform=$("$PYTHON" -c 'import jax; print(jax.default_backend())' | tail -n 1)
    if [[ $platform != gpu ]]; then
        note "NO GPU: JAX sees only '$platform'; what follows says nothing about a GPU. Where there" \
            "is one, check the driver with nvidia-smi and that jax has its CUDA plugin"
        [[ $SHAPES != real ]] || note "--shapes=real on '$platform' takes long; consider tiny"
    fi
    [[ $platform == gpu ]] && SHAPES=${SHAPES:-real} || SHAPES=${SHAPES:-tiny}
fi

failed=0
export TF_CPP_MIN_LOG_LEVEL=2
# Room is left for the demo and for what is in progress when the budget of the checks ends.
run timeout "$BUDGET" "$PYTHON" benchmarks/gpu_check.py "--shapes=$SHAPES" "--layers=$LAYERS" \
    "--budget=$((BUDGET / 2))" "${ARGS[@]}" || failed=1

if ((UPDATES)); then
    left=$((BUDGET - SECONDS))
    folder=$(mktemp -d) # a dry run needs the name too
    trap 'rm -rf "$folder"' EXIT
    demo=("$PYTHON" -m sage_jax.main --config=configs/tiny.py "--workdir=$folder/run"
        "--config.train.steps=$UPDATES" --config.valid.every=0 --config.valid.limit=10
        --config.valid.effects=0)
    if [[ -z $DRY_RUN ]] && ((left < 20)); then
        note "the tiny demo is left out: $left s of --budget=$BUDGET are left"
    elif [[ -z $DRY_RUN ]] && ! missing=$("$PYTHON" -c 'import absl, ml_collections, orbax.checkpoint, transformers, sympy, math_verify' 2>&1); then
        note "the tiny demo is left out: ${missing##*$'\n'}"
    else
        code=0
        run timeout "$left" "${demo[@]}" || code=$?
        # 2: the machine's sandbox or packages do not allow training; that is no fault of the GPU.
        ((code != 2)) || note "the tiny demo could not start here, see above"
        ((code == 0 || code == 2)) || failed=1
    fi
fi
((failed)) || note "done in $SECONDS s"
((!failed)) || note "FAILED, see above"
exit "$failed"
