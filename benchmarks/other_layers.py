"""The laws of a memory on recurrent layers of other libraries: minGRU-pytorch, mambapy, titans-pytorch, xlstm.

    python -m pip install minGRU-pytorch mambapy titans-pytorch xlstm mlstm-kernels
    python benchmarks/other_layers.py [NAME ...]

Prints a report of each. Nothing is timed.
"""

import argparse

import torch
from torch import nn

from mnemos.testing import check_memory

DIM = 16


class MinGRU(nn.Module):
    """Its state is returned on demand."""

    def __init__(self):
        super().__init__()
        from minGRU_pytorch import minGRU

        self.inner = minGRU(DIM, expansion_factor=1.5)

    def forward(self, x, state=None):
        return self.inner(x, prev_hidden=state, return_next_prev_hidden=True)


class Mamba(nn.Module):
    """mambapy: a parallel scan from the beginning, which returns no state; `step` for a token after others."""

    def __init__(self):
        super().__init__()
        from mambapy.mamba import MambaBlock, MambaConfig

        self.config = MambaConfig(d_model=DIM, n_layers=1)
        self.inner = MambaBlock(self.config)

    def forward(self, x, state=None):
        c, whole = self.config, self.inner(x) if state is None else None
        if state is None:
            state = x.new_zeros(len(x), c.d_inner, c.d_state), x.new_zeros(len(x), c.d_inner, c.d_conv - 1)
        steps = []
        for token in x.unbind(1):
            y, state = self.inner.step(token, state)
            steps.append(y)
        return torch.stack(steps, 1) if whole is None else whole, state


class Titans(nn.Module):
    """The neural memory, updated every 4 tokens; `Titans1`: every token."""

    chunk = 4

    def __init__(self):
        super().__init__()
        from titans_pytorch import NeuralMemory

        self.inner = NeuralMemory(dim=DIM, chunk_size=self.chunk)

    def forward(self, x, state=None):
        return self.inner(x, state=state)


class Titans1(Titans):
    chunk = 1


class XLSTM(nn.Module):
    """The mLSTM layer of xLSTM 7B, on the PyTorch kernels of mlstm_kernels."""

    def __init__(self):
        super().__init__()
        from xlstm.xlstm_large.model import mLSTMBackendConfig, mLSTMLayer, mLSTMLayerConfig

        kernels = mLSTMBackendConfig(
            chunkwise_kernel="chunkwise--native_autograd",
            sequence_kernel="native_sequence__native",
            step_kernel="native",
            mode="inference",
            chunk_size=16,
            return_last_states=True,
            autocast_kernel_dtype="float32",
        )
        self.inner = mLSTMLayer(mLSTMLayerConfig(DIM, num_heads=2, qk_dim_factor=1.0, mlstm_backend=kernels))

    def forward(self, x, state=None):
        return self.inner(x, state)


LAYERS = {layer.__name__: layer for layer in (MinGRU, Mamba, Titans, Titans1, XLSTM)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LAYERS)}; by default all")
    names = parser.parse_args().names
    if unknown := {*names} - {*LAYERS}:
        parser.error(f"expected names of {', '.join(LAYERS)}, found {', '.join(sorted(unknown))}")
    for name in names or LAYERS:
        torch.manual_seed(0)
        print(f"{check_memory(LAYERS[name](), DIM)}\n", flush=True)
