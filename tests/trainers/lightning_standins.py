"""A LightningModule with rollouts, and its trainers."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from trainer_standins import SEGMENT, documents, made

from mnemos import libraries
from mnemos.trainers import RolloutBatches, RolloutModule

libraries.torchvision()  # torchmetrics imports it
import pytorch_lightning as lightning  # noqa: E402

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Language(RolloutModule, lightning.LightningModule):
    def __init__(self, name: str = "linear") -> None:
        super().__init__()
        self.model = made(name)
        self.gradients: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])


def trainer(folder: Any, **named: Any) -> Any:
    saved = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    return lightning.Trainer(accelerator="cpu", callbacks=[saved], default_root_dir=folder, **{**quiet, **named})


def batches(rows: int = 2) -> Any:
    return RolloutBatches(documents(), rows, SEGMENT, 3)


def distributed(folder: Path) -> None:
    """One of two processes with a row each: train, and train again from a checkpoint."""
    options = {"max_steps": 4, "devices": 2, "strategy": "ddp"}
    module = Language("cached").double()
    first = trainer(folder, **options)
    first.fit(module, batches(1))
    resumed = Language("cached").double()
    trainer(folder / "again", **options).fit(resumed, batches(1), ckpt_path=folder / "epoch=0-step=2.ckpt")
    assert all(map(torch.equal, module.parameters(), resumed.parameters()))
    if os.environ["RANK"] == "0":
        loss = first.callback_metrics["train_loss"]
        torch.save([loss, *(p.detach() for p in module.parameters())], folder / "weights.pt")
