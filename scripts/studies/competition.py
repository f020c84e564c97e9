"""Measures the competition weights of TIM by token, and their correlation between layers (Lamb et al. 2021, figure 4).

    python scripts/studies/competition.py runs/tim --text=held_out.txt

Loads a run whose model has TIM layers, such as a run of `remixer-t5x reproduce tim/table_2`, and a text file. For the
most frequent tokens, prints the minimum, mean and maximum weight of the first mechanism over occurrences and layers.
Also prints the correlation of this weight between layers. The paper reports that one mechanism specializes in the
period between sentences, and that the weights of different layers are highly correlated.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import remixer_t5x
from remixer_t5x.api.trained_model import TrainedModel
from remixer_t5x.cli import data
from remixer_t5x.data.batch_formats import ENCODER_DECODER
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.text_inference import TextCodec
from remixer_t5x.extras.reports.pictures import learned_weights


def compute_competition_weights(trained: TrainedModel, texts: list[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns the ids of all texts [tokens], the first mechanism's weights [layers, tokens], and the layer names."""
    length = trained.lengths['inputs']
    encoder = TextCodec(trained.vocabulary, length)
    rows: list[np.ndarray] = [np.asarray(encoder.encode(text, 0)[0], np.int32)[:length] for text in texts]
    layers: list[learned_weights.LayerArray] = []
    parts = []
    is_seq2seq = trained.model.model_type == ENCODER_DECODER

    @jax.jit
    def compute_intermediates(params, ids):
        inputs = (ids, jnp.zeros((1, 1), jnp.int32)) if is_seq2seq else (ids,)
        options = {'enable_dropout': False, 'mutable': ['intermediates']}
        return trained.model.module.apply({'params': params}, *inputs, **options)[1]['intermediates']

    for row in rows:
        sown = jax.device_get(compute_intermediates(trained.params, np.pad(row, (0, length - len(row)))[None]))
        weights = learned_weights.collect_competition_weights(sown, trained.params)
        layers = [layer for layer in weights if layer.stack == learned_weights.ENCODER]
        if not layers:
            raise UserError(f'{trained.source} has no layers with competition; use a run with --model=tim')
        parts.append(np.stack([layer.array[0, : len(row)] for layer in layers]))
    return np.concatenate(rows), np.concatenate(parts, axis=1), [layer.title for layer in layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='MODEL_DIR or checkpoint')
    parser.add_argument('--text', required=True, help='text file; each line is a text')
    parser.add_argument('--lines', type=int, default=200, help='number of lines to read')
    parser.add_argument('--tokens', type=int, default=20, help='number of tokens to print')
    args = parser.parse_args()
    trained = remixer_t5x.load(args.run)
    texts = [line for line in pathlib.Path(args.text).read_text(encoding='utf-8').splitlines() if line.strip()]
    ids, weights, layers = compute_competition_weights(trained, texts[: args.lines])
    print(f'{len(ids):,} tokens, {len(layers)} TIM layers; weight of mechanism 1')
    print('| token | occurrences | minimum | mean | maximum |\n|---|---|---|---|---|')
    values, counts = np.unique(ids, return_counts=True)
    for index in np.argsort(-counts, kind='stable')[: args.tokens]:
        token, of_token = int(values[index]), weights[:, ids == values[index]]
        numbers = f'{of_token.min():.3f} | {of_token.mean():.3f} | {of_token.max():.3f}'
        print(f'| {data.decode_piece(trained.vocabulary, token)!r} | {counts[index]:,} | {numbers} |')
    print('\n| correlation | ' + ' | '.join(layers) + ' |\n|---' + '|---' * len(layers) + '|')
    for name, row in zip(layers, np.atleast_2d(np.corrcoef(weights)), strict=True):
        print(f'| {name} | ' + ' | '.join(f'{value:.2f}' for value in row) + ' |')


if __name__ == '__main__':
    main()
