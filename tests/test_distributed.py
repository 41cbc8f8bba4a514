"""The start of several processes: what the environment says, and what is an error."""

import subprocess
import sys

import pytest

from sage_jax.core import rendezvous
from sage_jax.core.distributed import DistributedError, Processes, find, start

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


def test_start_hands_jax_what_was_found_and_all_agreed_on():
    given, told = [], []
    hooks = {
        "initialize": lambda **kwargs: given.append(kwargs),
        "agree": lambda *x: told.append(x),
    }
    assert start(PLAIN, **hooks)
    start(SLURM, **hooks)
    start(GKE, **hooks)
    assert start({}, **hooks) is None
    assert told == [
        ("10.0.0.1:999", rendezvous.Told(3, 4, "NUM_PROCESSES", "PROCESS_ID"), 300),
        ("node07:62344", rendezvous.Told(2, 4, "SLURM_NTASKS", "SLURM_PROCID"), 300),
    ]
    del given[1]
    plain, tpu = given
    assert plain == tpu | {
        "coordinator_address": "10.0.0.1:999",
        "num_processes": 4,
        "process_id": 3,
        "local_device_ids": None,
        "cluster_detection_method": "deactivate",
    }
    assert tpu == {"initialization_timeout": 300, "heartbeat_timeout_seconds": 100}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"NODE_RANK": "1"}, "NODE_RANK"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX"),
        (
            {"JOB_INDEX": "1", "PROCESSES_IN_JOB": "4", "JOB_COMPLETION_INDEX": "2"},
            "JOB_INDEX and JOB_COMPLETION_INDEX",
        ),
    ],
)
def test_the_variables_that_number_a_process_are_known(environ, names):
    found = find(XPK | environ)
    assert found and found.numbered_by == names and found.counted_by == "JAX_PROCESS_COUNT"


def nobody(**settings):
    raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nSee above")


def test_processes_that_do_not_come_are_an_error_with_the_remedy():
    with pytest.raises(DistributedError, match=r"4 processes did not find .*DEADLINE.*start all"):
        start(PLAIN, initialize=nobody, agree=lambda *_: None)


def test_a_start_of_jax_that_never_ends_is_ended_with_2_and_the_remedy():
    program = (
        "import time\n"
        "from sage_jax.core import distributed\n"
        "distributed.START_TIMEOUT = 0.1\n"
        f"distributed.start({GKE}, initialize=lambda **_: time.sleep(60))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 2
    assert "Cloud TPU: the 3 processes did not find together (within 0.1 s)" in done.stderr


def test_the_front_door_ends_with_2_when_the_others_do_not_come(monkeypatch, capsys):
    from sage_jax import main as front

    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sage_jax.core.distributed._initialize", nobody)
    monkeypatch.setattr("sage_jax.core.rendezvous.agree", lambda *_: None)
    argv = ["sage_jax", "--mode=score", "--input=README.md", "--output=scores.jsonl"]
    assert front.main(argv) == 2
    assert "4 processes" in capsys.readouterr().err
