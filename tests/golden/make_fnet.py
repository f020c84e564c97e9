"""Writes fnet.npz: the Fourier mixing of Hugging Face's FNet on random features.

Needs torch, transformers and scipy: `python tests/golden/make_fnet.py`.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Returns `x/LENGTHxWIDTH` and `mixed/LENGTHxWIDTH` for even and odd sizes."""
    rng = np.random.default_rng(seed)
    mix = FNetBasicFourierTransform(transformers.FNetConfig())
    arrays = {}
    for length, width in ((8, 6), (7, 10), (5, 9), (12, 7), (1, 4)):
        x = torch.from_numpy(rng.normal(size=(2, length, width))).float()
        arrays[f'x/{length}x{width}'] = x.numpy()
        arrays[f'mixed/{length}x{width}'] = mix(x)[0].numpy()
    return arrays


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('fnet.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
