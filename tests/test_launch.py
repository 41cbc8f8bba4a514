"""Launch scripts, against stand-ins for what costs money."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import LAUNCH, NEEDS, ROOT, SCRIPTS, STARTABLE, TRAIN, calls, shell, stand_in

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


def in_checkout():
    """What lies at its top, caches aside: other tests make theirs at the same time."""
    return {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("script", STARTABLE, ids=lambda path: path.name)
def test_a_dry_run_prints_the_commands_and_runs_none(script, tmp_path):
    names = "gcloud python3 pip srun scontrol nvidia-smi setsid nohup tar timeout".split()
    for name in names:
        stand_in(tmp_path / "bin", name, "exit 99")
    before = in_checkout()
    code, text = shell(
        script.name, *NEEDS.get(script.name, ()), "--dry-run", *TRAIN, path=tmp_path / "bin"
    )
    assert code == 0, text
    assert calls(tmp_path / "bin") == []
    assert in_checkout() == before
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
        f"--logs={tmp_path}/logs",
        *TRAIN,
    )
    assert code == 0, text
    seen = sorted((tmp_path / "seen").read_text().split("\n"))[1:]
    assert seen == ["127.0.0.1:4444 0/2", "127.0.0.1:4444 1/2"]


def test_local_processes_end_together_when_one_fails(tmp_path):
    stand_in(
        tmp_path / "bin", "python", "[[ $PROCESS_ID == 1 ]] || exec sleep 30; echo broken; exit 3"
    )
    flags = (f"--venv={tmp_path}", f"--logs={tmp_path}", "--skip-install", "--processes=2")
    code, text = shell("local_cpu.sh", *flags, *TRAIN)
    assert code == 3
    assert "broken" in text
    assert (tmp_path / "local-1.log").read_text() == "broken\n"


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_check_of_gpu_check_runs_and_holds_here(gpu_check):
    shown = []
    one = dict(list(gpu_check.shapes("tiny", 1).items())[:1])
    assert gpu_check.run(one, gpu_check.TINY, 600, lambda *line: shown.append(line))
    done = [line[1] for line in shown]
    checks = "fp32 log-probs", "decode", "sampler - learner", "attention blocked", "update"
    for what in (*checks, "decode aside"):
        assert any(name.startswith(what) for name in done)


def test_gpu_check_knows_the_models_it_names(gpu_check, monkeypatch):
    module = gpu_check
    real, tiny = module.shapes("real", 3), module.shapes("tiny", 1)
    assert [cfg.hidden_size for cfg in real.values()] == [896, 2560]
    assert {cfg.num_layers for cfg in real.values()} == {3}
    assert all(cfg.hidden_size < 100 for cfg in tiny.values())
    shown = []

    def failing(cfg, work):
        return [("sum", "1", False, "")]

    failing.__name__ = "parity"
    for name in ("parity", "decoding", "attending", "reading", "updating"):
        monkeypatch.setattr(module, name, failing)
    assert not module.run(tiny, module.TINY, 60, lambda *line: shown.append(line))
    assert not any(line[3] for line in shown if line[1] == "sum")
    shown.clear()
    assert module.run(tiny, module.TINY, -1, lambda *line: shown.append(line))
    assert sum(line[2] == "left out" for line in shown) == 10
