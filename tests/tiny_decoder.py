"""A Llama with new weights and a tokenizer of bytes with a chat template, saved in a folder as one downloads it."""

from pathlib import Path

import torch

import mnemos

library = mnemos.libraries.transformers()
TEMPLATE = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>system
be brief<e>
{% endif %}<s>{{ m.role }}
{{ m.content | trim }}<e>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""


def save(at: Path) -> Path:
    """Write it; returns the folder."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    special = ["<s>", "<e>"]
    made.train_from_iterator(["so be it"], vocab_size=260, special_tokens=special, show_progress=False)
    made = library.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token="<e>", extra_special_tokens=["<s>"]
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(at)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = library.LlamaConfig(
        vocab_size=len(made), bos_token_id=None, eos_token_id=made.eos_token_id, initializer_range=0.5, **sizes
    )
    library.LlamaForCausalLM(config).save_pretrained(at)
    return at
