"""The metrics table, and the two files of a run: append, cut on resume, no NaN."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.report import episodes, metrics
from sage_jax.report.episodes import EpisodeWriter
from sage_jax.report.metrics import METRICS, SPLITS, MetricsWriter, check, cut
from sage_jax.roles import ROLES

ROOT = Path(__file__).parents[1]


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_documented_table_is_the_table_in_code():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics.markdown(), "run python -m sage_jax.report.metrics > docs/metrics.md"


def test_every_promised_metric_has_unit_and_meaning():
    promised = """step solve_rate solve_rate/candidates solve_rate/planned solve_rate/math
        solve_rate/code difficulty gate/question_pass gate/plan_pass pool/size pool/admitted
        pool/duplicates pool/invalid loss grad_norm ratio/max clip_share logp_gap/mean logp_gap/max
        masked skipped_updates tokens/generated tokens/trained padding/update live_slots
        memory/rss_gib compiles time/rollout time/verify time/update time/validate time/checkpoint
        time/total rates/tokens_per_s critic/score_question critic/score_plan verdict/correct
        verdict/timeout valid/accuracy valid/accuracy_planned valid/accuracy_math
        valid/accuracy_code valid/accuracy_wellformed valid/accuracy_sampled""".split()
    for role in ROLES:
        for name in ("reward", "parse_fail", "truncated", "length", "entropy", "zero_spread"):
            promised.append(f"{name}/{role}")
        promised += [f"adv/{role}_mean", f"adv/{role}_std"]
        promised += [f"reward/{role}/{split}" for split in SPLITS[role]]
    assert set(promised) <= set(METRICS)
    assert all(metric.unit and metric.meaning for metric in METRICS.values())
    assert not any("<" in name for name in METRICS)


def test_an_unknown_name_or_a_figure_that_is_none_is_refused():
    check({"step": 1, "loss": -0.5, "reward/solver": np.float32(1)})
    with pytest.raises(ValueError) as caught:
        check({"lss": 1.0, "loss": math.nan, "grad_norm": "big", "reward/judge": 1.0})
    for name in ("'lss'", "'loss'", "'grad_norm'", "'reward/judge'"):
        assert name in str(caught.value)


def test_missing_figures_are_absent_from_the_file(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 0, "loss": math.nan, "grad_norm": np.float32("inf"), "masked": None})
        writer.write({"step": np.int32(1), "loss": np.float32(0.5), "compiles": np.array(3)})
    assert rows(path) == [{"step": 0}, {"step": 1, "loss": 0.5, "compiles": 3}]


def test_a_step_is_written_once_and_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 3})
        for step in ({"step": 3}, {"step": 2}, {"loss": 1.0}):
            with pytest.raises(ValueError, match="after step 3"):
                writer.write(step)
    with MetricsWriter(path) as writer, pytest.raises(ValueError, match="cut the file"):
        writer.write({"step": 3})
    assert rows(path) == [{"step": 3}]


def test_rows_can_be_read_while_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 0})
        assert rows(path) == [{"step": 0}]


def test_cut_drops_later_steps_and_a_torn_line_and_keeps_bytes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 0, "loss": 1.0}\n{"loss":2,"step":1}\n'
    path.write_bytes(kept + b'{"step": 2}\n{"step": 3, "lo')
    assert cut(path, 1) == 2 and path.read_bytes() == kept
    assert cut(path, 5) == 0 and path.read_bytes() == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert [row["step"] for row in rows(path)] == [0, 1, 2]


def test_a_whole_row_without_its_newline_is_torn_too(tmp_path):
    """Else the next row would be glued to it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}')
    assert cut(path, 9) == 1 and path.read_bytes() == b'{"step": 0}\n'


def test_cut_of_nothing_and_of_a_damaged_file(tmp_path):
    assert cut(tmp_path / "none.jsonl", 3) == 0
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\nnot json\n{"step": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2"):
        cut(path, 3)
    assert path.read_bytes().count(b"\n") == 3


@settings(deadline=None)
@given(st.integers(0, 60))
def test_a_kill_at_any_byte_leaves_a_file_that_resumes(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("kill") / "metrics.jsonl"
    whole = b"".join(b'{"step": %d}\n' % step for step in range(5))
    path.write_bytes(whole[:length])
    cut(path, 2)
    assert whole.startswith(path.read_bytes())
    with MetricsWriter(path) as writer:
        writer.write({"step": 7})
    steps = [row["step"] for row in rows(path)]
    assert steps == [*range(min(3, length // len(b'{"step": 0}\n'))), 7]


def episode(**changes):
    return {
        "step": 1,
        "id": "1/c0",
        "parents": [],
        "role": "solver",
        "domain": "math",
        "prompt": "p",
        "response": "r",
        "reward_parts": {"correct": 1.0},
        **changes,
    }


def test_episodes_hold_any_text_a_model_may_write(tmp_path):
    path = tmp_path / "episodes.jsonl"
    texts = ["\ud800 half", "line\nbreak\u2028", "\x00\x7f", "数学 ½", '"quoted" \\']
    with EpisodeWriter(path) as writer:
        for text in texts:
            writer.write(episode(response=text, verdict=None, reward=1))
    lines = path.read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["response"] for line in lines] == texts
    assert "verdict" not in json.loads(lines[0])
    assert episodes.cut(path, 0) == 5


def test_bad_episodes_name_row_and_field(tmp_path):
    with EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        with pytest.raises(ValueError) as caught:
            writer.write(episode(step="1", rewrd=1.0, prompt=None, role="judge"))
        for part in ("'1/c0'", "'step' is '1'", "'rewrd'", "'prompt' is missing", "'judge'"):
            assert part in str(caught.value)
        with pytest.raises(ValueError, match="Out of range float"):
            writer.write(episode(reward=math.nan))
    assert (tmp_path / "episodes.jsonl").read_bytes() == b""


def test_a_mute_writer_checks_rows_and_leaves_the_file_to_another_process(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7}\n')
    with MetricsWriter(path, mute=True) as writer:
        writer.write({"step": 1, "loss": 0.5})
        writer.sync()
        with pytest.raises(ValueError, match="no_such_metric"):
            writer.write({"step": 2, "no_such_metric": 1})
    assert path.read_text() == '{"step": 7}\n'
