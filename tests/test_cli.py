"""The front door as a user meets it: exit codes, messages, files in and out."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sage_jax import main as front
from sage_jax import modes
from sage_jax import offline as offline_module
from sage_jax.config import ConfigError, base, validate
from sage_jax.core.tokens import Tokens
from sage_jax.main import MODES, main

ROOT = Path(__file__).parent.parent


def run(*args, cwd=ROOT, **env):
    """`python -m sage_jax.main ARGS` with one device."""
    environment = {**os.environ, "XLA_FLAGS": "", **env}
    return subprocess.run(
        [sys.executable, "-m", "sage_jax.main", *args],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def offline(mode, folder, tmp_path, rows, **fields):
    """One of the file modes in this process: (exit code, output rows)."""
    c = base()
    c.model.path, c.mesh.data, c.report.quiet = str(folder), 1, True
    c.rollout.slots, c.optim.micro_rows = 4, 4
    for name, value in fields.items():
        group, leaf = name.split("__")
        c[group][leaf] = value
    source, target = tmp_path / "in.jsonl", tmp_path / f"{mode}.jsonl"
    source.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    job = modes.Job(validate(c), {}, tmp_path, source, target)
    code = modes.MODES[mode](job, lambda: False)
    return code, [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--config=configs/tiny.py", "--config.optim.learnin_rate=1"), "optim.lr"),
        (
            ("--config=configs/tiny.py", "--config.train.steps=ten"),
            "steps='ten': give a whole number",
        ),
        (("--mode=eval", "--config=configs/tiny.py", "--workdir=doc"), "did you mean docs?"),
        (("--mode=export", "--workdir=gone", "--output=x"), "gone: no such folder; give that of a"),
        (("--config=configs/tiny.py", "--config.optim.lr=-1"), "[0, 1]"),
        (("--config=configs/none.py",), "none.py"),
        (("--mode=train",), "--config=FILE"),
        ((), "--config=FILE, such as configs/tiny.py; --help tells more"),
        (("--mode=trian", "--config=configs/tiny.py"), "did you mean train?"),
        (("--config=configs/tiny.py", "--config.method.name=saeg"), "did you mean sage?"),
        (("--mode=generate", "--output=x"), "--input"),
        (("--mode=score", "--input=missing.jsonl", "--output=x"), "missing.jsonl"),
        (("--mode=export",), "--output"),
        (("--config=configs/tiny.py", "--worksdir=x"), "worksdir"),
        (("--config=configs/tiny.py", "extra"), "extra"),
        (("--config=configs/tiny.py", "--workdir=README.md"), "is a file, not a folder"),
        (("--config=configs/tiny.py", "--workdir=README.md/run"), "README.md is a file"),
        (("--config=configs/tiny.py", f"--workdir={'x' * 300}"), "too long"),
        (("--mode=score", "--input=README.md", "--output=docs"), "is a folder, not a file"),
        (("--mode=generate", "--input=README.md", "--output=./README.md"), "is the input"),
        (("--mode=export", "--output=docs"), "--output=docs: is not empty; choose a new folder"),
        (("--mode=export", f"--output={'x' * 300}"), "too long"),
    ],
)
def test_a_bad_command_line_ends_with_2_and_one_clear_line(args, part):
    result = run(*args)
    assert result.returncode == 2, result.stderr
    assert part in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "hinted"),
    [
        (("--config=configs/tiny_sft.py",), True),
        (("--config=configs/tiny_sft.py", "--mode=eval"), False),
        (("--config=configs/tiny_sft.py", "--mode=sft", "--config.lora.rank=4"), False),
        (("--config=configs/tiny.py", "--config.train.steps=-1"), False),
    ],
)
def test_a_recipe_for_sft_that_training_refuses_is_told_apart(tmp_path, args, hinted):
    result = run(*args, f"--workdir={tmp_path}/run")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    said = "--config=configs/tiny_sft.py sets sft.batch, sft.from_scratch, sft.practice, ..., which"
    assert (said in result.stderr) == hinted, result.stderr
    assert ("which only --mode=sft uses" in result.stderr) == hinted


@pytest.mark.parametrize(
    "flag", ["--help", "-h", "--helpshort", "--helpfull", "-help", "--help=true"]
)
def test_help_tells_modes_flags_and_examples_and_is_no_error(flag, capsys):
    assert main(["sage_jax.main", "--config=configs/tiny.py", flag]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("usage: python -m sage_jax.main") and not out.err
    for name in [f"  {mode} " for mode in MODES] + ["--config.a.b", "--workdir", "--mode=export"]:
        assert name in out.out
    assert set(MODES) == set(modes.MODES)


def test_bad_sources_are_all_named_before_a_model_is_loaded(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "domain": "math", "question": "1+1?"}\nnot json\n')
    result = run(
        "--config=configs/tiny.py",
        f"--config.tasks.seeds={bad},{tmp_path}/absent.jsonl",
        f"--workdir={tmp_path}/run",
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for part in ("bad.jsonl:1", "bad.jsonl:2", "absent.jsonl", "answer"):
        assert part in result.stderr, result.stderr


def test_generate_makes_no_more_slots_than_there_are_rows_and_attends_as_told(
    tiny_folder, tmp_path, monkeypatch
):
    made = []
    real = offline_module.Engine

    def engine(cfg, **settings):
        made.append((settings["slots"], settings["prefill_rows"], settings["attend"]))
        return real(cfg, **settings)

    monkeypatch.setattr(offline_module, "Engine", engine)
    row = {"id": "a", "prompt": "ana has 7", "n": 3, "max_new_tokens": 4}
    fields = {"model__attention": "blocked"}
    assert offline("generate", tiny_folder, tmp_path, [row], **fields)[0] == 0
    assert made == [(3, 3, "blocked")]


def test_generate_returns_every_sample_in_input_order(tiny_folder, tmp_path):
    tokens = Tokens.load(tiny_folder)
    rows = [
        {"id": "text", "prompt": "ana has 7", "n": 3, "max_new_tokens": 9},
        {"id": "chat", "messages": [{"role": "user", "content": "ana has 7"}], "temperature": 0.7},
        {"id": "ids", "tokens": [5, 6, 7], "temperature": 0, "max_new_tokens": 5, "stop_ids": []},
        {"id": "more", "prompt": "ben has 9", "top_p": 0.5, "seed": 3, "max_new_tokens": 40},
    ]
    code, out = offline("generate", tiny_folder, tmp_path, rows)
    assert code == 0
    assert [(r["id"], r["sample"]) for r in out] == [
        ("text", 0), ("text", 1), ("text", 2), ("chat", 0), ("ids", 0), ("more", 0),
    ]  # fmt: skip
    for row in out:
        assert row.keys() == {"id", "sample", "tokens", "logps", "text", "finish"}
        assert len(row["tokens"]) == len(row["logps"]) and row["finish"] in ("stop", "length")
        assert row["text"] == tokens.decode(row["tokens"])
        if row["finish"] == "stop":
            assert row["tokens"][-1] in tokens.stop_ids
    assert len({tuple(r["tokens"]) for r in out[:3]}) == 3
    assert len(out[4]["tokens"]) == 5 and out[4]["finish"] == "length"
    # Randomness is f(seed, id, sample, position): company, order and n change nothing.
    code, again = offline("generate", tiny_folder, tmp_path, [rows[3], {**rows[0], "n": 2}])
    assert [r["tokens"] for r in again] == [out[5]["tokens"], out[0]["tokens"], out[1]["tokens"]]


def test_score_agrees_with_what_generate_reported(tiny_folder, tmp_path):
    prompts = [{"id": f"p{i}", "tokens": [5 + i, 6, 7], "max_new_tokens": 4 + i} for i in range(5)]
    for i, temperature in enumerate((1.0, 0.6, 1.3, 0, 1.0)):
        prompts[i]["temperature"] = temperature
    _, sampled = offline("generate", tiny_folder, tmp_path, prompts)
    rows = []
    for prompt, row in zip(prompts, sampled, strict=True):
        rows.append({"id": row["id"], "tokens": prompt["tokens"] + row["tokens"]})
        if prompt["temperature"]:
            rows[-1]["temperature"] = prompt["temperature"]
    rows.append({"id": "single", "tokens": [3]})
    code, scored = offline("score", tiny_folder, tmp_path, rows)
    assert code == 0 and [r["id"] for r in scored] == [r["id"] for r in rows]
    for row, sample in zip(scored, sampled, strict=False):
        assert len(row["logps"]) == 2 + len(sample["tokens"])
        np.testing.assert_allclose(row["logps"][2:], sample["logps"], atol=1e-5)
    assert scored[-1]["logps"] == []


BAD_GENERATE = [
    ("{broken\n", "not a JSON object"),
    ({"prompt": "x"}, "id is missing"),
    ({"id": "a"}, "exactly one of"),
    ({"id": "b", "prompt": "x", "tokens": [1]}, "exactly one of"),
    ({"id": "c", "prompt": ""}, "no tokens"),
    ({"id": "d", "tokens": [99999]}, "99999"),
    ({"id": "e", "prompt": "x", "temperature": -1}, "temperature=-1"),
    ({"id": "f", "prompt": "x", "top_p": 0}, "top_p=0"),
    ({"id": "f2", "prompt": "x", "top_k": -1}, "top_k=-1"),
    ({"id": "f3", "prompt": "x", "min_p": 1.5}, "min_p=1.5"),
    ({"id": "g", "prompt": "x", "n": 0}, "n=0"),
    ({"id": "h", "prompt": "x", "max_new_tokens": 10**6}, "positions"),
    ({"id": "i", "prompt": "x", "temprature": 1}, "temprature"),
    ({"id": "j", "messages": [{"role": "user"}]}, "content"),
    ({"id": "k", "prompt": 5}, "prompt=5"),
    ({"id": "good", "prompt": "y"}, "used on line"),
    ('{"id": "\\ud800", "prompt": "x"}\n', "half of a surrogate pair"),
    ('{"id": "l", "prompt": "x\\ud800"}\n', "half of a surrogate pair"),
    ("[" * 100_000 + "\n", "recursion"),
    ({"id": "m", "prompt": "x", "temperature": 10**400}, "temperature=1000"),
    ({"id": "n", "prompt": "x", "temperature": 1e-30}, "temperature=1e-30"),
    ({"id": "o", "prompt": "x", "n": 10**9}, "n=1000000000"),
    ({"id": "p", "messages": []}, "messages is empty"),
    ({"id": "q", "prompt": ["x"] * 1000}, "expected str"),
    ("[1, 2]\n", "not a JSON object"),
]


def test_bad_lines_are_named_and_the_rest_is_done(tiny_folder, tmp_path, capsys):
    good = {"id": "good", "prompt": "ana has 7", "max_new_tokens": 3}
    code, out = offline(
        "generate", tiny_folder, tmp_path, [good, *(row for row, _ in BAD_GENERATE)]
    )
    assert code == 1 and [r["id"] for r in out] == ["good"]
    lines = capsys.readouterr().err.splitlines()
    for number, (_, part) in enumerate(BAD_GENERATE, 2):
        assert any(f"in.jsonl:{number}: " in x and part in x for x in lines), (number, part, lines)
    rows = [
        {"id": "a", "tokens": []},
        {"id": "b", "tokens": [1, -1]},
        {"id": "c", "tokens": [1, 2]},
    ]
    rows.append({"id": "d", "tokens": [1, 2], "temperature": 0})
    code, out = offline("score", tiny_folder, tmp_path, rows)
    assert code == 1 and [r["id"] for r in out] == ["c"]
    err = capsys.readouterr().err
    assert all(f"in.jsonl:{n}: " in err for n in (1, 2, 4))


def test_a_byte_order_mark_and_carriage_returns_do_no_harm(tiny_folder, tmp_path):
    line = '{"id": "a", "prompt": "ana has 7", "max_new_tokens": 3}'
    want = offline("generate", tiny_folder, tmp_path, [line + "\n"])
    assert want[0] == 0
    assert offline("generate", tiny_folder, tmp_path, [f"\ufeff{line}\r\n\r\n"]) == want


def test_top_p_near_zero_takes_the_best_token(tiny_folder, tmp_path):
    row = {"prompt": "ana has 7", "max_new_tokens": 6}
    greedy = [{**row, "id": "a", "temperature": 0}]
    rows = [{**row, "id": f"p{p}", "top_p": p} for p in (1e-300, 1e-50, 1e-9)]
    _, (best, *others) = offline("generate", tiny_folder, tmp_path, greedy + rows)
    assert [o["tokens"] for o in others] == [best["tokens"]] * 3


@pytest.mark.parametrize("mode", ["generate", "score"])
def test_a_stop_request_ends_the_file_modes_too(tiny_folder, tmp_path, mode):
    c = base()
    c.model.path, c.mesh.data, c.report.quiet = str(tiny_folder), 1, True
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "tokens": [5, 6]}\n')
    job = modes.Job(validate(c), {}, tmp_path, source, tmp_path / "out.jsonl")
    assert modes.MODES[mode](job, lambda: True) == modes.TERMINATED


def test_the_file_modes_end_with_where_the_output_is(tiny_folder, tmp_path, capsys):
    row = {"id": "a", "tokens": [5, 6]}
    for mode in ("generate", "score"):
        offline(mode, tiny_folder, tmp_path, [row])
        out = capsys.readouterr()
        assert not out.out  # which may be the output itself
        assert out.err.splitlines()[-1] == f"wrote {tmp_path}/{mode}.jsonl"
        offline(mode, tiny_folder, tmp_path, [row, "{"])
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == f"wrote {tmp_path}/{mode}.jsonl; bad lines left out: 1"


def test_a_full_disk_is_named_and_is_no_bad_line(tiny_folder, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "tokens": [5, 6]}\n')
    model = f"--config.model.path={tiny_folder}"
    result = run("--mode=score", model, f"--input={source}", "--output=/dev/full")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "sage_jax: /dev/full: No space left on device" in result.stderr


def test_an_evaluation_of_a_named_model_stays_out_of_the_run_of_that_config(tiny_folder, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "eval.json").write_text("of the run")
    args = ("--mode=eval", "--config=configs/tiny.py", f"--config.model.path={tiny_folder}")
    short = ("--config.valid.limit=1", "--config.sandbox.require_level=none")
    done = run(*args, *short, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    folder = Path("runs") / f"tiny_eval_{tiny_folder.parent.name}-model"
    said = f"wrote {folder}/eval.json and the judged answers beside it: eval_0_valid.jsonl"
    assert done.stdout.splitlines()[-1] == said
    assert json.loads((tmp_path / folder / "eval.json").read_text())["model"] == str(tiny_folder)
    assert len((tmp_path / folder / "eval_0_valid.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "runs" / "tiny" / "eval.json").read_text() == "of the run"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, "tiny"),
        ({"model.path": "Qwen/Qwen3-4B"}, "tiny_eval_Qwen-Qwen3-4B"),
        ({"model.path": "asset:tiny-qwen3"}, "tiny_eval_asset-tiny-qwen3"),
        ({"model.path": "tuned/model"}, "tiny_eval_tuned-model"),
        ({"model.path": "."}, "tiny_eval_{0.parent.name}-{0.name}"),
        ({"lora.path": "my adapters/b", "model.path": "a"}, "tiny_eval_my-adapters-b"),
        ({"lora.path": ""}, "tiny"),
    ],
)
def test_every_named_model_has_a_place_for_its_evaluation(tmp_path, monkeypatch, given, place):
    monkeypatch.chdir(tmp_path)
    assert front.eval_place("tiny", given) == Path("runs") / place.format(tmp_path)


def test_what_eval_reads_for_want_of_a_checkpoint_is_said(tiny_folder, tmp_path, capsys):
    c = base()
    c.model.path, c.mesh.data, c.report.quiet = str(tiny_folder), 1, True
    job = modes.Job(validate(c), {}, tmp_path / "none", Path(), tmp_path / "out")
    assert modes.run_export(job, lambda: False) == 0
    out = capsys.readouterr()
    assert out.err.splitlines()[-1] == f"{tmp_path}/none holds no checkpoint: model.path is read"
    assert out.out == f"exported {tiny_folder} to {tmp_path}/out; read back and equal\n"


def test_an_empty_input_gives_an_empty_output(tiny_folder, tmp_path):
    assert offline("generate", tiny_folder, tmp_path, []) == (0, [])
    assert offline("score", tiny_folder, tmp_path, ["\n"]) == (0, [])


def test_export_writes_a_folder_that_gives_the_same_answers(tiny_folder, tmp_path):
    c = base()
    c.model.path, c.mesh.data, c.report.quiet = str(tiny_folder), 1, True
    job = modes.Job(validate(c), {}, tmp_path / "none", Path(), tmp_path / "out")
    assert modes.run_export(job, lambda: False) == 0
    rows = [{"id": "a", "prompt": "ana has 7", "max_new_tokens": 8}]
    want = offline("generate", tiny_folder, tmp_path, rows)
    assert offline("generate", tmp_path / "out", tmp_path, rows) == want


def test_a_terminated_run_saves_and_the_same_command_finishes_it(tmp_path):
    args = [
        "--config=configs/tiny.py", f"--workdir={tmp_path}", "--config.train.steps=5",
        "--config.valid.limit=2", "--config.valid.samples=0", "--config.valid.effects=0",
        "--config.method.candidates=2", "--config.method.audits=2",
        "--config.method.drawn=2", "--config.rollout.slots=16", "--config.rollout.buckets=160",
        "--config.optim.buckets=160", "--config.optim.micro_rows=16",
    ]  # fmt: skip
    command = [sys.executable, "-m", "sage_jax.main", *args]
    environment = {**os.environ, "XLA_FLAGS": ""}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("step 1/5"):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143 and "the same command continues" in err
    assert modes.newest_step(tmp_path / "checkpoints") in (1, 2, 3, 4)
    done = run(*args)
    assert done.returncode == 0 and "finished 5 steps" in done.stderr
    steps = [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5]
    result = run("--mode=eval", *args)
    assert result.returncode == 0 and "at step 5" in result.stdout, result.stderr
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((tmp_path / "eval.json").read_text())
    (suite,) = summary["results"].values()
    assert suite["accuracy"] == last["valid/accuracy"] and suite["items"] == 4
    assert run("--mode=export", f"--output={tmp_path}/hf", *args).returncode == 0
    assert Tokens.load(tmp_path / "hf").stop_ids and (tmp_path / "hf" / "config.json").is_file()


def test_a_named_work_directory_without_a_checkpoint_is_refused(tiny_folder, tmp_path):
    c = base()
    c.model.path, c.mesh.data, c.report.quiet = str(tiny_folder), 1, True
    job = modes.Job(validate(c), {}, tmp_path / "typo", Path(), tmp_path / "out", named=True)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        modes.run_export(job, lambda: False)
    assert not (tmp_path / "typo").exists()
