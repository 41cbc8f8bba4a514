"""Launch scripts and the start of several processes, against stand-ins for what costs money."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sage_jax.core.distributed import DistributedError, Processes, find, start

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
STARTABLE = [path for path in SCRIPTS if path.name != "lib.sh"]
TRAIN = ("--", "--config=configs/tiny.py", "--config.model.path=a b")
NEEDS = {"tpu_pod.sh": ("--name=demo", "--zone=us-west4-a")}


def shell(script, *args, path="", launch=LAUNCH, **env):
    """A launch script with `path` before the usual PATH: (exit code, stdout + stderr)."""
    environment = {"PATH": f"{path}:{os.environ['PATH']}", "HOME": os.environ["HOME"], **env}
    done = subprocess.run(
        [launch / script, *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def stand_in(folder, name, body):
    """An executable that writes its call to `calls`, then does `body`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    (folder / name).chmod(0o755)
    return folder


def calls(folder):
    log = folder / "calls"
    return log.read_text().splitlines() if log.exists() else []


# -------------------------------------------------------------------------------- every script


def test_shellcheck_finds_nothing():
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool, "shellcheck is part of the dev extra"
    done = subprocess.run([tool, *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_stop_at_errors_and_are_executable(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    if script in STARTABLE:
        assert "\nset -euo pipefail\n" in script.read_text()
        assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", STARTABLE, ids=lambda path: path.name)
def test_help_names_every_flag(script):
    code, text = shell(script.name, "--help")
    assert code == 0
    source = script.read_text()
    flags = " ".join(re.findall(r'^(?:SWITCHES|VALUES)="(.*)"', source, re.MULTILINE)).split()
    assert flags
    for flag in ("help", "dry-run", *flags):
        assert f"--{flag}" in text, flag
    assert "#" not in text and "set -euo" not in text


@pytest.mark.parametrize("script", STARTABLE, ids=lambda path: path.name)
def test_a_dry_run_prints_the_commands_and_runs_none(script, tmp_path):
    names = "gcloud python3 pip srun scontrol nvidia-smi setsid nohup tar timeout".split()
    for name in names:
        stand_in(tmp_path / "bin", name, "exit 99")
    before = sorted(p.name for p in ROOT.iterdir())
    code, text = shell(
        script.name, *NEEDS.get(script.name, ()), "--dry-run", *TRAIN, path=tmp_path / "bin"
    )
    assert code == 0, text
    assert calls(tmp_path / "bin") == []
    assert sorted(p.name for p in ROOT.iterdir()) == before
    assert "--config=configs/tiny.py" in text
    # Quoted: what is printed can be pasted.
    assert "'--config.model.path=a b'" in text or r"--config.model.path=a\ b" in text


@pytest.mark.parametrize(
    ("script", "args", "parts"),
    [
        ("tpu_pod.sh", ("--zone=z", *TRAIN), ("--name=", "required")),
        ("tpu_pod.sh", ("--name=demo", *TRAIN), ("--zone", "us-west4-a")),
        ("tpu_pod.sh", ("--name=a", "--zone=z"), ("-- --config",)),
        ("tpu_pod.sh", ("--name=a", "--zone=z", "--bucket=b", *TRAIN), ("--bucket=b", "gs://")),
        ("tpu_pod.sh", ("--name=a", "--zone=z", "--poll=soon", *TRAIN), ("--poll=soon", "least")),
        ("tpu_pod.sh", ("--nam=a", *TRAIN), ("--nam'", "--name")),
        ("tpu_pod.sh", ("--spot=yes", *TRAIN), ("--spot takes no value",)),
        ("tpu_pod.sh", ("--name",), ("--name needs a value",)),
        ("tpu_pod.sh", ("a", *TRAIN), ("unexpected argument 'a'", "--")),
        ("tpu_pod.sh", (*NEEDS["tpu_pod.sh"], *TRAIN, "--workdir=/a"), ("--workdir=/a", "below")),
        ("gpu_node.sh", ("--cuda=11", *TRAIN), ("--cuda=11", "12, 13")),
        ("local_cpu.sh", ("--devices=0", *TRAIN), ("--devices=0", "at least 1")),
        ("slurm.sbatch", ("--root=/nowhere", *TRAIN), ("/nowhere", "--root=DIR")),
        ("slurm.sbatch", TRAIN, ("sbatch",)),
        ("gpu_check.sh", ("--shapes=big",), ("--shapes=big", "real or tiny")),
        ("tpu_worker.sh", ("--tag=a/b", *TRAIN), ("--tag=a/b",)),
    ],
)
def test_a_bad_flag_is_named_with_its_value_and_the_remedy(script, args, parts, tmp_path):
    stand_in(tmp_path / "bin", "gcloud", "exit 99")
    code, text = shell(script, *args, path=tmp_path / "bin")
    assert code == 2
    for part in parts:
        assert part in text
    assert calls(tmp_path / "bin") == []


# ------------------------------------------------------------------------------------- tpu_pod

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


# --------------------------------------------------------------------------- the other scripts


def machine(tmp_path, *gpus, code=0):
    """A folder with nvidia-smi and, in bin, a Python that takes every command."""
    rows = "\n".join(gpus)
    stand_in(tmp_path / "bin", "python", "exit 0")
    return stand_in(tmp_path, "nvidia-smi", f"cat <<'END'\n{rows}\nEND\nexit {code}")


@pytest.mark.parametrize(
    ("gpus", "extra"),
    [
        (["580.65.06, 9.0, H100"] * 8, "cuda13"),
        (["570.86, 8.0, A100"], "cuda12"),
        (["580.65, 7.0, V100", "580.65, 9.0, H100"], "cuda12"),
    ],
)
def test_gpu_node_installs_the_jax_that_driver_and_oldest_gpu_take(tmp_path, gpus, extra):
    folder = machine(tmp_path, *gpus)
    code, text = shell("gpu_node.sh", f"--venv={folder}", *TRAIN, path=folder)
    assert code == 0, text
    done = "\n".join(calls(folder / "bin"))
    assert f"[{extra}]" in done
    assert "-m sage_jax.main --config=configs/tiny.py --config.model.path=a b" in done


@pytest.mark.parametrize(
    ("gpus", "code", "flags", "part"),
    [
        (["470.1, 8.0, A100"], 0, (), "525 is needed"),
        (["570.1, 8.0, A100"], 0, ("--cuda=13",), "580 is needed"),
        (["Failed to initialize NVML"], 9, (), "Failed to initialize NVML"),
    ],
)
def test_gpu_node_says_what_a_machine_lacks(tmp_path, gpus, code, flags, part):
    folder = machine(tmp_path, *gpus, code=code)
    exit_code, text = shell("gpu_node.sh", f"--venv={folder}", *flags, *TRAIN, path=folder)
    assert exit_code == 2
    assert part in text
    assert "sage_jax.main" not in text


@pytest.mark.parametrize(
    ("ended", "restarts", "requeued"),
    [(143, 0, True), (143, 20, False), (0, 0, False), (2, 0, False)],
)
def test_slurm_requeues_a_run_that_saved_and_no_other(tmp_path, ended, restarts, requeued):
    folder = stand_in(tmp_path, "srun", f"exit {ended}")
    stand_in(folder, "scontrol", "exit 0")
    stand_in(folder / "bin", "python", "exit 0")
    code, text = shell(
        "slurm.sbatch",
        f"--venv={folder}",
        *TRAIN,
        path=folder,
        SLURM_JOB_ID="7",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_RESTART_COUNT=str(restarts),
    )
    assert code == ended, text
    assert ("scontrol requeue 7" in calls(folder)) == requeued
    # The same folder before and after: what a requeued job continues.
    assert "--workdir=runs/slurm-7" in calls(folder)[0]


def test_slurm_asks_for_a_signal_long_enough_before_the_limit():
    options = re.findall(r"^#SBATCH (\S+)", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    [signal] = [o for o in options if o.startswith("--signal=")]
    # Without B: it goes to the tasks, which save; the script itself must live on to requeue.
    assert re.fullmatch(r"--signal=TERM@\d{3,}", signal)
    assert "--requeue" in options


def test_local_processes_get_one_coordinator_and_their_own_numbers(tmp_path):
    note = f'echo "$COORDINATOR_ADDRESS $PROCESS_ID/$NUM_PROCESSES" >>"{tmp_path}/seen"'
    stand_in(tmp_path / "bin", "python", note)
    code, text = shell(
        "local_cpu.sh",
        f"--venv={tmp_path}",
        "--skip-install",
        "--processes=2",
        "--port=4444",
        *TRAIN,
    )
    assert code == 0, text
    seen = sorted((tmp_path / "seen").read_text().split("\n"))[1:]
    assert seen == ["127.0.0.1:4444 0/2", "127.0.0.1:4444 1/2"]


def test_local_processes_end_together_when_one_fails(tmp_path):
    stand_in(
        tmp_path / "bin", "python", "[[ $PROCESS_ID == 1 ]] || exec sleep 30; echo broken; exit 3"
    )
    code, text = shell(
        "local_cpu.sh", f"--venv={tmp_path}", "--skip-install", "--processes=2", *TRAIN
    )
    assert code == 3
    assert "broken" in text


def test_gpu_check_knows_the_models_it_names():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    real, tiny = module.shapes("real", 3), module.shapes("tiny", 1)
    assert [cfg.hidden_size for cfg in real.values()] == [896, 2560]
    assert {cfg.num_layers for cfg in real.values()} == {3}
    assert all(cfg.hidden_size < 100 for cfg in tiny.values())
    shown = []

    def failing(cfg, work):
        return [("sum", "1", False, "")]

    failing.__name__ = "parity"
    for name in ("parity", "decoding", "updating"):
        setattr(module, name, failing)
    assert not module.run(tiny, module.TINY, 60, lambda *line: shown.append(line))
    assert not any(line[3] for line in shown if line[1] == "sum")
    shown.clear()
    assert module.run(tiny, module.TINY, -1, lambda *line: shown.append(line))
    assert sum(line[2] == "left out" for line in shown) == 6


# ----------------------------------------------------------------------------- several processes

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[07-09,12]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
PLAIN = {"COORDINATOR_ADDRESS": "10.0.0.1:999", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}
XPK = {"JAX_COORDINATOR_ADDRESS": "job-0.svc", "JAX_PROCESS_COUNT": "8"}
GKE = {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"NUM_PROCESSES": "1"}, None),
        (PLAIN, Processes("environment", 4, 3, "10.0.0.1:999")),
        (
            {"JAX_COORDINATOR_ADDRESS": "[::1]:7", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            Processes("environment", 2, 0, "[::1]:7"),
        ),
        (XPK | {"NODE_RANK": "5"}, Processes("xpk", 8, 5, "job-0.svc:1234")),
        (
            XPK
            | {"JOB_INDEX": "1", "PROCESSES_IN_JOB": "4", "JOB_COMPLETION_INDEX": "2"}
            | {"JAX_COORDINATOR_PORT": "77"},
            Processes("xpk", 8, 6, "job-0.svc:77"),
        ),
        # Kubernetes numbers the pods of any indexed job, also those that run apart.
        ({"JOB_COMPLETION_INDEX": "2"}, None),
        (SLURM, Processes("SLURM", 4, 2, "node07:62344")),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu3,gpu4"}, Processes("SLURM", 4, 2, "gpu3:62344")),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "ib0:5"}, Processes("SLURM", 4, 2, "ib0:5")),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"},
            Processes("SLURM", 4, 2, "node07:62344", (1,)),
        ),
        # Bound by SLURM: the one GPU that is visible has number 0, whatever the local number.
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "3"},
            Processes("SLURM", 4, 2, "node07:62344"),
        ),
        # Within sbatch or salloc, but not started by srun.
        ({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        (GKE, Processes("Cloud TPU", 3)),
        (GKE | {"MEGASCALE_NUM_SLICES": "2"}, Processes("Cloud TPU", 6)),
        (GKE | {"JAX_PLATFORMS": "cpu"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (PLAIN | SLURM, Processes("environment", 4, 3, "10.0.0.1:999")),
    ],
)
def test_processes_are_found_in_the_environment(environ, expected):
    assert find(environ) == expected


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"COORDINATOR_ADDRESS": "a:1"}, ("COORDINATOR_ADDRESS=a:1", "NUM_PROCESSES")),
        ({"PROCESS_ID": "1"}, ("PROCESS_ID=1", "NUM_PROCESSES is not set")),
        ({"NUM_PROCESSES": "2"}, ("NUM_PROCESSES=2", "PROCESS_ID is not set")),
        ({"NUM_PROCESSES": "2", "PROCESS_ID": "0"}, ("COORDINATOR_ADDRESS is not set",)),
        (PLAIN | {"NUM_PROCESSES": "two"}, ("NUM_PROCESSES=two", "whole number")),
        (PLAIN | {"NUM_PROCESSES": "0"}, ("NUM_PROCESSES=0", "at least 1")),
        (PLAIN | {"PROCESS_ID": "4"}, ("PROCESS_ID=4", "0 to 3")),
        (PLAIN | {"PROCESS_ID": "-1"}, ("PROCESS_ID=-1",)),
        (PLAIN | {"COORDINATOR_ADDRESS": "a:b"}, ("COORDINATOR_ADDRESS=a:b", "host:port")),
        (PLAIN | {"COORDINATOR_ADDRESS": "a:99999"}, ("a:99999",)),
        (PLAIN | {"JAX_NUM_PROCESSES": "8"}, ("NUM_PROCESSES=4", "JAX_NUM_PROCESSES=8")),
        (XPK, ("JAX_PROCESS_COUNT=8", "NODE_RANK")),
        (XPK | {"JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "0"}, ("PROCESSES_IN_JOB is not set",)),
        (SLURM | {"SLURM_PROCID": "4"}, ("SLURM_PROCID=4", "SLURM_NTASKS=4", "srun")),
        (GKE | {"TPU_WORKER_ID": "3"}, ("TPU_WORKER_ID=3", "earlier slice")),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ("TPU_WORKER_ID is not set",)),
    ],
)
def test_a_contradictory_environment_is_named(environ, parts):
    with pytest.raises(DistributedError) as caught:
        find(environ)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("attributes", "count"),
    [
        ({"worker-network-endpoints": "a,b"}, 2),
        ({"worker-network-endpoints": "x:1:10.0.0.1"}, None),
        ({"worker-network-endpoints": "a,b", "tpu-env": "X: '1'\nMEGASCALE_NUM_SLICES: '2'\n"}, 4),
        ({}, None),
    ],
)
def test_a_tpu_vm_counts_the_hosts_of_its_slice(monkeypatch, attributes, count):
    monkeypatch.setattr("sage_jax.core.distributed._on_tpu_vm", lambda environ: True)
    found = find({}, lambda key: attributes.get(key, ""))
    assert (found and found.count) == count


