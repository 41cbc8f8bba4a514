#!/usr/bin/env bash
# What launch/tpu_pod.sh runs on each host of a slice: install, start or rejoin, stream the log.
#
#   launch/tpu_worker.sh [flags] -- --config=configs/tiny.py [arguments of sage_jax.main]
#
# --python=VERSION  Python of the environment; uv fetches it, as images have older ones (default 3.11)
# --extra=NAME      extra of the project to install (default tpu)
# --tag=TEXT        name of the run here (default main)
# --rejoin          stream the run of this tag, going on or ended, and start nothing
# --dry-run         print every command and run none
# --help            this text
#
# The run lives on when the connection is lost. State is in .launch/ of the project: log, pid, and
# once it has ended its exit code in rc, each beside the tag.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=lib.sh
source "$ROOT/launch/lib.sh"

SWITCHES="rejoin"
VALUES="python extra tag"
PYTHON=3.11 EXTRA=tpu TAG=main REJOIN=""
parse_flags "$@"
[[ $TAG =~ ^[A-Za-z0-9._-]+$ ]] || die "--tag=$TAG: use letters, digits, '.', '_' and '-'"
need_args

cd "$ROOT"
state=.launch/$TAG
python=.venv/bin/python
run mkdir -p .launch
if [[ -n $REJOIN ]]; then
    [[ -n $DRY_RUN || -f $state.pid ]] || die "--tag=$TAG: no such run here; leave --rejoin out"
    note "rejoined $TAG"
else
    for other in .launch/*.pid; do
        [[ -f $other && ! -f ${other%.pid}.rc ]] || continue
        ! kill -0 "$(<"$other")" 2>/dev/null ||
            die "--tag=$TAG: the run $(basename "$other" .pid) is still going here; end it with 'kill $(<"$other")'"
    done
    run rm -f "$state.rc" "$state.pid"
    if [[ ! -x $python ]]; then
        run python3 -m pip install --quiet --user uv
        run python3 -m uv venv --quiet --seed "--python=$PYTHON" .venv
    fi
    install_project .venv "" "$EXTRA"
    # In a session of its own, which outlives the connection. The code is written under another name
    # first: a reader never sees half of it.
    # shellcheck disable=SC2016 # expanded by the inner shell
    inner='stopped="" child=""
trap "if [[ -n \$child ]]; then kill -TERM \$child; else stopped=1; fi" TERM
"${@:2}" & child=$!
[[ -z $stopped ]] || kill -TERM "$child"
while wait "$child"; kill -0 "$child" 2>/dev/null; do :; done # a signal ends a wait early
code=0; wait "$child" || code=$?
echo "$code" >"$1.part"
mv "$1.part" "$1.rc"'
    start=(setsid bash -c "$inner" start "$state" "$python" -u -m sage_jax.main "${ARGS[@]}")
    printf '+ nohup %s > %q 2>&1 &\n' "$(quoted "${start[@]}")" "$state.log" >&2
    if [[ -z $DRY_RUN ]]; then
        : >"$state.log"
        nohup "${start[@]}" >"$state.log" 2>&1 </dev/null &
        echo "$!" >"$state.pid"
    fi
fi
if [[ -n $DRY_RUN ]]; then
    run tail -n +1 --pid=PID -F "$state.log"
    exit 0
fi
# Its own exit code tells of the log file, not of the run.
tail -n +1 --pid="$(<"$state.pid")" -F "$state.log" 2>/dev/null || true
[[ -f $state.rc ]] || die "$TAG ended without an exit code: it was killed, see $ROOT/$state.log"
exit "$(<"$state.rc")"
