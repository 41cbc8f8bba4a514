"""The batch interface and the command line: ids, order, caching, deaths, endings."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sage_jax.verify import Job, Verdict, Verifier, dispatch, math_client
from sage_jax.verify.__main__ import main
from sage_jax.verify.child import Child, ChildDied

ROOT = Path(__file__).parents[1]
GOOD = {"solution": "def f(n):\n    return n + 1\n", "tests": "assert f(1) == 2",
        "entry_point": "f"}  # fmt: skip


def math_job(name, gold="5", prediction="\\boxed{5}"):
    return Job(name, "math", {"gold": gold, "prediction": prediction})


def test_results_keep_order_and_identical_work_is_done_once(monkeypatch):
    with Verifier(code=False, workers=1) as verifier:
        started = []
        start_job = math_client.MathWorker.start_job

        def count(self, kind, payload):
            started.append(payload["prediction"])
            start_job(self, kind, payload)

        monkeypatch.setattr(math_client.MathWorker, "start_job", count)
        jobs = [math_job(f"j{n}", prediction=f"\\boxed{{{n % 3}}}") for n in range(12)]
        jobs.append(math_job("right"))
        verdicts = verifier.run(jobs)
        assert list(verdicts) == [job.id for job in jobs]
        assert [name for name, v in verdicts.items() if v.correct] == ["right"]
        assert len(started) == 4
        verifier.run([math_job("again")])
        assert len(started) == 4


def test_a_large_trainer_does_not_wear_its_workers_out(monkeypatch):
    """Workers inherit the peak of the process that starts them; each job wore one out."""
    ballast = bytearray(600 << 20)
    ballast[:: 1 << 12] = b"x" * (len(ballast) >> 12)
    made = []
    init = math_client.MathWorker.__init__

    def count(self):
        made.append(self)
        init(self)

    monkeypatch.setattr(math_client.MathWorker, "__init__", count)
    with Verifier(code=False, workers=1) as verifier:
        jobs = [math_job(f"j{n}", prediction=f"\\boxed{{{n}}}") for n in range(20)]
        verifier.run(jobs)
    assert len(ballast) and len(made) == 1


def test_submit_returns_at_once_and_waiting_names_the_ids():
    # By CPU time: a busy machine delays both jobs alike.
    busy = "import time\nwhile time.process_time() < 1.5: pass\n"
    long = {**GOOD, "solution": busy + GOOD["solution"]}
    with Verifier(workers=1) as verifier:
        # The maths worker is up before the race: its start may take longer than the program.
        verifier.run([math_job("first", gold="7", prediction="\\boxed{7}")])
        verifier.submit(Job("slow", "code", long))
        verifier.submit(math_job("quick"))
        assert set(verifier.waiting()) == {"slow", "quick"}
        with pytest.raises(ValueError, match="slow"):
            verifier.submit(Job("slow", "code", GOOD))
        found = verifier.poll(timeout=30)
        assert [name for name, _ in found] == ["quick"]
        assert set(verifier.waiting()) == {"slow"}
        assert dict(verifier.poll(timeout=30))["slow"].correct
        assert verifier.poll() == [] and verifier.waiting() == {}


def test_usable_from_several_threads():
    with Verifier(workers=2) as verifier:
        found = {}

        def work(name):
            jobs = [
                math_job(f"{name}{n}", gold=str(n), prediction=f"\\boxed{{{n}}}") for n in range(8)
            ]
            found[name] = verifier.run(jobs)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(v.correct for part in found.values() for v in part.values()) == 24


STUB = """
import json, os, socket, struct, sys, time
link = socket.socket(fileno=int(sys.argv[1]))
def say(message):
    text = json.dumps(message).encode()
    link.sendall(struct.pack(">I", len(text)) + text)
say({"stage": "idle"})
while True:
    size = struct.unpack(">I", link.recv(4, socket.MSG_WAITALL))[0]
    request = json.loads(link.recv(size, socket.MSG_WAITALL))
    if request["gold"] != "dies":
        say({"stage": "prediction"})
    if "dies" in (request["gold"], request["prediction"]):
        os._exit(1)
    while "spins" in request["prediction"]:
        pass
    if "sleeps" in request["prediction"]:
        time.sleep(60)
    say({"verdict": "correct", "reason": ""})
