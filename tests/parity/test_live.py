"""Live comparison with transformers and torch: logits, greedy tokens, export."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch absent: install the 'parity' extra")

import jax.numpy as jnp  # noqa: E402
from greedy import greedy, pad  # noqa: E402
from make_goldens import NEW_TOKENS, PROMPTS, ROPE, SHORT_ROPE, build, reference  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from sage_jax.models import hf, qwen  # noqa: E402

pytestmark = pytest.mark.parity

CASES = {
    "qwen2": ("qwen2", {"rope_parameters": SHORT_ROPE}, "1GB"),
    "qwen2 tied, own head_dim": (
        "qwen2",
        {"rope_parameters": ROPE, "tie_word_embeddings": True, "head_dim": 6},
        "1GB",
    ),
    "qwen2.5 tied, one kv head": (
        "qwen2",
        {"rope_parameters": ROPE, "tie_word_embeddings": True, "num_key_value_heads": 1},
        "8KB",
    ),
    "qwen2.5 no grouping": (
        "qwen2",
        {"rope_parameters": ROPE, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        "8KB",
    ),
    "qwen3": ("qwen3", {"rope_parameters": ROPE, "head_dim": 8}, "8KB"),
    "qwen3 tied": (
        "qwen3",
        {"rope_parameters": ROPE, "head_dim": 12, "tie_word_embeddings": True},
        "1GB",
    ),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def checkpoint(request, tmp_path):
    family, fields, shard_size = CASES[request.param]
    model = build(family, fields, seed=len(request.param))
    model.save_pretrained(tmp_path / "source", max_shard_size=shard_size)
    sharded = (tmp_path / "source" / hf.INDEX).is_file()
    assert sharded == (shard_size == "8KB")
    return model, tmp_path / "source"


def test_logits_and_greedy_tokens_equal_transformers(checkpoint):
    model, folder = checkpoint
    logits, tokens, gap = reference(model)
    assert gap > 1e-3, "the reference itself is undecided: choose another seed"
    params, cfg = hf.load(folder)
    tokens_bt, _ = pad(PROMPTS, logits.shape[1])
    ours = qwen.head_logits(params, cfg, qwen.forward(params, cfg, tokens_bt))
    assert np.abs(np.asarray(ours) - logits).max() < 1e-4
    np.testing.assert_array_equal(greedy(params, cfg, PROMPTS, NEW_TOKENS), tokens)


def test_long_positions_equal_transformers(checkpoint):
    model, folder = checkpoint
    params, cfg = hf.load(folder)
    tokens_bt = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, 600))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens_bt)).logits.numpy()
    ours = qwen.head_logits(params, cfg, qwen.forward(params, cfg, jnp.asarray(tokens_bt)))
    assert np.abs(np.asarray(ours) - theirs).max() < 1e-4


def test_export_loads_in_transformers_with_equal_logits(checkpoint, tmp_path):
    model, folder = checkpoint
    params, cfg = hf.load(folder)
    out = hf.export(params, cfg, tmp_path / "out", folder, shard_bytes=9_000)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    before, _, _ = reference(model)
    after, _, _ = reference(theirs.eval())
    np.testing.assert_array_equal(after, before)
    assert AutoConfig.from_pretrained(out).eos_token_id == 63
