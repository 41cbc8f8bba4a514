#!/usr/bin/env bash
# Run on a Cloud TPU slice: create or reuse it, install, start, stream the log, copy results.
#
#   launch/tpu_pod.sh --name=NAME --zone=ZONE [flags] -- --config=configs/qwen4b.py [...]
#
# --name=NAME          the slice (required)
# --zone=ZONE          its zone (required)
# --project=ID         Google Cloud project (default: that of gcloud)
# --type=TYPE          accelerator type of a new slice (default v5litepod-8)
# --version=IMAGE      runtime image of a new slice (default v2-alpha-tpuv5-lite)
# --queued             ask for a queued resource, which waits for capacity
# --spot               cheaper, and may be taken away at any time
# --bucket=gs://B/P    keep copies of the run there; default: on this machine, in --results
# --nfs=HOST:/EXPORT   mount this at runs/ on every host: needed where a slice has several hosts
# --results=DIR        where results come to on this machine (default runs/NAME)
# --sync=SECONDS       how often a copy is taken while the run goes on (default 600)
# --poll=SECONDS       how often a slice in the making is looked at (default 30)
# --wait=SECONDS       how long to wait for it (default 86400)
# --max-restarts=N     new starts after preemptions and lost connections (default 10)
# --delete             delete the slice at the end, whatever the end was
# --dry-run            print every command and run none
# --help               this text
#
# A slice that is there is used as it is. Without --delete it stays and COSTS MONEY until deleted.
# When this script is stopped, the run on the slice goes on: the same command rejoins it.
# After a preemption the slice is made anew and the run continues from the last copy.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=lib.sh
source "$ROOT/launch/lib.sh"

SWITCHES="queued spot delete"
VALUES="name zone project type version bucket nfs results sync poll wait max-restarts"
NAME="" ZONE="" PROJECT="" TYPE=v5litepod-8 VERSION=v2-alpha-tpuv5-lite BUCKET="" NFS="" RESULTS=""
SYNC=600 POLL=30 WAIT=86400 MAX_RESTARTS=10 QUEUED="" SPOT="" DELETE=""
REMOTE=sage_jax # below the home of the user there
parse_flags "$@"
[[ $NAME =~ ^[a-z][a-z0-9-]*$ ]] ||
    die "--name=$NAME: required; a lower-case letter, then letters, digits and '-'"
