"""Writes mlp_mixer.npz: the token-mixing MLP of the PyTorch package mlp-mixer-pytorch, its weights and its outputs.

Needs torch, einops and mlp-mixer-pytorch 0.3.1: `python tests/golden/make_mlp_mixer.py`.
"""

import pathlib

import numpy as np
import torch
from mlp_mixer_pytorch.mlp_mixer_pytorch import FeedForward

LENGTH, WIDTH, HIDDEN = 9, 6, 14


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Returns weights, inputs and outputs. The package mixes tokens by convolutions of width 1."""
    rng = np.random.default_rng(seed)
    mixing = FeedForward(LENGTH, HIDDEN, dense=lambda n_in, n_out: torch.nn.Conv1d(n_in, n_out, kernel_size=1))
    for layer in mixing:
        if isinstance(layer, torch.nn.GELU):
            layer.approximate = 'tanh'  # As in our code; the package uses exact GELU by default.
    weights = {}
    with torch.no_grad():
        for name, layer in (('wi', mixing[0]), ('wo', mixing[3])):
            layer.weight.copy_(torch.from_numpy(rng.normal(size=layer.weight.shape)))
            layer.bias.copy_(torch.from_numpy(rng.normal(size=layer.bias.shape)))
            weights[name], weights[f'{name}_bias'] = layer.weight[..., 0].T.numpy(), layer.bias.numpy()
        x = torch.from_numpy(rng.normal(size=(3, LENGTH, WIDTH))).float()
        return {**weights, 'x': x.numpy(), 'mixed': mixing(x).numpy()}


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('mlp_mixer.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
