"""`remixer-t5x data`: the first examples of a task as text and as ids, and how full its rows are."""

import itertools
import sys
from collections.abc import Iterable, Mapping

import numpy as np
import seqio

from remixer_t5x.data import pipeline
from remixer_t5x.errors import UserError

# Rows that the packing efficiency is measured over.
MEASURED_ROWS = 300
_SEED = 0
_SIDES = {
    'inputs': ('encoder_input_tokens', 'encoder_segment_ids'),
    'targets': ('decoder_target_tokens', 'decoder_segment_ids'),
}
Row = Mapping[str, np.ndarray]


def run(
    mixture_or_task: str | seqio.Task | seqio.Mixture,
    feature_lengths: Mapping[str, int],
    split: str = 'train',
    num_examples: int = 2,
    pack: bool = False,
) -> None:
    """Prints `num_examples` rows of the shuffled split as a training run sees them, and the packing efficiency.

    Raises UserError for an unknown task or split, lengths that are none, and a split without examples.
    """
    if not isinstance(num_examples, int) or num_examples < 0:
        raise UserError(f'NUM_EXAMPLES is {num_examples!r}; type a whole number, as in --gin.NUM_EXAMPLES=2')
    config = pipeline.DatasetConfig(mixture_or_task, feature_lengths, batch_size=1, split=split, pack=pack)
    task = pipeline.provider(config)
    pipeline.hide_accelerators()
    dataset = seqio.get_dataset(
        task,
        dict(feature_lengths),
        seqio.EncDecFeatureConverter(pack=pack),
        dataset_split=split,
        shuffle=True,
        seed=_SEED,
        verbose=False,
    )
    rows = list(itertools.islice(dataset.as_numpy_iterator(), max(MEASURED_ROWS, num_examples)))
    if not rows:
        raise UserError(f'{task.name} has no examples in split {split!r}; choose another with --gin.DATA_SPLIT')
    vocabularies = {side: task.output_features[side].vocabulary for side in _SIDES}
    _say(f'{task.name}, split {split}, {"packed" if pack else "one example per row"}')
    for number, row in enumerate(rows[:num_examples], 1):
        _say(f'\nrow {number}')
        for side, vocabulary in vocabularies.items():
            _show(row, side, vocabulary)
    _say('')
    for line in efficiency(rows):
        _say(line)


def efficiency(rows: Iterable[Row]) -> list[str]:
    """For each side, the share of token slots that hold a token, and the examples per row."""
    rows = list(rows)
    lines = []
    for side, (tokens, segments) in _SIDES.items():
        slots = sum(row[tokens].size for row in rows)
        real = sum(int(np.count_nonzero(row[tokens])) for row in rows)
        examples = sum(int(row[segments].max()) if segments in row else 1 for row in rows)
        lines.append(
            f'{side}: {real / slots:.1%} of {slots // len(rows)} slots are tokens, '
            f'{examples / len(rows):.2f} examples per row ({len(rows)} rows measured)'
        )
    return lines


def _show(row: Row, side: str, vocabulary: seqio.Vocabulary) -> None:
    tokens, segments = _SIDES[side]
    examples = row[segments] if segments in row else (row[tokens] != 0).astype(np.int32)
    for example in range(1, int(examples.max()) + 1):
        ids = [int(token) for token in row[tokens][examples == example]]
        _say(f'  {side}, {len(ids)} tokens: {as_text(ids, vocabulary)}')
        _say(f'    ids: {" ".join(map(str, ids))}')


def as_text(ids: list[int], vocabulary: seqio.Vocabulary) -> str:
    """The text of `ids` with sentinels as <extra_id_0>, ... (also where the vocabulary has no text for them) and
    </s> for EOS."""
    first = vocabulary.vocab_size - vocabulary.extra_ids
    parts = []
    for is_special, group in itertools.groupby(ids, lambda token: token >= first or token == vocabulary.eos_id):
        if not is_special:
            parts.append(vocabulary.decode(list(group)))
            continue
        parts += [
            '</s>' if token == vocabulary.eos_id else f'<extra_id_{vocabulary.vocab_size - 1 - token}>'
            for token in group
        ]
    return ' '.join(parts)


def _say(line: str) -> None:
    sys.stdout.write(line + '\n')
