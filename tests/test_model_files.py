"""Model folders as they arrive from broken downloads and careless hands: each is refused by name.

All cases go through `load_model`, so that what a user meets is a ConfigError (exit 2).
"""

import json
import shutil
from pathlib import Path

import pytest

from sage_jax.config import ConfigError, base, validate
from sage_jax.models import hf
from sage_jax.runtime import load_model, placement

ASSET = Path(hf.__file__).parents[1] / "assets" / "tiny-qwen3"
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
NO_OBJECTS = {
    "empty": b"",
    "truncated": b'{"model": {"vo',
    "binary": b"\xff\xfe\x00\x01\x80",
    "list": b"[1]",
    "null": b"null",
    "number": b"5",
    "deep": b"[" * 100_000,
}


@pytest.fixture
def folder(tmp_path):
    """A copy of the packaged model, to break."""
    return shutil.copytree(ASSET, tmp_path / "model")


def refusal(folder, **tokens):
    c = base()
    c.model.path, c.mesh.data = str(folder), 1
    for name, value in tokens.items():
        c.tokens[name] = value
    config = validate(c)
    with pytest.raises(ConfigError) as error:
        load_model(config, placement(config))
    return str(error.value)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS)
@pytest.mark.parametrize("name", [*JSON_FILES, "special_tokens_map.json", hf.INDEX])
def test_a_file_that_is_no_json_object_is_named_with_the_remedy(folder, name, content):
    (folder / name).write_bytes(content)
    text = refusal(folder)
    assert f"model.path={folder}" in text and f"{folder / name} " in text
    assert "copy the file again" in text and len(text) < 500


def to_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def to_nothing(path):
    path.unlink(missing_ok=True)
    path.symlink_to("absent")


def unreadable(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")  # its first page cannot be read, by root either


NO_FILES = {
    to_folder: " is a folder, not a file: copy the file again",
    to_nothing: " is a link that leads to no file: copy the file again",
    unreadable: " cannot be read (Input/output error): copy the file again",
}


@pytest.mark.parametrize(
    ("spoil", "said"), NO_FILES.items(), ids=lambda x: getattr(x, "__name__", "")
)
@pytest.mark.parametrize("name", [*JSON_FILES, "special_tokens_map.json", hf.INDEX])
def test_what_is_no_file_is_named_and_never_passes_for_an_absent_one(folder, name, spoil, said):
    spoil(folder / name)
    assert f"{folder / name}{said}" in refusal(folder)


@pytest.mark.parametrize("spoil", [to_folder, to_nothing])
def test_a_template_that_is_no_file_is_named(folder, spoil):
    spoil(folder / "chat_template.jinja")
    assert f"{folder}/chat_template.jinja{NO_FILES[spoil]}" in refusal(folder)


def test_an_empty_template_is_refused_since_every_prompt_would_be_empty(folder):
    (folder / "chat_template.jinja").write_text("\n")
    assert "chat_template.jinja (or tokenizer_config.json): the chat template is empty" in refusal(
        folder
    )


@pytest.mark.parametrize("spoil", NO_FILES)
def test_weights_that_are_no_file_are_named_first(folder, spoil):
    spoil(folder / "model.safetensors")
    assert refusal(folder).splitlines()[1].startswith("  model.safetensors cannot be read")


NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("num_attention_heads", 0, "from 1 to"),
        ("num_attention_heads", -4, "from 1 to"),
        ("num_key_value_heads", 0, "from 1 to"),
        ("num_hidden_layers", 10**9, "from 1 to 1000"),
        ("vocab_size", "many", "an integer"),
        ("vocab_size", True, "an integer"),
        ("hidden_size", [128], "an integer"),
        ("hidden_size", 128.5, "an integer"),
        ("intermediate_size", 2**70, "an integer"),
        ("head_dim", 0, "an integer"),
        ("max_position_embeddings", -1, "an integer"),
        ("rms_norm_eps", NAN, "a number between 0 and 1"),
        ("rms_norm_eps", 0, "a number between"),
        ("rms_norm_eps", "1e-6", "a number between"),
        ("rope_theta", None, "rope_theta is missing"),
        ("rope_theta", NAN, "a number between"),
        ("rope_theta", [1e4], "a number between"),
        ("tie_word_embeddings", "false", "true or false"),
        ("use_sliding_window", 0, "true or false"),
        ("rope_scaling", [1], "an object"),
        ("rope_parameters", 7, "an object"),
        ("layer_types", 5, "a list of names"),
        ("layer_types", [["full_attention"]], "a list of names"),
    ],
)
def test_an_impossible_value_in_config_json_is_named(folder, field, value, remedy):
    edit(folder / "config.json", **{"rope_parameters": None, field: value})
    text = refusal(folder)
    assert f"{folder}: config.json: " in text and field in text and remedy in text
    assert value is None or f"{value!r:.40}" in text


