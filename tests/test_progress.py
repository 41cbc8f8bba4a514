"""What a person sees: one line a step, a heartbeat when stuck, silence when asked for."""

import io
import json
import logging
import threading

import pytest

from sage_jax.report.progress import (
    Progress,
    accuracy_summary,
    duration,
    logger,
    setup_logging,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def progress(stream, clock, **changes):
    """Without its thread: the test beats by hand."""
    made = Progress(10, stream=stream, clock=clock, **{"heartbeat": 0, **changes})
    made._heartbeat = 30.0
    return made


def test_a_plain_line_a_step_with_figures_and_eta(clock):
    stream = io.StringIO()
    bar = progress(stream, clock)
    for step, seconds in enumerate([60, 2, 4], 1):
        clock.now += seconds
        bar.step(step, {"solve_rate": 0.25, "loss": 0.123456})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 1/10  solve_rate 0.25  loss 0.1235  60.0 s/step")
    # The first step compiles: alone it gives no ETA, later it is left out of 3 s x 7 steps.
    assert lines[0].endswith("ETA after the next step")
    assert lines[2].endswith("4.0 s/step  ETA 21 s")


def test_a_resumed_run_counts_only_the_steps_that_are_left(clock):
    stream = io.StringIO()
    bar = progress(stream, clock, done=6)
    for step, seconds in ((7, 90), (8, 5)):
        clock.now += seconds
        bar.step(step, {})
    assert "step 8/10" in stream.getvalue() and "ETA 10 s" in stream.getvalue()


def test_the_eta_leaves_out_steps_that_compiled_and_the_validation_before_the_first(clock):
    stream = io.StringIO()
    bar = progress(stream, clock)
    for step, seconds, compiled in ((0, 500, True), (1, 90, True), (2, 30, True), (3, 2, False)):
        clock.now += seconds
        bar.step(step, {}, compiled=compiled)
    before, first, second, third = stream.getvalue().splitlines()
    assert before.endswith("8 min 20 s") and "ETA" not in before
    assert first.endswith("ETA after the next step")
    assert second.endswith("ETA 4 min 00 s")  # nothing better is known than 30 s for each of 8
    assert third.endswith("ETA 14 s")
    clock.now += 40
    bar.step(4, {}, compiled=True)
    assert stream.getvalue().endswith("40.0 s/step  ETA 12 s\n")
    clock.now += 2
    bar.step(10, {})
    assert stream.getvalue().endswith("step 10/10    2.0 s/step\n")


@pytest.mark.parametrize(
    ("validates", "total", "left"), [(4, 10, 7 * 2 + 3 * 30), (0, 10, 7 * 2 + 30), (5, 10, 74)]
)
def test_the_eta_counts_steps_and_validations_apart(clock, validates, total, left):
    stream = io.StringIO()
    bar = Progress(total, validates=validates, stream=stream, clock=clock, heartbeat=0)
    for step, validation in ((0, 40), (1, 0), (2, 30), (3, 0)):
        clock.now += 2 + validation
        bar.step(step, {}, validation=validation)
    # Not yet known better after step 1 than from the validation before the first.
    assert stream.getvalue().endswith(f"2.0 s/step  ETA {duration(left)}\n")
    clock.now += 32
    bar.step(total, {}, validation=30)
    assert "ETA" not in stream.getvalue().splitlines()[-1]


def test_the_closing_line_tells_first_last_and_best_accuracy(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "loss": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert accuracy_summary(path) == "accuracy: not measured in this run"
    path.write_text('{"step": 3, "valid/accuracy": 0.5}\n')
    assert accuracy_summary(path).startswith("accuracy 0.5000 after 3 updates, measured once")
    for row, accuracy in zip(rows, (0.25, 0.5, 0.875, 0.875), strict=False):
        row["valid/accuracy"] = accuracy
    rows[3]["valid/accuracy"] = 0.75
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert accuracy_summary(path) == (
        "accuracy 0.2500 -> 0.7500 after 3 updates (best 0.8750 at step 2)"
    )


def test_a_terminal_gets_one_line_that_is_rewritten(clock):
    stream = Terminal()
    bar = progress(stream, clock)
    clock.now += 100
    bar.step(1, {"loss": 1.0})
    clock.now += 1
    bar.step(2, {})
    bar.close()
    first, second = stream.getvalue().split("\r")[1:]
    assert stream.getvalue().count("\n") == 1
    assert len(second.rstrip("\n")) >= len(first)  # the longer line is wiped


def test_a_line_never_wraps(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    bar = progress(stream, clock)
    clock.now += 1
    bar.step(1, {f"figure_{i}": i / 3 for i in range(20)})
    assert len(stream.getvalue().strip("\r")) < 40


def test_the_heartbeat_tells_stage_seconds_and_pending_ids(clock):
    stream = io.StringIO()
    bar = progress(stream, clock)
    bar.stage("verify", lambda: {f"3/s{i}": 1.0 for i in range(8)})
    clock.now += 29
    bar.beat()
    assert stream.getvalue() == ""
    clock.now += 11
    bar.beat()
    bar.beat()
    assert stream.getvalue() == ("verify: 40 s, waiting for 8: 3/s0, 3/s1, 3/s2, ...\n")
    clock.now += 30
    bar.beat()
    assert stream.getvalue().splitlines()[1].startswith("verify: 1 min 10 s")


def test_a_long_stage_that_is_named_again_and_again_keeps_beating(clock):
    stream = io.StringIO()
    bar = progress(stream, clock)
    for i in range(50):
        bar.stage("rollout", lambda i=i: [f"row{i}"])
        clock.now += 1
        bar.beat()
    assert stream.getvalue() == "rollout: 30 s, waiting for 1: row29\n"


def test_news_put_the_heartbeat_off(clock):
    stream = io.StringIO()
    bar = progress(stream, clock)
    for report in (lambda: bar.step(1, {}), lambda: bar.note("saved")):
        clock.now += 29
        report()
        lines = stream.getvalue()
        clock.now += 2
        bar.beat()
        assert stream.getvalue() == lines
    assert stream.getvalue().splitlines()[-1] == "saved"


def test_ids_that_change_meanwhile_do_not_stop_the_heartbeat(clock):
    def changing():
        raise RuntimeError("dictionary changed size during iteration")

    stream = io.StringIO()
    bar = progress(stream, clock)
    bar.stage("rollout", changing)
    clock.now += 31
    bar.beat()
    assert stream.getvalue() == "rollout: 31 s\n"


def test_the_thread_beats_on_its_own_and_ends_with_close():
    beaten = threading.Event()

    class Stream(io.StringIO):
        def write(self, text):
            beaten.set()
            return super().write(text)

    stream = Stream()
    with Progress(3, stream=stream, heartbeat=0.01) as bar:
        bar.stage("compiling decode")
        assert beaten.wait(20)
    assert stream.getvalue().startswith(("starting", "compiling decode"))
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_quiet_prints_nothing(clock):
    stream = Terminal()
    bar = Progress(3, stream=stream, quiet=True, clock=clock, heartbeat=0.01)
    clock.now += 50
    bar.step(1, {})
    bar.note("saved")
    bar.beat()
    assert stream.getvalue() == ""
    bar.note("WARNING: heard all the same", quiet=False)
    assert "heard all the same" in stream.getvalue()
    bar.close()
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_a_note_stays_above_the_status_line(clock):
    stream = Terminal()
    bar = progress(stream, clock)
    clock.now += 1
    bar.step(1, {})
    bar.note("checkpoint 1 saved")
    kept, _, status = stream.getvalue().rpartition("\n")
    assert kept.split("\r")[-1].startswith("checkpoint 1 saved")
    assert status.strip("\r").startswith("step 1/10")


def test_logging_leaves_the_root_logger_alone():
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    stream = io.StringIO()
    setup_logging(stream)
    setup_logging(stream)
    logger.info("hello")
    logging.getLogger("sage_jax.pool").warning("careful")
    setup_logging(stream, quiet=True)
    logger.info("unheard")
    assert stream.getvalue() == "hello\ncareful\n"
    assert (list(root.handlers), root.level) == before


@pytest.mark.parametrize(
    "seconds, text", [(0, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text
