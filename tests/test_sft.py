"""Supervised fine-tuning: what is learned from, how batches are cut, resuming, and bad files."""

import json
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax import config as schema
from sage_jax import modes
from sage_jax import sft as module
from sage_jax.core.tokens import Tokens
from sage_jax.models import hf, qwen
from sage_jax.sft import Example, SftSettings, end_of_turn, sft, stream
from sage_jax.tasks.tiny_tokenizer import CONFIG, write_folder

ROW = {"messages": [{"role": "user", "content": "solve: 7"}], "response": "<answer>7</answer>"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder without weights, smaller than the packaged one."""
    folder = tmp_path_factory.mktemp("base")
    write_folder(folder)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | CONFIG | small | heads))
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    return folder


def settings(base, **changes) -> SftSettings:
    values = {
        "model_path": str(base),
        "data": str(base / "rows.jsonl"),
        "from_scratch": True,
        "steps": 30,
        "batch": 2,
        "micro_rows": 2,
        "length": 16,
        "lr": 3e-2,
        "warmup_steps": 2,
    }
    return SftSettings(**values | changes)


@pytest.fixture(scope="module")
def gradients(base):
    """(loss, gradients) of one batch at the random starting weights."""
    params, cfg = module._start(settings(base))
    programs = module.make_programs(settings(base), cfg, module.make_optimizer(settings(base)))

    def of(examples, micro_rows=2):
        micros, count = module._batch(examples, settings(base, micro_rows=micro_rows))
        acc = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        for micro in micros:
            acc = programs[0](params, acc, micro, count)
        return acc

    return of


def test_a_model_fitted_to_a_row_writes_its_response_and_ends_the_turn(base, tmp_path):
    out = sft(settings(base), tmp_path)
    assert out is not None
    params, cfg = hf.load(out)
    example = next(stream(settings(base), Tokens.load(out)))
    hidden_btd = qwen.forward(params, cfg, jnp.array([example.prompt + example.response]))
    greedy_t = jnp.argmax(qwen.head_logits(params, cfg, hidden_btd), -1)[0]
    assert greedy_t[len(example.prompt) - 1 : -1].tolist() == example.response


def test_prompt_tokens_are_context_only_and_the_end_of_turn_is_learned(gradients):
    loss, _ = gradients([Example([5, 6, 7], [8, 9])])
    first, _ = gradients([Example([5, 6, 7], [8])])
    last, _ = gradients([Example([5, 6, 7, 8], [9])])
    np.testing.assert_allclose(2 * loss, first + last, rtol=1e-5)
    assert abs(float(loss - first)) > 1e-6


def test_micro_batches_and_padding_change_nothing(gradients):
    examples = [Example([5, 6, 7], [8, 9]), Example([4], [3] * 12), Example([1, 2], [3])]
    together, apart = gradients(examples, micro_rows=4), gradients(examples)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), together, apart)


def test_a_stopped_run_continues_to_the_same_weights(base, tmp_path):
    rows = [ROW | {"response": f"<answer>{n}</answer>"} for n in range(5)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = settings(base, steps=6, data=str(path))
    whole = sft(same, tmp_path / "whole")
    asked = iter([False, False, True])
    assert sft(same, tmp_path / "parts", lambda: next(asked)) is None
    resumed = sft(same, tmp_path / "parts")
    assert whole is not None and resumed is not None
    first, second = (p / "model.safetensors" for p in (whole, resumed))
    assert first.read_bytes() == second.read_bytes()


@pytest.fixture
def said(monkeypatch):
    """What is logged, in order."""
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            module.logger, level, lambda text, *args: lines.append(text % args if args else text)
        )
    return lines


def test_start_stop_and_resumption_are_told_with_what_has_changed(base, tmp_path, said):
    asked = iter([False, True])
    assert sft(settings(base, steps=6), tmp_path, lambda: next(asked)) is None
    assert said[0] == (
        f"sft of random weights (qwen3) on {base}/rows.jsonl: 2 rows an update, a checkpoint every "
        f"500; the model will be {tmp_path}/model"
    )
    assert said[1].startswith("sft step 1/6  loss ") and "  ETA " in said[1]
    assert said[2:] == [f"saved step 2 in {tmp_path}; the same command continues"]
    said.clear()
    changed = settings(base, steps=3, lr=0.5, clip_norm=2.0, log_every=7, checkpoint_every=9)
    assert sft(changed, tmp_path) is not None
    assert said[1] == f"resumed at step 2 of 3 in {tmp_path}"
    assert sorted(said[2:-1]) == [
        "continues with another optim.clip_norm: 2.0, not 1.0",
        "continues with another sft.lr: 0.5, not 0.03",
        "continues with another sft.steps: 3, not 6",
    ]
    assert said[-1].startswith("sft step 3/3") and said[-1].endswith("ETA 0 s")


def test_a_checkpoint_from_before_settings_were_saved_continues(base, tmp_path, said):
    real = module.Checkpoints.save
    asked = iter([True])
    with pytest.MonkeyPatch.context() as old:
        old.setattr(
            module.Checkpoints, "save", lambda self, step, tree, _, a: real(self, step, tree, {}, a)
        )
        assert sft(settings(base, steps=3), tmp_path, lambda: next(asked)) is None
    assert sft(settings(base, steps=3, lr=0.5), tmp_path) is not None
    assert not [line for line in said if line.startswith("continues with")]


def mode_config(base, steps):
    c = schema.base()
    c.model.path, c.mesh.data, c.report.quiet = str(base), 1, True
    c.sft.data, c.sft.from_scratch, c.sft.steps = str(base / "rows.jsonl"), True, steps
    c.sft.batch, c.sft.length, c.sft.warmup_steps, c.optim.micro_rows = 2, 16, 0, 2
    return schema.validate(c)


def test_the_mode_says_where_the_model_is_and_what_is_left_to_do(base, tmp_path, capsys):
    def ends(steps):
        job = modes.Job(mode_config(base, steps), {}, tmp_path, Path(), Path())
        assert modes.run_sft(job, lambda: False) == 0
        return capsys.readouterr().out

    its_model = f"the model is {tmp_path}/model"
    assert ends(2) == f"finished 2 steps; {its_model}\n"
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert f"{tmp_path} is finished: step 2 of sft.steps=2; raise sft.steps" in ends(2)
    said = ends(1)
    assert f"{tmp_path} is past sft.steps=1: it has reached step 2, nothing was done" in said
    assert said.endswith(f"{its_model}\n") and weights.stat().st_mtime_ns == before
    (tmp_path / "model" / "config.json").unlink()  # an export that was killed is made up for
    assert ends(2) == f"finished 2 steps; {its_model}\n"
    assert (tmp_path / "model" / "config.json").is_file()


def test_demonstrations_come_through_the_prompts_and_the_chat_template(base):
    tokens = Tokens.load(base)
    example = next(stream(settings(base, data="tiny_world", length=128), tokens))
    text = tokens.decode(example.prompt)
    assert text.split(": ")[0] in ("new", "plan", "rate", "solve", "solve f")
    assert example.prompt[-1] == tokens.encode("<|assistant|>")[0]
    assert example.response[-1] == end_of_turn(tokens) == tokens.encode("<|im_end|>")[0]


def test_rows_longer_than_the_limit_are_left_out(base):
    tokens = Tokens.load(base)
    rows = islice(stream(settings(base, data="tiny_world", length=32), tokens), 50)
    assert max(len(e.prompt) + len(e.response) for e in rows) <= 32
    with pytest.raises(ValueError, match="sft.length=8"):
        next(stream(settings(base, length=8), tokens))


BAD_ROWS = [
    ("not json", "Expecting value"),
    ('{"messages": []}', "response is None"),
    ({**ROW, "response": 5}, "response is 5: give text"),
    ({**ROW, "response": ["a"]}, "response is ['a']"),
    ({**ROW, "messages": []}, "messages is []"),
    ({**ROW, "messages": "solve"}, "messages is 'solve'"),
    ({**ROW, "messages": [{"role": "user"}]}, "text under role and content"),
    ({**ROW, "messages": [{"role": "user", "content": 7}]}, "text under role and content"),
    ({**ROW, "messages": ["solve"]}, "text under role and content"),
    ("[1]", "not [1]"),
    ("null", "not None"),
    (
        '{"messages": [{"role": "user", "content": "a"}], "response": "\\ud800"}',
        "half of a surrogate pair",
    ),
    ("[" * 100_000, "recursion"),
]


def test_bad_lines_are_all_named(base, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row, _ in BAD_ROWS]
    path.write_bytes("\n".join([json.dumps(ROW), *lines]).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match="mend or delete") as error:
        stream(settings(base, data=str(path)), Tokens.load(base))
    for number, (_, part) in enumerate(BAD_ROWS, 2):
        assert any(
            f"rows.jsonl:{number}: " in line and part in line
            for line in str(error.value).splitlines()
        ), (number, part)
    assert f"rows.jsonl:{len(BAD_ROWS) + 2}: not a JSON object ('utf-8'" in str(error.value)
    with pytest.raises(ValueError, match="neither 'tiny_world' nor a JSONL file"):
        stream(settings(base, data=str(tmp_path / "absent")), Tokens.load(base))


def test_blank_lines_marks_and_odd_separators_do_no_harm(base, tmp_path):
    tokens = Tokens.load(base)
    path = tmp_path / "rows.jsonl"
    row = {**ROW, "response": "7\u2028"}
    text = "\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n\n"
    path.write_text(text, encoding="utf-8", newline="")
    assert next(stream(settings(base, data=str(path)), tokens)).response
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no rows"):
        stream(settings(base, data=str(path)), tokens)


def test_rows_left_out_for_their_length_are_told(base, tmp_path, said):
    path = tmp_path / "rows.jsonl"
    rows = [ROW, {**ROW, "response": "7" * 100}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert next(stream(settings(base, data=str(path)), Tokens.load(base)))
    assert said == [
        "WARNING: sft.data: 1 of 2 rows are longer than sft.length=16 tokens and left out"
    ]


def test_a_bad_line_is_told_before_the_weights_are_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_start", lambda settings: pytest.fail("loaded the model"))
    path = tmp_path / "rows.jsonl"
    path.write_text("no json\n")
    with pytest.raises(ValueError, match="rows.jsonl:1"):
        sft(settings(base, data=str(path)), tmp_path)
