"""launch/tpu_pod.sh against a gcloud that plays the cloud."""

import os
import re
import shutil
import signal
import subprocess

import pytest
from stand_ins import LAUNCH, TRAIN, calls, shell, stand_in

GCLOUD = r"""
cloud=${0%/*}/cloud vm=${0%/*}/vm
state=$(cat "$cloud/state" 2>/dev/null || echo ABSENT)
command="" verb=$4 format=""
[[ $3 != queued-resources || $verb != describe ]] || format=queue
for word in "$@"; do
    [[ $word != --command=* ]] || command=${word#*=}
    [[ $word != --format=* ]] || format=${word#*=}
done
case $verb in
describe)
    if [[ $state == ABSENT ]]; then echo "ERROR: NOT_FOUND: no such node" >&2; exit 1; fi
    [[ ! -f $cloud/denied ]] || { echo "ERROR: PERMISSION_DENIED" >&2; exit 1; }
    case $format in
    *acceleratorType*) echo v5litepod-8 ;;
    *state.state*) if [[ $state == READY ]]; then echo ACTIVE; else echo "$state"; fi ;;
    *) echo "$state" ;;
    esac
    [[ $state != CREATING ]] || echo READY >"$cloud/state"
    ;;
create)
    [[ ! -f $cloud/full ]] || { echo "ERROR: no more capacity in the zone" >&2; exit 1; }
    echo CREATING >"$cloud/state"
    mkdir -p "$vm"
    ;;
delete) echo ABSENT >"$cloud/state"; rm -rf "$vm" ;;
scp)
    [[ $state == READY ]] || exit 1
    files=() recurse=""
    for word in "${@:5}"; do
        case $word in
        --recurse) recurse=-r ;;
        --*) ;;
        *) files+=("$word") ;;
        esac
    done
    cp $recurse "${files[0]/#demo:/$vm/}" "${files[1]/#demo:/$vm/}"
    ;;
ssh)
    [[ $state == READY ]] || exit 255
    cd "$vm" || exit 255
    rm -f "$cloud/drop"
    set -m
    HOME=$vm bash -c "$command" &
    child=$! code=0
    while kill -0 "$child" 2>/dev/null; do
        [[ ! -f $cloud/drop ]] || { kill -- "-$child"; exit 255; }
        sleep 0.02
    done
    wait "$child" || code=$?
    if [[ $(cat "$cloud/state") == PREEMPTED ]]; then rm -rf "$vm"; exit 255; fi
    exit "$code"
    ;;
esac
"""
# Also the Python of the environment that it makes. A run takes the next line of the plan.
PYTHON = r"""
bin=BIN cloud=BIN/cloud
case "$*" in
*"uv venv"*) mkdir -p .venv/bin; cp "$bin/python3" .venv/bin/python ;;
*sage_jax.main*)
    all="$*"
    workdir=${all##*--workdir=}
    mkdir -p "$workdir/checkpoints"
    echo update >>"$workdir/checkpoints/steps"
    read -r plan <"$cloud/plan"
    sed -i 1d "$cloud/plan"
    echo "the log says $plan"
    case $plan in
    preempt)
        while [[ ! -d $cloud/results/checkpoints ]]; do sleep 0.02; done
        echo PREEMPTED >"$cloud/state"
        exit 143
        ;;
    lost)
        touch "$cloud/drop"
        until grep -q -e ' --rejoin' "$bin/calls"; do sleep 0.02; done
        echo "still here"
        ;;
    *) exit "$plan" ;;
    esac
    ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
    """A cloud with one possible slice, `demo`: its state is in files, its disk a folder."""
    folder = tmp_path / "bin"
    (folder / "cloud").mkdir(parents=True)
    # A project as small as can be, which is copied to the slice at each start.
    shutil.copytree(LAUNCH, tmp_path / "project" / "launch")
    stand_in(folder, "gcloud", GCLOUD)
    stand_in(folder, "python3", PYTHON.replace("BIN", str(folder)))
    return folder


def pod(cloud, *flags, plan=("0",), train=TRAIN):
    (cloud / "cloud" / "plan").write_text("".join(f"{line}\n" for line in plan))
    results = cloud / "cloud" / "results"
    flags = ("--name=demo", "--zone=z", "--poll=0", f"--results={results}", *flags)
    launch = cloud.parent / "project" / "launch"
    code, text = shell("tpu_pod.sh", *flags, *train, path=cloud, launch=launch)
    return code, text, results


def verbs(cloud):
    """What was done to the slice, in order, without the looks at it."""
    done = [line.split()[4] for line in calls(cloud) if line.startswith("gcloud ")]
    return [verb for verb in done if verb in ("create", "delete", "start")]


def test_pod_makes_an_absent_slice_runs_brings_results_and_says_what_it_costs(cloud):
    code, text, results = pod(cloud)
    assert code == 0, text
    assert verbs(cloud) == ["create"]
    assert "the log says 0" in text
    assert (results / "checkpoints" / "steps").read_text() == "update\n"
    assert "costs money" in text and "gcloud compute tpus tpu-vm delete demo --zone=z" in text
    [run] = [line for line in calls(cloud) if "sage_jax.main" in line and "gcloud" not in line]
    assert "--config.model.path=a b --workdir=runs/demo" in run


def test_pod_reuses_a_slice_and_deletes_it_only_when_asked(cloud):
    pod(cloud)
    code, text, _ = pod(cloud, "--delete")
    assert code == 0, text
    assert verbs(cloud) == ["create", "delete"]
    assert "costs money" not in text


def test_pod_continues_from_the_last_copy_on_a_new_slice_after_a_preemption(cloud):
    code, text, results = pod(cloud, "--sync=1", "--spot", plan=("preempt", "0"))
    assert code == 0, text
    assert verbs(cloud) == ["create", "delete", "create"]
    assert (results / "checkpoints" / "steps").read_text() == "update\nupdate\n"
    assert "start 1 of at most 10" in text


def test_pod_gives_up_after_max_restarts(cloud):
    code, text, _ = pod(cloud, "--sync=1", "--max-restarts=0", plan=("preempt", "0"))
    assert code == 1, text
    assert "--max-restarts=0 is reached" in text
    assert verbs(cloud) == ["create"]


def test_pod_rejoins_a_run_that_outlived_the_connection(cloud):
    code, text, results = pod(cloud, plan=("lost",))
    assert code == 0, text
    assert "rejoined" in text and "still here" in text
    runs = [line for line in calls(cloud) if "sage_jax.main" in line and "gcloud" not in line]
    assert len(runs) == 1
    assert (results / "checkpoints" / "steps").read_text() == "update\n"


def test_pod_passes_on_the_exit_code_of_a_failed_run_and_does_not_repeat_it(cloud):
    code, text, _ = pod(cloud, plan=("2", "0"))
    assert code == 2, text
    assert (cloud / "cloud" / "plan").read_text() == "0\n"


def test_pod_says_what_to_do_when_the_slice_cannot_be_made(cloud):
    (cloud / "cloud" / "full").touch()
    code, text, _ = pod(cloud)
    assert code == 2
    assert "no more capacity" in text and "--zone=z" in text and "--queued" in text
    assert "costs money" not in text


def test_pod_does_not_take_a_refused_look_for_an_absent_slice(cloud):
    (cloud / "cloud" / "state").write_text("READY")
    (cloud / "cloud" / "denied").touch()
    code, text, _ = pod(cloud)
    assert code == 2
    assert "PERMISSION_DENIED" in text
    assert verbs(cloud) == []


def test_pod_refuses_a_slice_of_another_type(cloud):
    code, text, _ = pod(cloud, "--type=v4-8")
    assert code == 2
    assert "--type=v4-8" in text and "v5litepod-8" in text


def test_pod_takes_queued_resources_through_their_own_commands(cloud):
    code, text, _ = pod(cloud, "--queued", "--delete")
    assert code == 0, text
    made = [line for line in calls(cloud) if re.search("queued-resources (create|delete)", line)]
    assert len(made) == 2
    assert "--node-id=demo" in made[0] and "--force" in made[1]


def test_hosts_of_a_slice_share_one_folder_which_one_of_them_fills():
    flags = ("--name=demo", "--zone=z", "--nfs=10.0.0.2:/vol", "--dry-run")
    code, text = shell("tpu_pod.sh", *flags, *TRAIN)
    assert code == 0, text
    [mount] = [line for line in text.splitlines() if "mount -t nfs 10.0.0.2:/vol" in line]
    assert "--worker=all" in mount and "sage_jax/runs" in mount
    filled = [line for line in text.splitlines() if "results.tgz" in line and "gcloud" in line]
    assert len(filled) == 2 and all("--worker=0" in line for line in filled)
    for wrong in ("--nfs=vol", "--nfs=10.0.0.2:/a;b"):
        code, text = shell("tpu_pod.sh", *flags[:2], wrong, *TRAIN)
        assert code == 2 and wrong in text and "HOST:/EXPORT" in text
    code, text = shell("tpu_pod.sh", *flags, *TRAIN, "--workdir=mine")
    assert code == 2 and "--workdir=mine" in text and "below runs" in text


@pytest.mark.parametrize("code", [0, 2, 143])
def test_worker_ends_with_the_code_of_the_run_whatever_becomes_of_its_log(tmp_path, code):
    shutil.copytree(LAUNCH, tmp_path / "launch")
    stand_in(tmp_path / ".venv" / "bin", "python", f"exit {code}")
    # tail ends with 1 where the file was not there at its start.
    stand_in(tmp_path / "bin", "tail", "while [[ ! -f $STATE/t.rc ]]; do sleep 0.02; done; exit 1")
    done, text = shell(
        "tpu_worker.sh",
        "--tag=t",
        *TRAIN,
        path=tmp_path / "bin",
        launch=tmp_path / "launch",
        STATE=str(tmp_path / ".launch"),
    )
    assert done == code, text


def test_worker_passes_sigterm_to_the_run_and_waits_until_it_has_saved(tmp_path):
    shutil.copytree(LAUNCH, tmp_path / "launch")
    body = """
case "$*" in *sage_jax.main*) ;; *) exit 0 ;; esac
trap "sleep 0.2; echo saved; exit 143" TERM
echo up
while :; do sleep 0.05; done"""
    stand_in(tmp_path / ".venv" / "bin", "python", body)
    worker = subprocess.Popen(
        [tmp_path / "launch" / "tpu_worker.sh", "--tag=t", *TRAIN],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert worker.stdout
    seen = [next(line for line in worker.stdout if line == "up\n")]
    os.kill(int((tmp_path / ".launch" / "t.pid").read_text()), signal.SIGTERM)
    seen += worker.communicate(timeout=30)[0].splitlines()
    assert "saved" in seen
    assert worker.returncode == 143
