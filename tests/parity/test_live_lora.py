"""Live comparison with PEFT: its adapters load here, ours load there, with equal logits."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch absent: install the 'parity' extra")
hugging = pytest.importorskip("peft", reason="peft absent: install the 'parity' extra")

import jax  # noqa: E402
from greedy import pad  # noqa: E402
from make_goldens import PROMPTS, ROPE, build, reference  # noqa: E402

from sage_jax.models import hf, lora, peft, qwen  # noqa: E402

pytestmark = pytest.mark.parity

SETTINGS = lora.LoraSettings(4, 12.0)


@pytest.fixture(params=["qwen2", "qwen3"])
def model(request, tmp_path):
    """A transformers model and its folder, which PEFT records as the base."""
    fields = {"rope_parameters": ROPE, "head_dim": 8} if request.param == "qwen3" else {}
    made = build(request.param, {"rope_parameters": ROPE, **fields})
    made.save_pretrained(tmp_path / "base")
    made.name_or_path = made.config._name_or_path = str(tmp_path / "base")
    return made, tmp_path / "base"


def ours(params, cfg):
    tokens_bt, _ = pad(PROMPTS, max(map(len, PROMPTS)))
    return np.asarray(qwen.head_logits(params, cfg, qwen.forward(params, cfg, tokens_bt)))


def test_an_adapter_of_peft_loads_here(model, tmp_path):
    made, folder = model
    plain = reference(made)[0]
    settings = hugging.LoraConfig(
        r=4, lora_alpha=12, target_modules=list(lora.TARGETS), task_type="CAUSAL_LM"
    )
    tuned = hugging.get_peft_model(made, settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in tuned.named_parameters():
            if "lora_" in name:
                x.copy_(torch.randn(x.shape, generator=generator) * 0.3)
    want = reference(tuned)[0]
    tuned.save_pretrained(tmp_path / "adapter")
    params, cfg = hf.load(folder)
    base = peft.Base(cfg, str(folder), lora.fingerprint(params))
    adapter = peft.load(tmp_path / "adapter", base, SETTINGS)
    got = ours(lora.attach(params, lora.scaled(adapter, SETTINGS.scale)), cfg)
    assert np.abs(got - want).max() < 1e-4
    assert np.abs(got - plain).max() > 0.1


def test_an_adapter_of_ours_loads_in_peft(model, tmp_path):
    made, folder = model
    params, cfg = hf.load(folder)
    adapter = lora.init(cfg, SETTINGS.rank, jax.random.key(1))
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    base = peft.Base(cfg, str(folder), lora.fingerprint(params))
    out = peft.export(adapter, base, SETTINGS, tmp_path / "adapter")
    tuned = hugging.PeftModel.from_pretrained(made, out).eval()
    got = ours(lora.attach(params, lora.scaled(adapter, SETTINGS.scale)), cfg)
    assert np.abs(got - reference(tuned)[0]).max() < 1e-4
