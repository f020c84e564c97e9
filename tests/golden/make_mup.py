"""Writes mup.json: factors of the authors' package `mup` for a plain decoder, between a base width and a larger one.

Needs torch and mup 1.0.0: `python tests/golden/make_mup.py`. `MuReadout` multiplies its input by base width / width,
while we scale the matrix itself, so the factors of the logits include this multiplier: under Adam, a matrix with
initial values W, learning rate r and multiplier c trains like one with cW and cr.
"""

import json
import pathlib

import mup
import torch
from torch import nn

BASE_WIDTH, WIDTH, VOCAB = 64, 256, 100


class Decoder(nn.Module):
    """The parameters of one decoder layer, the embedding and the logits."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.scale = nn.Parameter(torch.ones(width))
        for name in ('query', 'key', 'value', 'out'):
            self.add_module(name, nn.Linear(width, width, bias=False))
        self.wi, self.wo = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.logits = mup.MuReadout(width, VOCAB, bias=False)


def factors() -> dict[str, list[float]]:
    """Returns [factor of initial values, factor of Adam's learning rate] by parameter."""
    model = Decoder(WIDTH)
    standard = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    mup.set_base_shapes(model, Decoder(BASE_WIDTH), delta=Decoder(2 * BASE_WIDTH))
    groups = mup.MuAdam(model.parameters(), lr=1.0).param_groups
    rates = {leaf: group['lr'] for group in groups for leaf in group['params']}
    ones = torch.ones(WIDTH)
    multiplier = (model.logits(ones) / (model.logits.weight @ ones)).mean().item()
    scaling = {}
    for name, leaf in model.named_parameters():
        factor = multiplier if name.startswith('logits') else 1.0
        initial = (leaf.norm() / standard[name].norm()).item()
        scaling[name.partition('.')[0]] = [round(factor * initial, 6), round(factor * rates[leaf], 6)]
    return scaling


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('mup.json')
    path.write_text(json.dumps({'base_width': BASE_WIDTH, 'width': WIDTH, 'factors': factors()}) + '\n')
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
