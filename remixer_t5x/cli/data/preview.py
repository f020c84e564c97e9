"""`remixer-t5x data`: shows the first examples of a task as text and as token ids, and the packing efficiency."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import ON_CPU, Command
from remixer_t5x.errors import UserError
from remixer_tasks.vocabulary import sentinels

if TYPE_CHECKING:
    import numpy as np
    import seqio

# Number of rows used to measure the packing efficiency.
MEASURED_ROWS = 300
_SEED = 0
# Maps 'inputs' and 'targets' to the names of their token and segment arrays in a batch.
_SIDES = {
    'inputs': ('encoder_input_tokens', 'encoder_segment_ids'),
    'targets': ('decoder_target_tokens', 'decoder_segment_ids'),
}
# Array of the tokens that encoder-only models predict in place; 0 marks positions without a prediction.
_IN_PLACE = 'encoder_target_tokens'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    parser.add_argument('--split', metavar='NAME', default='train', help="split to read (default 'train')")
    number = 'number of examples to show (default 2)'
    parser.add_argument('--num_examples', metavar='N', type=arguments.whole_number_type(0), default=2, help=number)


def run(args: argparse.Namespace) -> None:
    """Prints rows of the shuffled split in the format of training batches, and the packing efficiency."""
    macros = ('MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS', 'PACK', 'MODEL_TYPE')
    mixture, lengths, pack, model_type = arguments.load_values(args, *macros, defaults={'PACK': False})
    from remixer_t5x import tf_data
    from remixer_t5x.data import batch_formats, converters, pipeline

    if isinstance(lengths, Mapping) and set(lengths) == {'targets'}:
        # Without a model type, tasks without inputs are shown in the format of decoder-only models.
        model_type = batch_formats.DECODER_ONLY
    config = pipeline.DatasetConfig(mixture, lengths, batch_size=1, split=args.split, pack=pack, model_type=model_type)
    task = pipeline.get_provider(config)
    dataset = task.get_dataset(dict(lengths), split=args.split, shuffle=True, seed=_SEED, num_epochs=1)
    dataset = converters.convert_examples(config, dataset, task)
    rows = list(itertools.islice(tf_data.numpy_iterator(dataset), max(MEASURED_ROWS, args.num_examples)))
    if not rows:
        raise UserError(f'{task.name} has no examples in split {args.split!r}; choose another with --split')
    vocabulary = task.output_features['targets'].vocabulary
    print(f'{task.name}, split {args.split}, {"packed" if pack else "one example per row"}')
    for number, row in enumerate(rows[: args.num_examples], 1):
        print(f'\nrow {number}')
        _print_row(row, vocabulary)
    print('', *packing_efficiency(rows), sep='\n')


def packing_efficiency(rows: Iterable[Mapping[str, np.ndarray]]) -> list[str]:
    """Describes the fraction of non-padding tokens and the examples per row, separately for inputs and targets."""
    import numpy as np

    rows = list(rows)
    lines = []
    for side, (tokens, segments) in _SIDES.items():
        if tokens not in rows[0]:
            continue
        slots = sum(row[tokens].size for row in rows)
        real = sum(int(np.count_nonzero(row[tokens])) for row in rows)
        examples = sum(int(row[segments].max()) if segments in row else 1 for row in rows)
        lines.append(
            f'{side}: {real / slots:.1%} of {slots // len(rows)} slots are tokens, '
            f'{examples / len(rows):.2f} examples per row ({len(rows)} rows measured)'
        )
    return lines


def _print_row(row: Mapping[str, np.ndarray], vocabulary: seqio.Vocabulary) -> None:
    for side, (tokens, segments) in _SIDES.items():
        if tokens not in row:
            continue
        examples = row[segments] if segments in row else (row[tokens] != 0).astype('int32')
        for example in range(1, int(examples.max()) + 1):
            here = examples == example
            if 'decoder_causal_attention' in row:
                # For prefix language models, the inputs are the tokens whose loss weight is 0.
                weights = row['decoder_loss_weights']
                _print_tokens('inputs', row[tokens][here & (weights == 0)], vocabulary)
                here &= weights > 0
            _print_tokens(side, row[tokens][here], vocabulary)
    if _IN_PLACE in row:
        tokens_and_targets = zip(row['encoder_input_tokens'].tolist(), row[_IN_PLACE].tolist(), strict=True)
        pairs = [
            f'{decode_ids([token], vocabulary)} → {decode_ids([target], vocabulary)}'
            for token, target in tokens_and_targets
            if target
        ]
        print(f'  targets, {len(pairs)} tokens, at their positions: {" · ".join(pairs)}')


def _print_tokens(side: str, tokens: np.ndarray, vocabulary: seqio.Vocabulary) -> None:
    ids = [int(token) for token in tokens]
    print(f'  {side}, {len(ids)} tokens: {decode_ids(ids, vocabulary)}')
    print(f'    ids: {" ".join(map(str, ids))}')


def decode_ids(ids: list[int], vocabulary: seqio.Vocabulary) -> str:
    """Decodes token ids to text that shows sentinels as <extra_id_0>, <extra_id_1>, ... and the end token as </s>."""
    ordinary = sentinels.count_ordinary_ids(vocabulary)
    parts = []
    for is_special, group in itertools.groupby(ids, lambda token: token >= ordinary or token == vocabulary.eos_id):
        if not is_special:
            parts.append(vocabulary.decode(list(group)))
            continue
        parts += [
            '</s>' if token == vocabulary.eos_id else f'<extra_id_{vocabulary.vocab_size - 1 - token}>'
            for token in group
        ]
    return ' '.join(parts)


COMMAND = Command(
    'data',
    'show the first examples of a task as text and as ids, and the packing efficiency',
    add_arguments,
    run,
    (
        'remixer-t5x data --gin_file=data/python_docs.gin --num_examples=1',
        'remixer-t5x data --gin_file=data/python_docs.gin --gin_file=objectives/ul2.gin',
    ),
    ON_CPU,
    prints_result=True,
)
