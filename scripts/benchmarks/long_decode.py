"""Times individual tokens of a long generated sequence, and prints the ratio of token 4,000 to token 100.

    python scripts/benchmarks/long_decode.py --models hyper_mixer,linear_transformer,t5_1_1

A single program generates `--length` tokens greedily. The host records the time of every 50th token, and the time of
token N is the mean over the surrounding 100 tokens. CPU time, summed over threads, depends less on other processes than
wall time. The table shows the run with the median ratio.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import io_callback

from remixer_t5x.api.building import build_model
from remixer_t5x.cli import command
from remixer_t5x.models import decoding

NO_EOS = -1
POSITIONS, STRIDE = (100, 4000), 50


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TimedGreedy(decoding.RowDecoder):
    """A greedy decoder that records wall and CPU time of every `STRIDE`th token in `seconds` [2, length]."""

    seconds: Any = None

    def build_token_selector(self, rng: jax.Array | None, batch: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def record(tokens: jax.Array, index: jax.Array) -> jax.Array:
            self.seconds[:, index] = time.perf_counter(), time.process_time()
            return tokens

        def choose(logits: jax.Array, index: jax.Array) -> jax.Array:
            tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            shape = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)
            with_time = functools.partial(io_callback, record, shape, tokens, index)
            return jax.lax.cond(index % STRIDE == 0, with_time, lambda: tokens)

        return choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', default='hyper_mixer,linear_transformer,t5_1_1', help='files in configs/models')
    parser.add_argument('--size', default='tiny')
    parser.add_argument('--decoder_layers', type=int, default=2)
    parser.add_argument('--length', type=int, default=4100)
    parser.add_argument('--runs', type=int, default=9)
    args = parser.parse_args()
    command.keep_buffers()
    print('| model | time | token 100, us | token 4,000, us | ratio |\n|---|---|---|---|---|')
    shapes = {'encoder_input_tokens': (1, 64), 'decoder_target_tokens': (1, 64)}
    for name in args.models.split(','):
        layers = {'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': args.decoder_layers}
        model: Any = build_model(f'models/{name}.gin', f'sizes/{args.size}.gin', VOCAB_SIZE=8192, **layers)
        params = nn.unbox(jax.jit(lambda key, model=model: model.init(key, shapes))(jax.random.key(0)))
        batch = {'encoder_input_tokens': np.random.default_rng(0).integers(2, 8000, (1, 64), np.int32)}
        decoder = TimedGreedy(seconds=np.zeros((2, args.length)))

        def generate(params, batch, model=model, decoder=decoder):
            return model.generate(params, batch, args.length, NO_EOS, decoder)

        compiled = jax.jit(generate).lower(params, batch).compile()
        rows: dict[str, list[tuple[float, float, float]]] = {'wall': [], 'CPU': []}
        for _ in range(args.runs):
            jax.block_until_ready(compiled(params, batch))
            for kind, seconds in zip(rows, decoder.seconds, strict=True):
                early, late = (
                    1e6 * float(seconds[position + STRIDE] - seconds[position - STRIDE]) / (2 * STRIDE)
                    for position in POSITIONS
                )
                rows[kind].append((late / early, early, late))
        for kind, results in rows.items():
            ratio, early, late = sorted(results)[len(results) // 2]
            print(f'| {name} | {kind} | {early:,.0f} | {late:,.0f} | {ratio:.2f} |', flush=True)


if __name__ == '__main__':
    main()
