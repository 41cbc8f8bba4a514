"""Two processes of four devices each form one run, and it is the run of one process."""

import json
import os
import re
import shutil
import signal
import time

import in_pair
import jax
import numpy as np
import pytest
import test_engine
from process_pair import Pair
from test_multidevice import assert_same_figures, meshed
from test_train import job, rows

from sage_jax import modes
from sage_jax.core.checkpoint import Checkpoints
from sage_jax.models import hf, qwen_params
from sage_jax.run import start
from sage_jax.runtime import ASSETS

pytestmark = pytest.mark.multidevice
# What Gloo tells of its connections, in pieces: its threads write into each other's lines.
GLOO = re.compile(
    r"\[Gloo\] Rank |\d+| is connected to | peer ranks\. "
    r"|Expected number of connected peer ranks is : "
)
TRAINED = """\
from ml_collections import ConfigDict
from test_multidevice import meshed

def get_config():
    c = ConfigDict(meshed("asset:tiny-qwen3", {"data": 2, "fsdp": 4}).to_dict())
    c.report.quiet = False
    return c
"""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------- one pair, many assertions


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What the two processes of in_pair.py left, their exit codes and seconds to the end."""
    folder = tmp_path_factory.mktemp("pair")
    for name, given in (("generate", in_pair.GENERATE), ("score", in_pair.SCORE)):
        (folder / f"{name}.in").write_text("".join(json.dumps(row) + "\n" for row in given))
    for name in ("eval", "sft"):
        (folder / f"{name}.in").touch()
    with Pair(folder, "tests/in_pair.py", folder) as both:
        killed = both.processes[1].wait(600)
        started = time.monotonic()
        codes = both.wait(60)
    assert killed == -signal.SIGKILL, both.log(1)[-3000:]
    facts = [json.loads((folder / f"facts{i}.json").read_text()) for i in range(2)]
    return folder, facts, codes, time.monotonic() - started, both.log(0)


def test_both_processes_gather_the_same(pair):
    _, facts, *_ = pair
    want = [{"process": i, "text": "é" * 2000 * i} for i in range(2)]
    for index, found in enumerate(fact["hosts"] for fact in facts):
        assert found["gathered"] == want and found["empty"] == ["", ""]
        assert found["any"] == [True, False]
        kind = ("ProcessError: process 1 of 2: ", "FileNotFoundError: ")[index]
        assert found["fault"] == kind + "no such disk"
        assert "do not have the same b (b: b0 in process 0, b1 in process 1)" in found["differing"]
        assert "process 1 does not see the files that process 0 writes" in found["apart"]
        assert found["shared"] == ""


def test_each_verdict_is_made_once_and_known_to_both_in_the_same_order(pair):
    _, (first, second), *_ = pair
    assert first["verdicts"] == second["verdicts"]
    found = first["verdicts"]
    # a b c d go in turn to 0 1 0 1, c and b again to who has judged them; process 1 is slow.
    judged = [[("j0", 0), ("j2", 0), ("j4", 0)], [("j1", 1), ("j3", 1), ("j5", 1)]]
    assert found["polls"] == [[[j, f"by {i}"] for j, i in group] for group in judged]
    assert found["ran"] == {"r1": "by 1", "r0": "by 0"}
    stopped, asked = found["stopped"]
    assert stopped.startswith("Cancelled") and asked == 4  # asked of process 1 alone
    assert "'other' is already waiting" in found["twice"]
    assert found["isolation"] == ["B filtered", "sandbox=B (process 1, the weakest of 2)"]


@pytest.fixture(scope="module")
def alone():
    return in_pair.training(None)


@pytest.mark.parametrize("sizes", in_pair.MESHES, ids=str)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_update_and_its_samples_are_those_of_one_device(pair, alone, kind, sizes):
    arrays = np.load(pair[0] / "arrays.npz")
    names = {name for name in arrays if name.startswith(f"{kind} {sizes} ")}
    assert len(names) == len(alone[kind]) > 20
    for name, want in alone[kind].items():
        got = arrays[f"{kind} {sizes} {name}"]
        within = {"grad": (1e-5, 1e-6), "param": (0, 1e-5), "metri": (1e-4, 1e-6)}
        rtol, atol = within.get(name[:5], (0, 0 if name.startswith("tokens") else 1e-5))
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=name)


def test_rows_on_few_slots_get_the_tokens_of_one_process(pair):
    params = jax.tree.map(
        lambda x: x * 4 if x.ndim > 1 else x,
        qwen_params.init(test_engine.CFG, jax.random.key(0)),
    )
    done = test_engine.engine(params).generate(test_engine.rows(12))
    want = {name: completion.tokens.tolist() for name, completion in done.items()}
    assert pair[1][0]["tokens"] == pair[1][1]["tokens"] == [want, want]


def test_weights_read_in_parts_and_exported_by_all_are_the_packaged_ones(pair):
    got, want = (hf.load(path)[0] for path in (pair[0] / "exported", ASSETS / "tiny-qwen3"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_modes_write_one_right_file_each(pair, tmp_path):
    folder, facts, *_ = pair
    for fact in facts:
        assert fact["modes"][:3] == ["ValueError: 1", "ValueError: 0", "ValueError: 0"]
        assert "--mode=sft runs in one process" in fact["modes"][3]
    config = meshed("asset:tiny-qwen3", {})
    for mode in ("generate", "score"):
        want = tmp_path / mode
        single = modes.Job(config, {"model.path": ""}, tmp_path, folder / f"{mode}.in", want)
        modes.MODES[mode](single, lambda: False)
        assert len(lines(want)) > 1
        for got, alike in zip(lines(folder / f"{mode}.out"), lines(want), strict=True):
            np.testing.assert_allclose(got.pop("logps"), alike.pop("logps"), atol=1e-4)
            assert got == alike
    modes.run_eval(job(config, tmp_path / "eval"), lambda: False)
    names = sorted(path.name for path in (tmp_path / "eval").iterdir())
    assert sorted(path.name for path in (folder / "eval").iterdir()) == names
    for name in names:
        assert (folder / "eval" / name).read_bytes() == (tmp_path / "eval" / name).read_bytes()


def test_a_killed_process_ends_the_other_with_an_error_and_a_reason(pair):
    *_, codes, seconds, log = pair
    # Either its own collective fails first, or the service finds the other silent.
    assert codes[0] in (1, -signal.SIGABRT) and codes[1] == -signal.SIGKILL
    assert re.search("by peer|stopped sending heartbeats|CoordinationService", log)
    assert seconds < 60


def test_a_failing_process_ends_the_other_with_its_reason(tmp_path):
    program = tmp_path / "fail.py"
    program.write_text(
        "from sage_jax.core import distributed, hosts\n"
        "distributed.start()\n"
        "if not hosts.first():\n    raise KeyError('its reason')\n"
        "hosts.gather('')\n"
    )
    with Pair(tmp_path, program) as both:
        assert both.wait(90) == [1, 1]
        assert "process 1 of this run has failed: KeyError: 'its reason'" in both.log(0)
        assert "Traceback" in both.log(1)


def test_two_processes_that_were_told_different_numbers_end_with_2_and_both(tmp_path):
    args = ("-m", "sage_jax.main", "--mode=score", "--input=README.md", f"--output={tmp_path}/out")
    with Pair(tmp_path, *args, counts=(2, 3)) as both:
        assert both.wait(60) == [2, 2]
        for i in range(2):
            assert "NUM_PROCESSES=3 in process 1, but NUM_PROCESSES=2 in process 0" in both.log(i)


# ------------------------------------------------------------------------- a run by the front door


def trains(folder, workdir, steps):
    config = folder / "config.py"
    config.write_text(TRAINED)
    flags = (f"--config={config}", f"--workdir={workdir}", f"--config.train.steps={steps}")
    return Pair(folder, "-m", "sage_jax.main", *flags)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    """The work directory of two updates on two processes, and what they said."""
    folder = tmp_path_factory.mktemp("two")
    with trains(folder, folder / "run", 2) as both:
        codes = both.wait(600)
        logs = both.log(0), both.log(1)
    assert codes == [0, 0], logs
    return folder / "run", logs


def test_two_updates_on_two_processes_are_those_of_one(run_of_two, single_run):
    workdir, (first, second) = run_of_two
    assert_same_figures(workdir, single_run[0])
    got, want = (lines(path / "episodes.jsonl") for path in (workdir, single_run[0]))
    assert [row["response"] for row in got] == [row["response"] for row in want]
    assert "finished 2 steps" in first and "8 cpu, mesh data 2 x fsdp 4" in first
    assert not GLOO.sub("", second).strip()


def test_a_stop_asked_of_one_process_saves_and_ends_both_and_one_continues(run_of_two, tmp_path):
    workdir = shutil.copytree(run_of_two[0], tmp_path / "run")
    with trains(tmp_path, workdir, 90) as both:
        until = time.monotonic() + 250
        while len(lines(workdir / "metrics.jsonl")) < 4 and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(both.processes[1].pid, signal.SIGTERM)
        assert both.wait(90) == [143, 143]
        log = both.log(0)
    saved = modes.newest_step(workdir / "checkpoints")
    assert saved and saved >= 3 and f"saved step {saved}" in log
    steps = [row["step"] for row in rows(workdir)]
    assert steps == list(range(saved + 1))
    # On one process, and one device, from what two have written.
    config = meshed("asset:tiny-qwen3", {})
    with start(config, workdir, lambda: False) as run:
        assert run.step == saved
        checkpoints = Checkpoints(run_of_two[0] / "checkpoints", 9)
        before = checkpoints.restore(2, {"params": run.state.params})["params"]
        checkpoints.close()
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), run.state.params, before)
    assert 0 < max(jax.tree.leaves(moved)) < 1e-2
