"""Writes gmlp_g_mlp_pytorch.npz: random gMLP blocks of the g-mlp-pytorch package, an input, and their outputs.

Needs torch and g-mlp-pytorch (made with 0.1.5): `python tests/golden/make_gmlp_g_mlp_pytorch.py`.
"""

import pathlib

import numpy as np
import torch
from g_mlp_pytorch import gMLPBlock

DIM, HIDDEN, LENGTH = 8, 12, 7


def make_block(seed: int, causal: bool, attn_dim: int | None) -> gMLPBlock:
    """Returns a block with random parameters, and zeros for the biases that our block does not have."""
    torch.manual_seed(seed)
    block = gMLPBlock(dim=DIM, dim_ff=HIDDEN, seq_len=LENGTH, attn_dim=attn_dim, causal=causal).eval()
    block.proj_in[1] = torch.nn.GELU(approximate='tanh')
    block.sgu.norm.eps = 1e-6
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name in ('proj_in.0.bias', 'proj_out.bias', 'attn.to_out.bias'):
                parameter.zero_()
            else:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return block


def make_arrays() -> dict[str, np.ndarray]:
    """Returns the input `x`, and `CASE/NAME` for the weights and the output of each block."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(2, LENGTH, DIM))).float()
    arrays = {'x': x.numpy()}
    for causal in (False, True):
        for attn_dim in (None, 4):
            case = f'{"causal" if causal else "bidirectional"}_{"gmlp" if attn_dim is None else "amlp"}'
            block = make_block(len(arrays), causal, attn_dim)
            for name, weight in block.state_dict().items():
                arrays[f'{case}/{name}'] = weight.numpy()
            with torch.no_grad():
                arrays[f'{case}/output'] = block(x).numpy()
    return arrays


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('gmlp_g_mlp_pytorch.npz')
    np.savez_compressed(path, **make_arrays())
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