def test_a_machine_without_tpus_asks_for_no_metadata():
    assert find({}, lambda key: pytest.fail(f"asked for {key}")) is None


def test_start_hands_jax_what_was_found():
    given = []
    assert start(PLAIN, most=8, initialize=lambda **kwargs: given.append(kwargs))
    start(GKE, most=8, initialize=lambda **kwargs: given.append(kwargs))
    assert start({}, initialize=lambda **kwargs: given.append(kwargs)) is None
    plain, tpu = given
    assert plain == {
        "coordinator_address": "10.0.0.1:999",
        "num_processes": 4,
        "process_id": 3,
        "local_device_ids": None,
        "cluster_detection_method": "deactivate",
    }
    assert tpu == {}


def test_several_processes_are_refused_before_any_waits_for_another():
    with pytest.raises(DistributedError, match="4 processes, but more than 1 is not supported"):
        start(PLAIN, initialize=lambda **kwargs: pytest.fail("started"))


def test_the_front_door_refuses_several_processes_with_exit_2(monkeypatch, capsys):
    from sage_jax import main as front

    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(front, "parse", lambda argv: None)
    monkeypatch.setattr(front.schema, "validate", lambda config: config)
    monkeypatch.setattr(front, "CONFIG", type("Holder", (), {"value": None}))
    assert front.main(["sage_jax"]) == 2
    assert "4 processes" in capsys.readouterr().err
