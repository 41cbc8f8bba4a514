#!/usr/bin/env bash
# Run on the CPU of this machine.
#
#   launch/local_cpu.sh [flags] -- --config=configs/tiny.py [arguments of sage_jax.main]
#
# --devices=N        fake devices each process shows, to try a mesh (default 1)
# --processes=N      processes that form one run through jax.distributed (default 1)
# --port=N           port of their coordinator (default 12355)
# --logs=DIR         where several processes write local-N.log (default runs in the project)
# --venv=DIR         environment to make or use (default .venv in the project)
# --python=FILE      Python that makes it (default python3)
# --skip-install     use the environment as it is
# --dry-run          print every command and run none
# --help             this text
#
# When one of several processes fails, the others are stopped.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=lib.sh
source "$ROOT/launch/lib.sh"

SWITCHES="skip-install"
VALUES="devices processes port logs venv python"
DEVICES=1 PROCESSES=1 PORT=12355 LOGS=runs VENV="$ROOT/.venv" PYTHON=python3 SKIP_INSTALL=""
parse_flags "$@"
need_number --devices "$DEVICES" 1
need_number --processes "$PROCESSES" 1
need_number --port "$PORT" 1024
need_args

cd "$ROOT"
[[ -n $SKIP_INSTALL ]] || install_project "$VENV" "$PYTHON" ""
flags="${XLA_FLAGS:-}"
((DEVICES == 1)) || flags="$flags --xla_force_host_platform_device_count=$DEVICES"
command=(env JAX_PLATFORMS=cpu "XLA_FLAGS=${flags# }")
main=("$VENV/bin/python" -m sage_jax.main "${ARGS[@]}")

if ((PROCESSES == 1)); then
    printf '+ %s\n' "$(quoted "${command[@]}" "${main[@]}")" >&2
    [[ -z $DRY_RUN ]] || exit 0
    exec "${command[@]}" "${main[@]}"
fi

# Each line is one process, so that a dry run shows what would be started side by side.
pids=()
stopped=""
stop_all() {
    stopped=1
    ((${#pids[@]} == 0)) || kill -TERM "${pids[@]}" 2>/dev/null || true
}
trap stop_all TERM INT
command+=(JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo "COORDINATOR_ADDRESS=127.0.0.1:$PORT"
    "NUM_PROCESSES=$PROCESSES")
run mkdir -p "$LOGS"
for ((i = 0; i < PROCESSES; i++)); do
    one=("${command[@]}" "PROCESS_ID=$i" "${main[@]}")
    printf '+ %s > %q 2>&1 &\n' "$(quoted "${one[@]}")" "$LOGS/local-$i.log" >&2
    [[ -z $DRY_RUN ]] || continue
    : >"$LOGS/local-$i.log" # a process stopped at once never opens it
    "${one[@]}" >"$LOGS/local-$i.log" 2>&1 &
    pids+=("$!")
done
[[ -z $stopped ]] || stop_all # a signal during the start
worst=0
for _ in "${pids[@]}"; do
    code=0
    wait -n || code=$?
    ((code == 0 || worst)) || { worst=$code && stop_all; }
done
wait # a signal ends one of the waits above early
if ((worst)); then
    for ((i = 0; i < PROCESSES; i++)); do
        tail -n 3 "$LOGS/local-$i.log" >&2
    done
fi
exit "$worst"
