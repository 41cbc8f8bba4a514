"""Eight fake CPU devices, one compilation cache and strict ranks for every test."""

import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_asset():
    """The packaged tiny model, which can do its tasks."""
    return "asset:tiny-qwen3"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder of the tiny architecture with random weights."""
    import jax

    from sage_jax.models import hf, qwen_params
    from sage_jax.models.qwen_config import QwenConfig
    from sage_jax.tasks.tiny_tokenizer import write_folder

    root = tmp_path_factory.mktemp("tiny")
    write_folder(root / "base")
    config = json.loads((root / "base" / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "intermediate_size": 64}
    cfg = QwenConfig.from_hf(config)
    params = qwen_params.init(cfg, jax.random.key(0))
    return hf.export(params, cfg, root / "model", root / "base")


@pytest.fixture(scope="session")
def single_run(tiny_asset, tmp_path_factory):
    """The work directory and parameters of two updates on one device: what others must equal."""
    import jax
    from test_multidevice import meshed
    from test_train import job

    from sage_jax import modes
    from sage_jax.run import start

    config, workdir = meshed(tiny_asset, {}), tmp_path_factory.mktemp("single")
    assert modes.run_train(job(config, workdir), lambda: False) == 0
    with start(config, workdir, lambda: False) as run:
        return workdir, jax.device_get(run.state.params)
