"""Small Llamas; one with a tokenizer of bytes and a chat template, saved in a folder as one downloads it."""

from pathlib import Path
from typing import Any

import torch

import mnemos

library = mnemos.libraries.transformers()
TEMPLATE = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>system
be brief<e>
{% endif %}<s>{{ m.role }}
{{ m.content | trim }}<e>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""


def llama(vocab_size: int, seed: int = 0, **options: Any) -> Any:
    """A Llama with one layer of width 16 and new weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    return library.LlamaForCausalLM(library.LlamaConfig(vocab_size=vocab_size, **sizes | options))


def save(at: Path) -> Path:
    """Write one with a tokenizer; returns the folder."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    special = ["<s>", "<e>"]
    made.train_from_iterator(["so be it"], vocab_size=260, special_tokens=special, show_progress=False)
    made = library.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token="<e>", extra_special_tokens=["<s>"]
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(at)
    tokens = {"bos_token_id": None, "eos_token_id": made.eos_token_id}
    llama(len(made), intermediate_size=32, num_hidden_layers=2, **tokens, initializer_range=0.5).save_pretrained(at)
    return at
