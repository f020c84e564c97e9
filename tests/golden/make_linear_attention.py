"""Writes linear_attention.npz: the linear attention layers of its authors' PyTorch package, on a padded batch.

Needs torch, a C++ compiler and pytorch-fast-transformers 0.4.0, which compiles its kernels during installation:
`python tests/golden/make_linear_attention.py`.
"""

import pathlib

import numpy as np
import torch
from fast_transformers.attention import AttentionLayer, CausalLinearAttention, LinearAttention
from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

LENGTH, WIDTH, HEADS, HEAD_DIM = 21, 12, 3, 5
LENGTHS = [21, 13, 1]


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Returns projections [in, out], inputs, and the outputs of bidirectional, causal and cross-attention."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(3, LENGTH, WIDTH))).float()
    queries = torch.from_numpy(rng.normal(size=(3, 4, WIDTH))).float()
    layers = {
        name: AttentionLayer(kind(HEAD_DIM), WIDTH, HEADS, HEAD_DIM, HEAD_DIM)
        for name, kind in (('bidirectional', LinearAttention), ('causal', CausalLinearAttention))
    }
    arrays = {'x': x.numpy(), 'queries': queries.numpy(), 'lengths': np.asarray(LENGTHS, np.int32)}
    state = {}
    for name, parameter in layers['causal'].named_parameters():
        # Our layers have no biases.
        scale = 0 if name.endswith('bias') else 1.5
        state[name] = scale * torch.from_numpy(rng.normal(size=parameter.shape) / np.sqrt(parameter.shape[-1])).float()
        if scale:
            arrays[f'weights/{name.split("_")[0]}'] = state[name].T.numpy()
    lengths = LengthMask(torch.tensor(LENGTHS), LENGTH)
    masks = {'bidirectional': FullMask(LENGTH), 'causal': TriangularCausalMask(LENGTH)}
    with torch.no_grad():
        for name, layer in layers.items():
            layer.load_state_dict(state)
            arrays[name] = layer(x, x, x, masks[name], lengths, lengths).numpy()
        every_query = LengthMask(torch.tensor([4, 4, 4]), 4)
        cross = layers['bidirectional'](queries, x, x, FullMask(4, LENGTH), every_query, lengths)
    return {**arrays, 'cross': cross.numpy()}


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('linear_attention.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