def test_a_hidden_size_that_the_heads_do_not_divide_is_named(folder):
    edit(folder / "config.json", model_type="qwen2", head_dim=None, hidden_size=130)
    text = refusal(folder)
    assert "hidden_size 130 is not a multiple of num_attention_heads 4" in text


@pytest.mark.parametrize("value", [[[1]], True, "2", 1.5, -1, {}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_eos_token_id_that_is_no_id_is_named(folder, name, value):
    if name == "config.json":
        (folder / "generation_config.json").unlink()
    edit(folder / name, eos_token_id=value)
    assert f"{folder / name}: eos_token_id {value!r}" in refusal(folder)


def test_a_stop_id_beyond_the_vocabulary_is_laid_to_its_origin(folder):
    assert "tokens.stop_ids=(512,)" in refusal(folder, stop_ids=(512,))
    edit(folder / "generation_config.json", eos_token_id=[471, 10**30])
    text = refusal(folder)
    assert f"eos_token_id {10**30} is outside the vocabulary of 512" in text
    assert "generation_config.json" in text and "stop_ids" not in text


def test_a_tokenizer_larger_than_the_model_is_refused(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    new = {**tokenizer["added_tokens"][0], "id": 600, "content": "<|late|>"}
    tokenizer["model"]["vocab"]["<|late|>"] = 600
    edit(
        folder / "tokenizer.json",
        model=tokenizer["model"],
        added_tokens=[*tokenizer["added_tokens"], new],
    )
    text = refusal(folder)
    assert "vocab_size 512 is too small for the tokenizer, whose ids reach 600" in text


@pytest.mark.parametrize(
    ("name", "changes", "part"),
    [
        ("tokenizer.json", {"model": None}, "tokenizer.json is damaged"),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": []}}, "tokenizer.json is damaged"),
        ("tokenizer.json", {"added_tokens": [{"id": -1}]}, "damaged"),
        ("tokenizer.json", {"pre_tokenizer": 5}, "tokenizer.json is damaged"),
        ("tokenizer_config.json", {"eos_token": 5}, "hold a value"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "hold a value"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "hold a value"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template 5 is not text"),
        ("tokenizer_config.json", {"chat_template": "{% if"}, "chat template refuses"),
    ],
)
def test_a_wrong_value_inside_the_tokenizer_files_is_named(folder, name, changes, part):
    edit(folder / name, **changes)
    text = refusal(folder)
    assert part in text and str(folder) in text


WEIGHTS = (ASSET / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\xff" * 64, WEIGHTS[:9], WEIGHTS[: len(WEIGHTS) // 2], WEIGHTS[:-1]],
    ids=["empty", "byte", "garbage", "header cut", "half", "last byte"],
)
def test_damaged_weights_are_named_with_the_remedy(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    text = refusal(folder)
    assert f"weights of {folder}" in text and "model.safetensors cannot be read" in text
    assert "copy the file again" in text and text.count("\n") < 40


@pytest.mark.parametrize(
    ("weight_map", "part"),
    [
        (None, "weight_map None does not map"),
        ([], "weight_map [] does not map"),
        ({"model.norm.weight": 1}, "does not map"),
        ({"model.norm.weight": ["a"]}, "does not map"),
        ({"model.norm.weight": "absent.safetensors"}, "lists absent.safetensors, which is absent"),
        ({"model.norm.weight": "../outside.safetensors"}, "is not a file name within the folder"),
        ({"model.norm.weight": "/x.safetensors"}, "is not a file name within the folder"),
    ],
)
def test_an_index_that_points_nowhere_is_named(folder, weight_map, part):
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    text = refusal(folder)
    assert part in text and hf.INDEX in text


def test_a_template_that_fails_in_python_is_a_refusal_too(folder):
    edit(folder / "tokenizer_config.json", chat_template="{{ 1 / 0 }}")
    c = base()
    c.model.path, c.mesh.data = str(folder), 1
    config = validate(c)
    tokens = load_model(config, placement(config)).tokens
    with pytest.raises(ValueError, match="template refuses.*division"):
        tokens.chat([{"role": "user", "content": "a"}])
