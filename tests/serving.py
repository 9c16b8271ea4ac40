"""What the tests' server of processes imports once, so that its forks do not."""

import gc
import importlib

import quick
import torch

from mnemos import libraries, registry
from mnemos.lab.run import provenance

gc.disable()  # what is imported stays
torch.set_num_threads(1)
libraries.transformers()
libraries.timm()
MODULES = (
    "mnemos.lab.cli.verbs mnemos.lab.run.session mnemos.lab.compare.compare mnemos.lab.report processes train_standins "
)
MODULES += "lightning_fabric tyro rich.progress sklearn.datasets matplotlib.pyplot timm.data torch.distributed.fsdp "
MODULES += "mnemos.trainers.transformers_trainer pytest hypothesis"  # which the tests' own modules import
for module in MODULES.split():
    try:
        importlib.import_module(module)
    except ImportError as error:  # which the server would pass over, and each fork would import everything by itself
        raise RuntimeError(f"tests/serving.py cannot import {module}") from error
registry.load("recipe", "demo")  # which imports the recipes
for host in ("bert", "gpt2", "mamba", "rwkv", "vit"):
    importlib.import_module(f"transformers.models.{host}.modeling_{host}")
quick.leave_out_the_disk()
quick.ask_git_once()
provenance.source()
provenance.source_hash()
gc.freeze()
gc.enable()
