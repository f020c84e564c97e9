"""Measures the effect of each kind of sublayer on the output of its stack at initialization, for all models.

    python scripts/studies/sublayer_ablation.py
    python scripts/studies/sublayer_ablation.py --models=fnet --layout=@layer.PreNorm

For each stack and kind of sublayer, prints the relative change of the stack's output if these sublayers output zero
in all layers. If the outputs of a sublayer are small compared to the residual stream, the sublayer has almost no
gradient and no effect, and in bfloat16 the addition rounds its outputs to zero. Tests of shapes, gradients or losses do
not detect this problem.
"""

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x import build_model
from remixer_t5x.context import SequenceContext
from remixer_t5x.models.architecture.layer import Layer
from remixer_t5x.models.architecture.stack import trace_layers_once
from remixer_t5x.models.interface import Model
from remixer_t5x.testing.sublayer_fixture import make_fast_prng_key

MODELS = sorted(path.stem for path in (pathlib.Path(__file__).parents[2] / 'configs' / 'models').glob('*.gin'))
VOCAB = 512
SublayerKind = tuple[str, str]


def compute_ablation_effects(
    model: Model, inputs: np.ndarray, targets: np.ndarray, seed: int = 0
) -> dict[SublayerKind, float]:
    """Computes the effect of each kind of sublayer on the output y of its stack: `norm(y - y_ablated) / norm(y)`.

    For y_ablated, the sublayer's output is set to zero in every layer of the stack. The decoder always uses the
    original encoder output.

    Args:
        model: an encoder-decoder, encoder-only or decoder-only model, which is initialized at random.
        inputs: the encoder's ids [batch, length] int32 with 0 for padding.
        targets: the decoder's ids [batch, length] int32 with 0 for padding.
        seed: seed of the parameters.

    Returns:
        {('encoder' or 'decoder', name of the sublayer's parameters): effect}.
    """
    kinds, outputs = _compute_outputs(model, inputs, targets, seed)
    result = {}
    for index, (stack, name) in enumerate(kinds, 1):
        is_token = (inputs if stack == 'encoder' else targets) > 0
        full, ablated = outputs[stack][0][is_token], outputs[stack][index][is_token]
        result[stack, name] = float(np.linalg.norm(full - ablated) / np.linalg.norm(full))
    return result


def _compute_outputs(model: Model, inputs: Any, targets: Any, seed: int) -> tuple[list[SublayerKind], dict[str, Any]]:
    """Returns the kinds of sublayers, and a dict from stacks to outputs [1 + kinds, batch, length, embed].

    The first output is that of the complete stack; each of the remaining outputs omits one kind of sublayer.
    """
    kinds: list[SublayerKind] = []

    def ablate_sublayers(keep: jax.Array) -> Any:
        def ablate_sublayer(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            y, kind = call(*args, **kwargs), _find_sublayer_kind(args, context)
            return y if kind is None else y * keep[kinds.index(kind)].astype(y.dtype)

        return nn.intercept_methods(ablate_sublayer)

    @jax.jit
    def run_model(key: jax.Array) -> dict[str, jax.Array]:
        params = nn.unbox(_init_params(model, kinds, key, inputs, targets))
        stacks = {stack for stack, _ in kinds}

        def apply(method: str, *args: Any) -> jax.Array:
            return model.module.apply({'params': params}, *args, enable_dropout=False, method=method)

        def run_ablated(keep: jax.Array) -> dict[str, jax.Array]:
            with ablate_sublayers(keep):
                outputs = {'encoder': apply('encode', inputs)} if 'encoder' in stacks else {}
                if 'decoder' in stacks:
                    memory = (outputs['encoder'], inputs) if outputs else ()
                    outputs['decoder'] = apply('decode_hidden', *memory, targets)
            return {stack: y.astype(jnp.float32) for stack, y in outputs.items()}

        # A loop, because `vmap` would batch the trace of every operation.
        return jax.lax.map(run_ablated, jnp.concatenate([jnp.ones((1, len(kinds))), 1 - jnp.eye(len(kinds))]))

    with trace_layers_once():
        outputs = jax.device_get(run_model(make_fast_prng_key(seed)))
    return kinds, {stack: np.asarray(y, np.float64) for stack, y in outputs.items()}


def _init_params(model: Model, kinds: list[SublayerKind], key: jax.Array, inputs: Any, targets: Any) -> Any:
    """Returns initial parameters, and appends the kinds of sublayers to `kinds` in call order."""

    def record_kind(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        kind = _find_sublayer_kind(args, context)
        if kind is not None and kind not in kinds:
            kinds.append(kind)
        return call(*args, **kwargs)

    with nn.intercept_methods(record_kind):
        return model.init(key, {'encoder_input_tokens': inputs.shape, 'decoder_target_tokens': targets.shape})


def _find_sublayer_kind(args: Any, context: Any) -> SublayerKind | None:
    """Returns (stack, sublayer name) for a sublayer call, or None for other modules such as norms."""
    module = context.module
    is_sublayer = isinstance(module.parent, Layer) and len(args) == 2 and isinstance(args[1], SequenceContext)
    return (module.path[0], module.name) if is_sublayer and context.method_name == '__call__' else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', default=','.join(MODELS), help='comma-separated models')
    parser.add_argument('--size', default='tiny', help='name of a file in configs/sizes')
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
            by_dtype[dtype] = compute_ablation_effects(built, inputs, targets)
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
