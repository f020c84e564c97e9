"""Writes hyper_mixer.npz: outputs of the authors' HyperMixing module, with its random weights, on padded batches.

Needs torch and the package `hypermixing` of https://github.com/idiap/hypermixing on PYTHONPATH:
`python tests/golden/make_hyper_mixer.py`. GELU is replaced by its tanh approximation, as in our code.
"""

import pathlib

import numpy as np
import torch
from hypermixing import HyperMixing

BATCH, QUERIES, KEYS, WIDTH, HIDDEN = 2, 7, 9, 16, 24
# Name -> (heads, layer norm, biases in the hypernetworks, whether queries differ from keys).
CASES = {
    'one_head': (1, False, False, False),
    'heads': (4, False, False, False),
    'heads_bias_norm': (4, True, True, False),
    'cross': (2, True, False, True),
}


def make_case(rng: np.random.Generator, heads: int, norm: bool, bias: bool, cross: bool) -> dict[str, np.ndarray]:
    """Returns `weights/NAME`, `queries`, `keys`, `is_query`, `is_key` (False at padding) and `mixed`."""
    mixing = HyperMixing(
        WIDTH, HIDDEN, num_heads=heads, token_information=lambda x: x, use_layer_norm=norm, hypernetwork_bias=bias
    ).eval()
    for module in (mixing, mixing.hyper.w1_gen, mixing.hyper.w2_gen):
        module.activation = torch.nn.GELU(approximate='tanh')
    with torch.no_grad():
        for weight in mixing.parameters():
            weight.copy_(torch.from_numpy(rng.normal(0.1, 0.7, weight.shape)))
    keys = rng.normal(size=(BATCH, KEYS, WIDTH)).astype(np.float32)
    queries = rng.normal(size=(BATCH, QUERIES, WIDTH)).astype(np.float32) if cross else keys
    is_key = np.arange(KEYS) < np.array([[KEYS], [5]])
    is_query = np.ones((BATCH, QUERIES), bool) if cross else is_key
    arrays = (torch.from_numpy(array) for array in (queries, keys, keys, ~is_query, ~is_key))
    with torch.no_grad():
        mixed = mixing(*arrays).numpy()
    weights = {f'weights/{name}': weight.detach().numpy() for name, weight in mixing.named_parameters()}
    return {**weights, 'queries': queries, 'keys': keys, 'is_query': is_query, 'is_key': is_key, 'mixed': mixed}


if __name__ == '__main__':
    rng = np.random.default_rng(0)
    arrays = {f'{case}/{key}': x for case, args in CASES.items() for key, x in make_case(rng, *args).items()}
    path = pathlib.Path(__file__).with_name('hyper_mixer.npz')
    np.savez_compressed(path, **arrays)
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
