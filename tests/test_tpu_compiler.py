"""Programs compiled for TPUs that are not there: needs the 'dryrun' extra (`make dryrun-check`)."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict
from test_dryrun import small

from sage_jax import modes
from sage_jax.core import chips, hlo, traffic
from sage_jax.core.mesh import DECODE_RULES, Layout, make_mesh
from sage_jax.dryrun import mode
from sage_jax.dryrun.programs import StepPrograms
from sage_jax.models import cache as kv
from sage_jax.models import costs, qwen_params
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.rollout import decode
from sage_jax.runtime import placement

pytestmark = pytest.mark.tpu_compiler


@pytest.mark.parametrize("name", chips.TOPOLOGIES)
def test_a_topology_has_the_chips_of_its_name(name):
    devices, chip = chips.find(name)
    count = 1
    for n in name.split(":")[1].split("x"):
        count *= int(n)
    assert len(devices) == count * (2 if chip.name == "tpu7x" else 1)
    assert devices[0].platform == "tpu"


def test_the_stack_of_weights_is_not_cast_whole():
    devices, _ = chips.find("v5e:2x4")
    config = small("asset:tiny-qwen3", model__dtype="bfloat16")
    cfg = mode.read_sizes(config.model.path)
    program = StepPrograms(config, cfg, placement(config, devices)).score()
    text = program.trace().lower().compile().as_text()
    assert re.search(r"bf16\[1,\S* (convert|fusion)\(", text)
    assert not re.search(rf"bf16\[{cfg.num_layers},\d+,\d+\S* convert\(", text)


def test_the_programs_of_a_step_compile_for_a_tpu(tiny_folder, tmp_path, monkeypatch):
    from sage_jax.dryrun import search

    for name in ("most_slots", "most_micro_rows"):
        choice = search.Choice(name, 1, None)
        monkeypatch.setattr(search, name, lambda *args, choice=choice: choice)
    # 384 tokens: beyond what plain attention is used for, so that the kernel is compiled as well.
    config = small(
        tiny_folder, rollout__buckets=(64, 384), optim__buckets=(384,), model__dtype="bfloat16"
    )
    job = modes.Job(config, {}, tmp_path, tmp_path, tmp_path / "out.json", topology="v5e:2x4")
    assert modes.run_dryrun(job, None) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    update = next(p for p in result["programs"] if p["name"] == "update")
    kinds = {c["kind"] for c in update["collectives"]}
    assert "all-gather" in kinds and update["temporaries"] > 0
    assert result["cross_check"]["ratio"] == pytest.approx(1, abs=0.2)
    assert result["steps"][0]["total"] > 0


WIDE = QwenConfig(
    model_type="qwen3",
    vocab_size=1024,
    hidden_size=2048,
    intermediate_size=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    tie_embeddings=True,
    qk_norm=True,
)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(("attend", "form"), [("auto", "aside"), ("splash", "paged")])
def test_decoding_copies_neither_the_cache_nor_weights(attend, form, sizes):
    """Today's compiler does with each form of the cache what that form is for."""
    slots, length, chips_used = 32, 2048, sizes[0] * sizes[1] * sizes[2]
    devices, _ = chips.find("v5e:2x4")
    layout = Layout(make_mesh(*sizes, devices[:chips_used]), DECODE_RULES)
    assert kv.choose(attend, WIDE, length, jnp.bfloat16, layout) == form
    placed = {"dtype": jnp.dtype(jnp.bfloat16), "layout": layout, "form": form}

    def array(shape, axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes, shape))

    table = qwen_params.param_table(WIDE)
    flat = {name: array(p.shape, p.axes) for name, p in table.items()}
    like = jax.eval_shape(lambda: decode.empty_slots(WIDE, slots, length, 64, **placed))
    cache = {name: array(c.shape, kv.AXES[form]) for name, c in like.cache.items()}
    like = jax.tree.map(lambda x: array(x.shape, (None,) * x.ndim, x.dtype), like)
    compiled = decode.decode.lower(
        unflatten_dict(flat, sep="."),
        like._replace(cache=cache),
        cfg=WIDE,
        steps=16,
        read_length=length,
        **placed,
    ).compile()
    weights = 2 * costs.Weights.of(WIDE).total / sizes[2]
    held = slots * length * costs.cache_bytes(WIDE, 2) / chips_used
    # The chunk's own keys take 8 x 16 / 2048 of a layer's part.
    assert compiled.memory_analysis().temp_size_in_bytes < held / WIDE.num_layers / 4
    program = hlo.Program(compiled.as_text())
    assert sum(c.bytes for c in program.collectives()) < weights / 8
    if form == "aside":  # of a kernel's operands the text does not say what it reads
        step, once = traffic.step_bytes(program)
        assert 0.99 * (weights + held) < step + once / 16 < 1.15 * (weights + held)
