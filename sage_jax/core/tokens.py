"""Text to token ids and back: one tokenizer, its chat template and its stop set."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from huggingface_hub import snapshot_download
from jinja2 import TemplateError, TemplateSyntaxError

from sage_jax.core.model_files import REMEDY, is_there, load_tokenizer, read_object

Message = Mapping[str, str]

# For tokenizers that come without a template (base models); the second needs no special tokens.
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# What the Python inside a template can raise beside its own errors.
TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)


def resolve(path_or_hub_id: str | Path) -> Path:
    """Local folder of a model: the folder itself, or the download of a Hugging Face hub id.

    A folder that exists is never looked up on the network. ValueError when there is no such
    folder and the hub gives none either.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    name = str(path_or_hub_id)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ValueError(
            f"model path '{name}' is not a folder, nor a hub id like 'Qwen/Qwen3-4B-Base': check "
            "the path"
        )
    try:
        wanted = ["*.json", "*.jinja", "*.txt", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{name}' is neither a local folder nor available from the Hugging Face hub "
            f"({type(error).__name__}: {error}): check the name and the network, or give the path "
            "of a downloaded folder"
        ) from error


class Tokens:
    """A tokenizer with everything the rest needs to know of it.

    `stop_ids` are all ids that end a completion, ascending; `pad_id` fills rows (masks come from
    lengths, so it may equal a stop id); `vocab_size` counts the tokenizer's ids, added ones too,
    and none is above `largest_id`.
    """

    def __init__(
        self,
        tokenizer: Any,
        generation_config: Mapping[str, Any],
        stop_ids: Sequence[int] | None = None,
        enable_thinking: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._generation_config = dict(generation_config)
        self._enable_thinking = enable_thinking
        vocabulary = tokenizer.get_vocab()
        self._template = _template(tokenizer.chat_template)
        if self._template is None:
            chatml = {"<|im_start|>", "<|im_end|>"} <= set(vocabulary)
            self._template = CHATML_TEMPLATE if chatml else PLAIN_TEMPLATE
        added = tokenizer.added_tokens_decoder.values()
        self._special_text = [token.content for token in added if token.special]
        self.vocab_size: int = len(tokenizer)
        self._fitted = self._shortened = 0
        self.largest_id: int = max(vocabulary.values(), default=-1)
        self.stop_ids: tuple[int, ...] = self._stop_set(stop_ids)
        pad_id = tokenizer.pad_token_id
        self.pad_id: int = self.stop_ids[0] if pad_id is None else pad_id

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        stop_ids: Sequence[int] | None = None,
        enable_thinking: bool = False,
    ) -> "Tokens":
        """Tokenizer of a model folder (no network) or hub id; never runs code from there.

        `stop_ids` join the stop set. `enable_thinking` goes to the chat template: Qwen3 templates
        answer False with an empty think block in the prompt, whose tokens a Qwen3 *base* model has
        never been trained on; give True there. ValueError when the folder holds no tokenizer or a
        damaged one, or when no stop id is known.
        """
        folder = resolve(path)
        generation_config: dict[str, Any] = {}
        # transformers derives the generation config from config.json where the former is absent.
        for name in ("generation_config.json", "config.json"):
            if is_there(folder / name):
                generation_config = read_object(folder / name)
                _check_eos(folder / name, generation_config.get("eos_token_id"))
                break
        tokens = cls(load_tokenizer(folder), generation_config, stop_ids, enable_thinking)
        try:
            tokens.chat([{"role": "user", "content": "a"}])
        except ValueError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ValueError(f"{folder}: {error}; {REMEDY}") from error
        return tokens

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, special tokens left out."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages ({role, content}) under the chat template, with the assistant cue.

        Without a template of its own a tokenizer gets ChatML if it knows `<|im_start|>` and
        `<|im_end|>`, else lines `role: content` and the cue `assistant:`. The text of special
        tokens is taken out of the contents, so that no message can forge a turn. ValueError for
        messages that the template refuses.
        """
        cleaned = [{**m, "content": self._without_special(m["content"])} for m in messages]
        return self._render(cleaned)

    def chat_fit(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        policy: Literal["error", "shorten", "skip"] = "error",
    ) -> list[int] | None:
        """`chat(messages)` if it has at most `max_tokens` ids, else what `policy` says.

        'error': ValueError. 'skip': None. 'shorten': the end of the last user content is cut until
        it fits, never a token of the template; ValueError when the rest alone is too long.
        """
        if policy not in ("error", "shorten", "skip"):
            raise ValueError(f"prompt policy {policy!r}: choose 'error', 'shorten' or 'skip'")
        cleaned = [{**m, "content": self._without_special(m["content"])} for m in messages]
        ids = self._render(cleaned)
        self._fitted += 1
        if len(ids) <= max_tokens:
            return ids
        if policy == "skip":
            return None
        if policy == "error":
            raise ValueError(
                f"prompt of {len(ids)} tokens exceeds the limit of {max_tokens}: raise the limit, "
                "or choose the policy 'shorten' or 'skip'"
            )
        self._shortened += 1
        return self._shorten(cleaned, max_tokens)

    def fitted(self) -> tuple[int, int]:
        """Prompts that went through `chat_fit` since this was last asked, and how many of them it
        shortened."""
        counts = self._fitted, self._shortened
        self._fitted = self._shortened = 0
        return counts

    def check_vocabulary(self, size: int) -> None:
        """ValueError when an id of the tokenizer or of the stop set is not below `size`, the
        vocabulary of the model."""
        if self.largest_id >= size:
            raise ValueError(
                f"config.json: vocab_size {size} is too small for the tokenizer, whose ids reach "
                f"{self.largest_id}; take both from the same model"
            )
        if max(self.stop_ids) >= size:
            raise ValueError(
                f"generation_config.json (or config.json): eos_token_id {max(self.stop_ids)} is "
                f"outside the vocabulary of {size} ids; correct it"
            )

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer and the stop set into `folder`, for `load` and for transformers."""
        folder = Path(folder)
        self._tokenizer.save_pretrained(folder)
        known = {k: v for k, v in self._generation_config.items() if k != "architectures"}
        path = folder / "generation_config.json"
        if path.is_file():
            known = read_object(path)
        ids = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        path.write_text(json.dumps({**known, **ids}, indent=2) + "\n")

    def _render(self, messages: Sequence[Message]) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self._enable_thinking,
            )
        except (TemplateError, *TEMPLATE_FAULTS) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text)

    def _without_special(self, text: str) -> str:
        before = None
        while text != before:  # taking one out can join the halves of another
            before = text
            for special in self._special_text:
                text = text.replace(special, "")
        return text

    def _shorten(self, messages: list[dict[str, str]], max_tokens: int) -> list[int]:
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if not users:
            raise ValueError("prompt is too long and has no user message that could be shortened")
        content = messages[users[-1]]["content"]

        def render(kept: int) -> list[int]:
            messages[users[-1]] = {**messages[users[-1]], "content": content[:kept]}
            return self._render(messages)

        low, high = 0, len(content)  # `low` characters fit, or none do
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(render(middle)) <= max_tokens else (low, middle - 1)
        ids = render(low)
        if len(ids) > max_tokens:
            raise ValueError(
                f"the prompt's template and other messages alone have {len(ids)} tokens, over the "
                f"limit of {max_tokens}: raise the limit"
            )
        return ids

    def _stop_set(self, override: Sequence[int] | None) -> tuple[int, ...]:
        configured = self._generation_config.get("eos_token_id")
        listed = configured if isinstance(configured, list) else [configured]
        ids = {
            i for i in (self._tokenizer.eos_token_id, *(override or ()), *listed) if i is not None
        }
        bad = [i for i in ids if type(i) is not int or i < 0]
        if bad:
            raise ValueError(f"stop ids {bad} are not token ids: give integers from 0 up")
        if not ids:
            raise ValueError(
                "no stop id: neither the tokenizer nor generation_config.json has an eos token; "
                "give stop_ids"
            )
        return tuple(sorted(ids))


def _check_eos(path: Path, value: Any) -> None:
    listed = value if isinstance(value, list) else [value]
    if any(i is not None and (type(i) is not int or i < 0) for i in listed):
        raise ValueError(
            f"{path}: eos_token_id {value!r:.80} is not a token id or a list of them; correct it"
        )


def _template(stored: Any) -> str | None:
    """The one template of a tokenizer: of several with names, 'default'."""
    if isinstance(stored, dict):
        stored = stored.get("default")
    if isinstance(stored, str) and not stored.strip():
        raise ValueError(
            f"chat_template.jinja (or tokenizer_config.json): the chat template is empty; {REMEDY}"
        )
    if stored is None or isinstance(stored, str):
        return stored
    raise ValueError(f"tokenizer_config.json: chat_template {stored!r:.80} is not text; correct it")