"""


def test_a_stuck_or_dying_worker_costs_one_verdict(tmp_path, monkeypatch):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(math_client, "WORKER", stub)
    monkeypatch.setattr(dispatch, "WALL_FACTOR", 1e6)  # a busy machine is not what is tested
    jobs = [math_job("a", prediction="dies"), math_job("b"), math_job("c", gold="dies")]
    jobs += [math_job("d", prediction="spins"), math_job("e", gold="6")]
    with Verifier(code=False, workers=1, math_time_limit=0.2) as verifier:
        verdicts = verifier.run(jobs)
        verifier.submit(math_job("f", prediction="sleeps"))
        lanes = verifier._dispatcher._lanes
        while [lane.child.stage for lane in lanes] != ["prediction"]:
            time.sleep(0.01)
        monkeypatch.setattr(dispatch, "WALL_FACTOR", 0.0)
        verdicts |= dict(verifier.poll(timeout=60))
        monkeypatch.setattr(dispatch, "WALL_FACTOR", 1e6)
        verdicts |= verifier.run([math_job("g", gold="7")])
    told = {name: (v.verdict, v.reason) for name, v in verdicts.items()}
    assert told == {
        "a": ("error", "killed_its_worker"),
        "b": ("correct", ""),
        "c": ("error", "verifier_error"),
        "d": ("timeout", "time_limit"),
        "e": ("correct", ""),
        "f": ("timeout", "time_limit"),
        "g": ("correct", ""),
    }
    assert [name for name, v in verdicts.items() if v.masked] == ["c"]


def test_what_a_worker_said_before_its_end_is_heard(monkeypatch):
    child = Child(["-c", "import time; time.sleep(60)"], {})
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    monkeypatch.setattr(child, "_socket", ours)
    try:
        text = json.dumps({"stage": "prediction"}).encode()
        theirs.sendall(struct.pack(">I", len(text)) + text)
        ours.send(b"never read")  # so that the end arrives as a reset, not as an end of file
        theirs.close()
        assert child.receive() == [{"stage": "prediction"}]
        with pytest.raises(ChildDied):
            child.receive()
        with pytest.raises(ChildDied):
            child.send("late")
    finally:
        child.kill()


def test_a_worker_that_ends_at_once_still_says_whose_fault_it_was(tmp_path, monkeypatch):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(math_client, "WORKER", stub)
    send_fds = socket.send_fds

    def wait_for_the_end(link, *args):
        sent = send_fds(link, *args)
        time.sleep(0.3)
        return sent

    monkeypatch.setattr(socket, "send_fds", wait_for_the_end)
    with Verifier(code=False, workers=1) as verifier:
        verdict = verifier.run([math_job("a", prediction="dies")])["a"]
    assert (verdict.verdict, verdict.reason) == ("error", "killed_its_worker")


def test_a_worker_that_died_while_idle_is_replaced_when_its_next_job_comes(monkeypatch):
    # Its death came to light when the job was written to it; the job then waited for ever.
    real = math_client.MathWorker.start_job
    seen = []

    def start_job(self, *args):
        seen.append(1)
        if len(seen) == 2:
            raise ChildDied
        return real(self, *args)

    with Verifier(code=False, workers=1) as verifier:
        monkeypatch.setattr(math_client.MathWorker, "start_job", start_job)
        for name in ("a", "b", "c"):
            verifier.submit(math_job(name, gold=str(len(name) + len(seen))))
            assert [n for n, _ in verifier.poll(timeout=60)] == [name]
    assert len(seen) == 4


def children():
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(folder.name))
    return found


def test_close_leaves_no_process_and_no_zombie():
    before = set(children())
    with Verifier(workers=2) as verifier:
        verifier.submit(Job("spin", "code", {**GOOD, "solution": "while True: pass"}))
        verifier.submit(math_job("m"))
        verifier.poll(timeout=20)
        assert set(children()) - before
    assert set(children()) - before == set()
    with pytest.raises(RuntimeError, match="closed"):
        verifier.submit(math_job("late"))


def test_workers_end_when_the_trainer_is_killed(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from sage_jax.verify import Job, Verifier
from sage_jax.verify.math_client import MathWorker
verifier = Verifier(workers=1)
verifier.run([Job("m", "math", {{"gold": "5", "prediction": "5"}})])
verifier.submit(Job("spin", "code", {{"solution": "while True: pass", "tests": "f()",
                                      "entry_point": "f", "time_limit": 500}}))
time.sleep(0.5)
print(*[lane.child.pid for lane in verifier._dispatcher._lanes], flush=True)
time.sleep(600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in workers)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_slot_is_replaced():
    with Verifier(workers=1) as verifier:
        assert verifier.run([Job("a", "code", GOOD)])["a"].correct
        (lane,) = verifier._dispatcher._lanes
        os.killpg(lane.child.pid, signal.SIGKILL)
        other = {**GOOD, "tests": "assert f(2) == 3"}
        assert verifier.run([Job("b", "code", other)])["b"].correct


def test_a_program_beyond_all_bounds_is_a_verdict_and_no_crash_of_the_caller():
    huge = {**GOOD, "solution": "#" * (1 << 20) + "\n" + GOOD["solution"]}
    reference = {"solution": huge["solution"], "entry_point": "f", "inputs": ["1"]}
    with Verifier(workers=1) as verifier:
        verdicts = verifier.run([Job("a", "code", huge), Job("r", "code_reference", reference)])
    for verdict in verdicts.values():
        assert (verdict.verdict, verdict.reason) == ("error", "program_too_large")
        assert not verdict.masked


def test_submit_blocks_while_as_much_as_may_wait_is_waiting():
    with Verifier(code=False, workers=1, max_waiting=3) as verifier:
        most = 0
        for n in range(12):
            verifier.submit(math_job(str(n), prediction=f"\\boxed{{{n}}}"))
            most = max(most, len(verifier.waiting()))
        assert most <= 3
        found = []
        while len(found) < 12:
            found += verifier.poll(timeout=30)
        assert sorted(int(name) for name, _ in found) == list(range(12))
    with Verifier(code=False, workers=1, max_text=50) as verifier:  # one job is always let in
        assert len(verifier.run([math_job("a" * 60), math_job("b", prediction="x" * 90)])) == 2


def test_the_cache_is_bounded_by_its_text(monkeypatch):
    monkeypatch.setattr("sage_jax.verify.pool.CACHE_TEXT", 10_000)
    with Verifier(workers=1) as verifier:
        loud = "print('x' * 4000)\n" + GOOD["solution"]
        jobs = [Job(str(n), "code", {**GOOD, "solution": f"{loud}# {n}"}) for n in range(6)]
        assert all(verdict.correct for verdict in verifier.run(jobs).values())
        assert 1 <= len(verifier._cache) <= 2


def test_masked_verdicts_are_not_cached():
    broken = {**GOOD, "tests": "assert ("}
    with Verifier(workers=1) as verifier:
        assert verifier.run([Job("a", "code", broken)])["a"].masked
        assert verifier._cache == {}


@pytest.mark.parametrize(
    "change,word",
    [
        ({"workers": 0}, "workers"),
        ({"policy": "soft"}, "policy"),
        ({"require_level": "Z"}, "level"),
        ({"max_waiting": 0}, "max_waiting"),
    ],
)
def test_arguments_out_of_range(change, word):
    with pytest.raises(ValueError, match=word):
        Verifier(code=False, **change)


def test_verdicts_and_jobs_know_their_names():
    with pytest.raises(ValueError, match="perhaps"):
        Verdict("perhaps")
    with pytest.raises(ValueError, match="poem"):
        Job("a", "poem")
    assert Verdict("error", "sandbox_error").masked and not Verdict("error", "early_exit").masked


# --- command line -------------------------------------------------------------------------


def command(tmp_path, domain, lines, *options):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "sage_jax.verify", domain, "--input", source, "--output", target,
         *options],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    rows = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
    return done, rows


def test_command_line_maths(tmp_path):
    row = {"gold": "7", "prediction": "we count 7"}
    lines = [
        json.dumps({"id": "a", **row}),
        "{broken",
        json.dumps({"id": "a", **row}),
        json.dumps({"id": 3, "gold": "7", "prediction": "\\boxed{8}"}),
        json.dumps({"id": "b", "gold": 7, "prediction": "7"}),
        json.dumps(row),
        json.dumps({"id": "c", "gold": "1.0", "prediction": "####1.2", "tolerance": 0.5}),
    ]
    done, rows = command(tmp_path, "math", lines, "--workers", "1")
    assert done.returncode == 1
    assert [(row["id"], row["verdict"]) for row in rows] == [
        ("a", "correct"),
        (3, "wrong"),
        ("c", "correct"),
    ]
    assert set(rows[0]) == {"id", "verdict", "reason", "ms"}
    for number in (2, 3, 5, 6):
        assert f"line {number}:" in done.stderr
    done, rows = command(tmp_path, "math", lines[:1], "--policy", "reward")
    assert done.returncode == 0 and rows[0]["verdict"] == "unparsable"


def test_command_line_code(tmp_path):
    lines = [
        json.dumps({"id": "good", **GOOD}),
        json.dumps({"id": "none", "solution": "x = 1", "tests": "assert True"}),
        json.dumps({"id": "probe", **GOOD, "determinism_probe": "f(1)"}),
    ]
    done, rows = command(tmp_path, "code", lines)
    assert done.returncode == 1 and "line 2: entry_point" in done.stderr
    assert [(row["id"], row["verdict"]) for row in rows] == [
        ("good", "correct"),
        ("probe", "correct"),
    ]
    wanted = {
        "id",
        "verdict",
        "reason",
        "ms",
        "cpu_ms",
        "output_tail",
        "isolation",
        "deterministic",
    }
    assert set(rows[0]) == wanted
    assert rows[0]["isolation"] in "ABCD" and rows[1]["deterministic"] is True


def test_command_line_usage_errors_exit_2(tmp_path):
    done, _ = command(tmp_path, "poetry", [])
    assert done.returncode == 2
    done, _ = command(tmp_path, "math", [], "--workers", "0")
    assert done.returncode == 2 and "--workers" in done.stderr


def test_an_output_that_is_the_input_is_refused_and_the_rows_survive(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"id": 1, "gold": "2", "prediction": "<answer>2</answer>"}\r\n')
    before = path.read_bytes()
    arguments = ["--input", str(path), "--output", f"{tmp_path}/./rows.jsonl"]
    with pytest.raises(SystemExit) as end:
        main(["math", *arguments])
    assert end.value.code == 2 and path.read_bytes() == before
    assert main(["math", *arguments[:3], str(tmp_path / "out")]) == 0  # the mark does no harm
    assert '"correct"' in (tmp_path / "out").read_text()
