#!/usr/bin/env bash
# Run on all CUDA GPUs of this machine, in one process; on several machines, in one on each.
#
#   launch/gpu_node.sh [flags] -- --config=configs/qwen4b.py [arguments of sage_jax.main]
#
# --gpus=N           how many GPUs there must be (default 0: any number)
# --cuda=12|13|auto  CUDA of the installed JAX (default auto: from the driver and the GPUs)
# --venv=DIR         environment to make or use (default .venv in the project)
# --python=FILE      Python that makes it (default python3)
# --skip-install     use the environment as it is
# --check-only       install and check, start nothing
# --dry-run          print every command and run none
# --help             this text
#
# CUDA_VISIBLE_DEVICES chooses among the GPUs, as everywhere. Several machines form one run where
# each has COORDINATOR_ADDRESS (host:port of process 0), NUM_PROCESSES and its own PROCESS_ID set.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=lib.sh
source "$ROOT/launch/lib.sh"

SWITCHES="skip-install check-only"
VALUES="gpus cuda venv python"
GPUS=0 CUDA=auto VENV="$ROOT/.venv" PYTHON=python3 SKIP_INSTALL="" CHECK_ONLY=""
parse_flags "$@"
need_number --gpus "$GPUS" 0
[[ $CUDA =~ ^(auto|12|13)$ ]] || die "--cuda=$CUDA: choose 12, 13 or auto"
[[ -n $CHECK_ONLY ]] || need_args

# One line a GPU: driver version, compute capability, name.
query=(nvidia-smi "--query-gpu=driver_version,compute_cap,name" "--format=csv,noheader")
printf '+ %s\n' "$(quoted "${query[@]}")" >&2
if [[ -n $DRY_RUN ]]; then
    listing="580.00, 9.0, (a dry run asks no GPU)"
elif ! command -v nvidia-smi >/dev/null; then
    die "nvidia-smi: not found; install the NVIDIA driver, or use launch/local_cpu.sh"
elif ! listing=$("${query[@]}" 2>&1); then
    die "nvidia-smi failed: ${listing%%$'\n'*}; the driver does not work on this machine"
fi
driver=${listing%%.*}
[[ $driver =~ ^[0-9]+$ ]] || die "nvidia-smi: no driver version in '${listing%%$'\n'*}'"
oldest=$(printf '%s\n' "$listing" | sed 's/^[^,]*, *//; s/,.*//' | sort -V | head -n 1)

# What the two builds of JAX ask for: driver 525 and compute capability 5.2, or 580 and 7.5.
newest=$(printf '7.5\n%s\n' "$oldest" | sort -V | head -n 1)
if [[ $CUDA == auto ]]; then
    CUDA=12
    ((driver < 580)) || [[ $newest != 7.5 ]] || CUDA=13
fi
((CUDA != 13 || driver >= 580)) ||
    die "--cuda=13: driver $driver is too old, 580 is needed; update it or use --cuda=12"
((CUDA != 13)) || [[ $newest == 7.5 ]] ||
    die "--cuda=13: a GPU of compute capability $oldest; 7.5 is needed, use --cuda=12"
((driver >= 525)) || die "driver $driver is too old for JAX: 525 is needed, update the driver"
note "driver $driver, oldest compute capability $oldest: jax[cuda$CUDA]"

cd "$ROOT"
[[ -n $SKIP_INSTALL ]] || install_project "$VENV" "$PYTHON" "cuda$CUDA"
# A broken plugin leaves JAX on the CPU with no more than a warning.
check='
import sys, jax
want, found = int(sys.argv[1]), jax.devices()
print("JAX", jax.__version__, "sees", len(found), found[0].device_kind)
if found[0].platform != "gpu":
    sys.exit("JAX sees no GPU: reinstall the CUDA extra, and look at JAX_PLATFORMS")
if want and len(found) != want:
    sys.exit(f"--gpus={want}: JAX sees {len(found)}; look at CUDA_VISIBLE_DEVICES")
'
run env XLA_PYTHON_CLIENT_PREALLOCATE=false "$VENV/bin/python" -c "$check" "$GPUS" ||
    die "the check of the GPUs failed, see above"
[[ -z $CHECK_ONLY ]] || exit 0
main=("$VENV/bin/python" -m sage_jax.main "${ARGS[@]}")
printf '+ %s\n' "$(quoted "${main[@]}")" >&2
[[ -z $DRY_RUN ]] || exit 0
# In place of the shell, so that SIGTERM reaches the run, which saves.
exec "${main[@]}"
