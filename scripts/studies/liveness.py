"""Measures the effect of each kind of sublayer on the output of its stack at initialization, for all models.

    python scripts/studies/liveness.py
    python scripts/studies/liveness.py --models=fnet --layout=@layer.PreNorm

For each stack and kind of sublayer, prints the relative change of the stack's output if these sublayers output zero
in all layers (`library.liveness`).
"""

import argparse
import pathlib

import jax
import numpy as np
from library import liveness

from remixer_t5x import build_model

MODELS = sorted(path.stem for path in (pathlib.Path(__file__).parents[2] / 'configs' / 'models').glob('*.gin'))
VOCAB = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', default=','.join(MODELS), help='separated by commas')
    parser.add_argument('--size', default='tiny', help='a file in configs/sizes')
    parser.add_argument('--inputs', type=int, default=256, help='number of input tokens')
    parser.add_argument('--targets', type=int, default=58, help='number of target tokens')
    parser.add_argument(
        '--layout', default='', help='layout of both stacks, such as @layer.PreNorm (default: that of the model)'
    )
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(1, VOCAB, (2, n)).astype(np.int32) for n in (args.inputs, args.targets))
    print(
        f'{jax.devices()[0].device_kind} x {jax.device_count()}; size {args.size}, 2 x ({args.inputs} + {args.targets})'
    )
    print('float32, bfloat16')
    macros = {name: args.layout for name in ('ENCODER_LAYOUT', 'DECODER_LAYOUT') if args.layout}
    for model in args.models.split(','):
        by_dtype = {}
        for dtype in ('float32', 'bfloat16'):
            files = f'models/{model}.gin', f'sizes/{args.size}.gin'
            built = build_model(*files, VOCAB_SIZE=VOCAB, DTYPE=dtype, **macros)
            by_dtype[dtype] = liveness.ablation_effects(built, inputs, targets)
        for stack in ('encoder', 'decoder'):
            cells = [
                f'{name} {moved:.3f}, {by_dtype["bfloat16"][stack, name]:.3f}'
                for (side, name), moved in by_dtype['float32'].items()
                if side == stack
            ]
            if cells:
                print(f'| {model} | {stack} | {"; ".join(cells)} |', flush=True)


if __name__ == '__main__':
    main()
