"""Tokenizer and architecture of the tiny model, as a Hugging Face folder without weights.

A byte-level BPE without merges: its vocabulary is the 256 bytes, the numbers 0..99, the tags, and
the words of the tiny world, each whole (`ignore_merges`). Any text can be encoded.

    python -m sage_jax.tasks.tiny_tokenizer --output DIR
"""

import argparse
import json
import re
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from sage_jax.tasks.tiny_demos import GENERIC_PLANS, demonstrations

PAD, END = "<|endoftext|>", "<|im_end|>"
TURNS = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("question", "answer", "solution", "inputs", "plan", "score")
    for slash in ("", "/")
)
# Phrases that are one token each: they shorten every row and hold no choice.
PHRASES = (
    ". how many?",
    "def f(x):",
    "a for a in x",
    "f(x): ",
    "f(list): ",
    "new: ",
    "plan: ",
    "\nplan: ",
    "rate: ",
    "solve: ",
    "solve f: ",
)
# phrases, numbers of at most two digits, words and signs with the space around them, blanks
SPLIT = "|".join(
    [*map(re.escape, PHRASES), r"\d{1,2}", r" ?[A-Za-z_]+ ?", r" ?[^\w\s]+ ?", r"\s+", r"\w"]
)
VOCAB_SIZE = 512
SURVEY = 4_000  # demonstrations whose words are taken

CHAT_TEMPLATE = (
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|im_end|>"
    "{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "torch_dtype": "float32",
}


def words() -> list[str]:
    """The pieces of the dialect that get a token of their own; all that occur, so that the shares
    of the habits do not matter."""
    found: set[str] = set()
    outside = re.compile("|".join(map(re.escape, TAGS)))
    for demo in islice(demonstrations(0), SURVEY):
        for text in (demo.question, demo.plan or "", demo.response):
            for part in outside.split(text):
                found.update(re.findall(SPLIT, part))
    fixed = [*PHRASES, *(str(n) for n in range(100)), "\n", *re.findall(SPLIT, str(GENERIC_PLANS))]
    return list(dict.fromkeys([*fixed, *sorted(found)]))


def build_tokenizer() -> Tokenizer:
    """The tokenizer, a pure function of this file and of the demonstrations."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    for word in words():
        [(piece, _)] = byte_level.pre_tokenize_str(word)
        if piece not in pieces:
            pieces.append(piece)
    room = VOCAB_SIZE - len((PAD, END, *TURNS, *TAGS))
    if len(pieces) > room:
        raise ValueError(f"VOCAB_SIZE={VOCAB_SIZE}: {len(pieces) - room} words too many; raise it")
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab, [], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (PAD, END, *TURNS)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return tokenizer


def write_folder(out: Path) -> None:
    """Writes tokenizer, chat template, config.json and generation_config.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    ids = {"eos_token_id": end, "pad_token_id": pad}
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": CONFIG | ids,
        "generation_config.json": ids | {"eos_token_id": [end, pad], "do_sample": True},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tiny model's folder, weights aside.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    out = parser.parse_args().output
    write_folder(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