[[ -n $ZONE ]] || die "--zone is required, such as --zone=us-west4-a"
[[ -z $BUCKET || $BUCKET == gs://?* ]] || die "--bucket=$BUCKET: give gs://BUCKET/PATH"
need_number --sync "$SYNC" 1
need_number --poll "$POLL" 0
need_number --wait "$WAIT" 1
need_number --max-restarts "$MAX_RESTARTS" 0
need_args
set_workdir "runs/$NAME"
[[ $WORKDIR =~ ^[A-Za-z0-9._-][A-Za-z0-9._/-]*$ ]] ||
    die "--workdir=$WORKDIR: give a path below the project, of letters, digits and '._-/'"
[[ -z $NFS || $NFS =~ ^[A-Za-z0-9.-]+:/[A-Za-z0-9._/-]*$ ]] || die "--nfs=$NFS: give HOST:/EXPORT"
[[ -z $NFS || $WORKDIR == runs/* ]] ||
    die "--workdir=$WORKDIR: give a folder below runs, which all hosts share through --nfs"
RESULTS=${RESULTS:-runs/$NAME}
[[ -n $DRY_RUN ]] || command -v gcloud >/dev/null ||
    die "gcloud: not found; install the Google Cloud CLI and run 'gcloud auth login'"

where=("--zone=$ZONE")
[[ -z $PROJECT ]] || where+=("--project=$PROJECT")
vm=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)
scratch=$(mktemp -d)
sync_pid="" made_or_found="" created=""

stop_sync() {
    [[ -n $sync_pid ]] || return 0
    kill -- "-$sync_pid" 2>/dev/null || true
    wait "$sync_pid" 2>/dev/null || true
    sync_pid=""
}

# Runs however the script ends: nobody should pay for a slice they have forgotten.
# shellcheck disable=SC2329 # by the trap
on_exit() {
    stop_sync
    rm -rf "$scratch"
    if [[ -z $DRY_RUN && -n $made_or_found ]]; then
        note "the slice $NAME is still there and costs money until you delete it:"
        note "  $(quoted "${delete[@]}")"
    fi
}
trap on_exit EXIT
trap 'note "stopped; what runs on $NAME goes on, and the same command rejoins it"; exit 130' INT TERM

delete=("${vm[@]}" delete "$NAME" "${where[@]}" --quiet)
[[ -z $QUEUED ]] || delete=("${queue[@]}" delete "$NAME" "${where[@]}" --force --quiet)

delete_slice() {
    run "${delete[@]}" || die "could not delete $NAME: look at it in the console, it may still cost money"
    made_or_found=""
}

# describe FIELD COMMAND...: the field, ABSENT when there is no such slice. Stops on other errors.
describe() {
    local field=$1 command out
    shift
    command=("$@" describe "$NAME" "${where[@]}" "--format=value($field)")
    if out=$("${command[@]}" 2>"$scratch/error"); then
        printf '%s' "$out"
    elif grep -qi 'not[_ ]found' "$scratch/error"; then
        printf 'ABSENT'
    else
        die "$(quoted "${command[@]}") failed: $(tail -n 1 "$scratch/error")"
    fi
}

slice_state() {
    local state
    if [[ -n $QUEUED ]]; then
        state=$(describe state.state "${queue[@]}")
        if [[ $state != ACTIVE ]]; then
            printf '%s' "$state"
            return
        fi
    fi
    state=$(describe state "${vm[@]}")
    # The request is active a while longer than a slice that was taken away.
    [[ -z $QUEUED || $state != ABSENT ]] || state=SUSPENDED
    printf '%s' "$state"
}

create_slice() {
    local command
    if [[ -n $QUEUED ]]; then
        command=("${queue[@]}" create "$NAME" "--node-id=$NAME" "--runtime-version=$VERSION")
    else
        command=("${vm[@]}" create "$NAME" "--version=$VERSION")
    fi
    command+=("${where[@]}" "--accelerator-type=$TYPE")
    [[ -z $SPOT ]] || command+=(--spot)
    made_or_found=1
    created=1
    if ! run "${command[@]}"; then
        made_or_found=""
        die "could not create $NAME (--type=$TYPE --zone=$ZONE): see gcloud's message above; try" \
            "another zone, a smaller type, --queued to wait for capacity, or ask for quota"
    fi
}

# Until the slice can be used; makes it where it is absent or gone.
ensure_slice() {
    local state waited=0 told="" type
    while :; do
        state=$(slice_state)
        [[ $state == ABSENT ]] || made_or_found=1
        [[ $state == "$told" ]] || note "$NAME is $state"
        told=$state
        case $state in
        READY) break ;;
        ABSENT) create_slice ;;
        PREEMPTED | TERMINATED | SUSPENDED | FAILED)
            # Made by this call and failed at once: another try would fail the same way.
            [[ $state != FAILED || -z $created ]] ||
                die "$NAME is FAILED: the request cannot be met; try another zone or type"
            delete_slice
            create_slice
            ;;
        STOPPED) run "${vm[@]}" start "$NAME" "${where[@]}" ;;
        esac
        ((waited < WAIT)) || die "--wait=$WAIT: $NAME is still $state; wait longer, or try --spot"
        sleep "$POLL"
        waited=$((waited + (POLL > 0 ? POLL : 1)))
    done
    type=$(describe acceleratorType "${vm[@]}")
    [[ $type == "$TYPE" || -z $type ]] ||
        die "--type=$TYPE: the slice $NAME is there and is $type; give that type or another --name"
}

on_workers() { run "${vm[@]}" ssh "$NAME" "${where[@]}" "--worker=$1" "--command=$2"; }

install() {
    local archive=$scratch/project.tgz
    run tar -czf "$archive" -C "$ROOT" --exclude=.git --exclude=.venv --exclude=./runs \
        --exclude=.jax_cache --exclude=.launch --exclude=__pycache__ . &&
        run "${vm[@]}" scp "$archive" "$NAME:sage_jax.tgz" "${where[@]}" --worker=all &&
        on_workers all "mkdir -p $REMOTE/runs && tar -xzf sage_jax.tgz -C $REMOTE"
    [[ -z $NFS ]] ||
        on_workers all "mountpoint -q $REMOTE/runs || { { command -v mount.nfs || sudo apt-get install --yes nfs-common; } && sudo mount -t nfs $NFS $REMOTE/runs && sudo chmod 1777 $REMOTE/runs; }"
}

# A copy counts only once it is whole: the former one stays until then.
save_results() {
    local bucket
    if [[ -n $BUCKET ]]; then
        bucket=$(quoted "$BUCKET")
        on_workers 0 "side=\$((1 - \$(gcloud storage cat $bucket/latest 2>/dev/null || echo 1))) && gcloud storage rsync --recursive --delete-unmatched-destination-objects $REMOTE/$WORKDIR $bucket/copy\$side && echo \$side | gcloud storage cp - $bucket/latest"
    else
        run mkdir -p "$(dirname "$RESULTS")"
        run rm -rf "$RESULTS.new"
        run "${vm[@]}" scp --recurse "$NAME:$REMOTE/$WORKDIR" "$RESULTS.new" "${where[@]}" \
            --worker=0 &&
            run rm -rf "$RESULTS.old" &&
            { [[ ! -d $RESULTS ]] || run mv "$RESULTS" "$RESULTS.old"; } &&
            run mv "$RESULTS.new" "$RESULTS" && run rm -rf "$RESULTS.old"
    fi
}

# Puts the last copy onto a new slice, so that the run continues; nothing where there is none, or
# where the slice has the run's folder itself. One host writes a folder that all share.
restore_results() {
    local to=all
    [[ -z $NFS ]] || to=0
    if [[ -n $BUCKET ]]; then
        on_workers "$to" "if [ ! -d $REMOTE/$WORKDIR ] && side=\$(gcloud storage cat $(quoted "$BUCKET/latest") 2>/dev/null); then mkdir -p $REMOTE/$WORKDIR && gcloud storage rsync --recursive $(quoted "$BUCKET/copy")\$side $REMOTE/$WORKDIR; fi"
    elif [[ -d $RESULTS/checkpoints || -n $DRY_RUN ]]; then
        run tar -czf "$scratch/results.tgz" -C "$RESULTS" . &&
            run "${vm[@]}" scp "$scratch/results.tgz" "$NAME:results.tgz" "${where[@]}" \
                "--worker=$to" &&
            on_workers "$to" "[ -d $REMOTE/$WORKDIR ] || { mkdir -p $REMOTE/$WORKDIR && tar -xzf results.tgz -C $REMOTE/$WORKDIR; }"
    fi
}

tag=$(printf '%s\0' "${ARGS[@]}" | cksum | cut -d ' ' -f 1)
worker="$REMOTE/launch/tpu_worker.sh --tag=$tag" train=$(quoted "${ARGS[@]}")

# What became of a run of these arguments on the slice: its exit code, RUNNING, KILLED, or NONE
# when it has not been started; UNKNOWN when the slice does not answer.
run_state() {
    local s=$REMOTE/.launch/$tag
    "${vm[@]}" ssh "$NAME" "${where[@]}" --worker=0 "--command=if [ -f $s.rc ]; then cat $s.rc; elif [ ! -f $s.pid ]; then echo NONE; elif kill -0 \$(cat $s.pid); then echo RUNNING; else echo KILLED; fi" \
        2>/dev/null || echo UNKNOWN
}

# A slice is READY a little before it takes connections.
retry() {
    local try
    for try in 1 2 3 4 5; do
        ! "$@" || return 0
        ((try == 5)) || { note "$1 failed (try $try of 5)" && sleep "$POLL"; }
    done
    return 1
}

if [[ -n $DRY_RUN ]]; then
    note "dry run, as if the slice were not there"
    slice_state() { run "${vm[@]}" describe "$NAME" "${where[@]}" '--format=value(state)'; }
    [[ -z $QUEUED ]] || slice_state() { run "${queue[@]}" describe "$NAME" "${where[@]}" '--format=value(state.state)'; }
    slice_state
    create_slice
    install
    note "from the last copy, if there is one:"
    restore_results
    on_workers all "$worker -- $train"
    note "every $SYNC s while it runs, and at its end:"
    save_results
    note "after a preemption, at most $MAX_RESTARTS times, then all from the start:"
    run "${delete[@]}"
    [[ -z $DELETE ]] || { note "at the end:" && run "${delete[@]}"; }
    exit 0
fi

sync_loop() {
    while sleep "$SYNC"; do
        save_results >"$scratch/sync" 2>&1 || note "a copy failed, the next follows in $SYNC s"
    done
}

restarts=0
while :; do
    ensure_slice
    start="$worker --rejoin -- $train"
    if [[ $(run_state) != RUNNING ]]; then
        start="$worker -- $train"
        retry install || die "could not copy the project to $NAME, see gcloud's message above"
        retry restore_results || die "could not copy the run to $NAME, see gcloud's message above"
    fi
    # A process group of its own, so that a copy in progress ends with it.
    set -m
    sync_loop </dev/null &
    sync_pid=$!
    set +m
    on_workers all "$start" || true
    stop_sync
    # gcloud's exit code does not tell a lost connection from a failed run: look at both ends.
    state=$(slice_state)
    code=UNKNOWN
    [[ $state != READY ]] || code=$(run_state)
    case $code in
    # The run has saved on SIGTERM, as when the slice is about to be taken away.
    143) save_results || note "no copy could be taken" ;;
    RUNNING | UNKNOWN) ;;
    NONE)
        note "the run was not started on $NAME: see the messages above"
        code=2
        break
        ;;
    KILLED)
        note "the run was killed on $NAME without an exit code, perhaps for want of memory"
        code=137
        break
        ;;
    *)
        save_results ||
            note "the results could not be copied; they are in $REMOTE/$WORKDIR on $NAME"
        break
        ;;
    esac
    if ((restarts >= MAX_RESTARTS)); then
        note "--max-restarts=$MAX_RESTARTS is reached; the same command continues the run"
        [[ $code == 143 ]] || code=1
        break
    fi
    restarts=$((restarts + 1))
    note "$NAME is $state, the run is $code: start $restarts of at most $MAX_RESTARTS"
    sleep "$POLL"
done

if [[ $code == 0 ]]; then
    note "finished; results in ${BUCKET:-$RESULTS}"
else
    note "ended with exit code $code; the last copy is in ${BUCKET:-$RESULTS}"
fi
[[ -z $DELETE ]] || delete_slice
exit "$code"
