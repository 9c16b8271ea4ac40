"""Give a trained decoder a gated cache per stream, train the cache on texts, and save it.

    python examples/finetune_memory.py FOLDER TEXT.txt .. --out FOLDER [--steps 100] [--segment 256]

FOLDER is a decoder of Transformers with its tokenizer. Every layer attends to the last --segment tokens and 4 sinks;
the caches of every third layer carry on what has left. The decoder's own weights stay as they are: drop the line that
freezes them to train them too, at a lower rate. `RolloutTrainer` is transformers' Trainer with exact gradients through
several segments. Also train the baseline, --unwritten: what it reaches is not due to memory. Afterwards:

    model = mnemos.hosts.from_pretrained(AutoModelForCausalLM, OUT)        # or: mnemos chat OUT
"""

import argparse
from pathlib import Path

import mnemos
from mnemos.trainers import RolloutTrainer

mnemos.libraries.transformers()  # before it is imported, where torchvision was built for another PyTorch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments  # noqa: E402


def main(arguments: list[str] | None = None) -> None:
    """Train the caches."""
    parser = argparse.ArgumentParser(description="Train gated caches in a decoder")
    parser.add_argument("folder", help="a decoder of Transformers with its tokenizer")
    parser.add_argument("texts", nargs="+", type=Path, help="texts in UTF-8, a document each")
    parser.add_argument("--out", required=True, help="the folder of the trained model")
    parser.add_argument("--steps", type=int, default=100, help="updates (%(default)s)")
    parser.add_argument("--segment", type=int, default=256, help="tokens of a segment, and the window (%(default)s)")
    parser.add_argument("--rollout", type=int, default=4, help="segments of an update (%(default)s)")
    parser.add_argument("--unwritten", action="store_true", help="the baseline: caches that are never written")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(options.folder, trust_remote_code=False)
    model.requires_grad_(False)
    mnemos.linearise(model, window=options.segment, sinks=4, state="none")
    grc = mnemos.GRC(scope="stream", length=16, block=64, gate_init=-4.0)  # nearly closed: starts as the decoder
    chosen = range(model.config.num_hidden_layers - 1, 0, -3)
    report = mnemos.cache(
        model, grc.unwritten() if options.unwritten else grc, where=lambda name, _: _layer(name) in chosen
    )
    print(report)
    documents = [
        {"input_ids": tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]} for path in options.texts
    ]
    settings = TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=min(2, len(documents)),
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
    )
    trainer = RolloutTrainer(
        model=model, args=settings, train_dataset=documents, segment=options.segment, rollout=options.rollout
    )
    trainer.train()
    trainer.save_model(options.out)
    tokenizer.save_pretrained(options.out)


def _layer(name: str) -> int:
    """The number of an attention's layer: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


if __name__ == "__main__":
    main()
