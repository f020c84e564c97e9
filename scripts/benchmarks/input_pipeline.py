"""Measures the throughput of each stage of the input pipeline for span corruption.

    python scripts/benchmarks/input_pipeline.py            (from the project root, in its environment)
    python scripts/benchmarks/input_pipeline.py --files '~/news/*.jsonl' --model /path/to/sentencepiece.model

Prints the number of text tokens per second of CPU time (of all TensorFlow threads) and per second of wall time. The
baselines are plain tf.data pipelines for parts of the work: batching the same token vectors without noise, and joining
and splitting documents token by token with unbatch and batch.

The following command measures the batches of a training run for each number of streams, and how long a device of the
given speed waits for batches:

    python scripts/benchmarks/input_pipeline.py --streams 1 2 --device_tokens 6_300_000
"""

import argparse
import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import seqio  # noqa: E402 (TensorFlow reads the variable when it is imported)
import tensorflow as tf  # noqa: E402

from remixer_t5x import tf_data
from remixer_t5x.data import pipeline, task_batches
from remixer_tasks import language_modeling, local_files, pretraining, python_docs, span_corruption, vocabularies
from remixer_tasks.corpora.text_corpus import ParsedCorpus

LENGTHS = {'inputs': 512, 'targets': 114}
BATCH_SIZE = 32
TARGET_SPEED = 300_000


def measure_speed(dataset: tf.data.Dataset, tokens: int) -> tuple[float, float]:
    """Returns tokens per second of CPU time and of wall time.

    Elements are counted inside TensorFlow, to exclude the overhead of a Python loop.
    """

    def count_elements(number, _):
        return number + 1

    dataset.take(2).reduce(0, count_elements)
    wall, processor = time.perf_counter(), time.process_time()
    dataset.reduce(0, count_elements)
    return tokens / (time.process_time() - processor), tokens / (time.perf_counter() - wall)


def build_pipeline_stages(documents: tf.data.Dataset, vocabulary: seqio.Vocabulary) -> dict[str, tf.data.Dataset]:
    """Returns one dataset per pipeline stage, from tokenized documents in memory to batches, and the baselines."""
    features = {name: seqio.Feature(vocabulary, add_eos=True) for name in LENGTHS}
    with seqio.map_seed_manager(0):
        corrupted = span_corruption.span_corruption(documents, LENGTHS, features)
    converter = seqio.EncDecFeatureConverter(pack=False, apply_length_check=False)
    tokens = documents.map(lambda example: example['targets'])
    return {
        'read tokenized documents': documents,
        'join and split': language_modeling.join_and_split_documents(tokens, 568),
        'corrupt spans': corrupted,
        'trim, pad, shift (seqio)': converter(corrupted, task_feature_lengths=LENGTHS),
        'shuffle and batch': converter(corrupted, task_feature_lengths=LENGTHS).shuffle(1000).batch(BATCH_SIZE),
        'baseline: join and split with unbatch and batch, no noise': (
            tokens.unbatch().batch(568).batch(BATCH_SIZE, drop_remainder=True)
        ),
        'baseline: pad and batch documents, no noise': (
            tokens.map(lambda ids: ids[:568]).padded_batch(BATCH_SIZE, padded_shapes=[568])
        ),
    }


def print_batch_speeds(
    corpus: ParsedCorpus, vocabulary: seqio.Vocabulary, counts: list[int], needed: int, tokens: int
) -> None:
    """Prints how fast a training run produces batches with each number of streams, measured over `tokens` tokens."""
    print(f'{"batches of a run":<34}{"tokens/s per core":>18}{"tokens/s wall":>15}{"device waits":>14}')
    task = pretraining.span_corruption(corpus, vocabulary)
    for streams in counts:
        per_core, wall = time_batches(task, streams, tokens)
        waiting = max(0, 1 - wall / needed)
        print(f'{f"streams: {streams}":<34}{per_core:>18,.0f}{wall:>15,.0f}{waiting:>14.0%}', flush=True)
        print(f'    {needed:,} tokens/s would require about {needed / per_core:.1f} cores', flush=True)


def time_batches(task: seqio.Task, streams: int, min_tokens: int) -> tuple[float, float]:
    rows = BATCH_SIZE * streams
    source = task_batches.TrainBatches(pipeline.DatasetConfig(task, LENGTHS, rows, streams=streams))
    next(source)
    wall, processor = time.perf_counter(), time.process_time()
    count = -(-min_tokens // (568 * rows))
    for _ in range(count):
        next(source)
    tokens = count * rows * 568
    return tokens / (time.process_time() - processor), tokens / (time.perf_counter() - wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--files', help='glob of text files; default: the documentation inside Python')
    parser.add_argument('--format', help='TEXT_FORMAT of the files; default: by extension')
    parser.add_argument('--model', help='SentencePiece model; default: trained on the text')
    parser.add_argument('--tokens', type=int, default=5_000_000, help='number of tokens to process in every stage')
    parser.add_argument(
        '--streams', type=int, nargs='*', help='measure the batches of a run with these numbers of streams'
    )
    parser.add_argument('--device_tokens', type=int, default=6_300_000, help='tokens per second that a device consumes')
    args = parser.parse_args()
    corpus = local_files.corpus(args.files, format=args.format) if args.files else python_docs.corpus()
    vocabulary = vocabularies.sentencepiece(args.model) if args.model else vocabularies.trained(corpus, 4096)
    vocabulary.sp_model  # noqa: B018 (loads the model)
    if args.streams:
        return print_batch_speeds(corpus, vocabulary, args.streams, args.device_tokens, args.tokens)

    text = corpus.create_source().get_dataset('train', shuffle=False)
    tokenized = text.map(lambda example: {'targets': vocabulary.encode_tf(example['text'])})
    ids = [example['targets'] for example in tf_data.iterate_as_numpy(tokenized)]
    once = sum(map(len, ids))
    ragged = tf.RaggedTensor.from_row_lengths(tf.concat(ids, 0), [len(document) for document in ids])
    repeats = max(args.tokens // once, 1)
    documents = tf.data.Dataset.from_tensor_slices(ragged).map(lambda row: {'targets': row}).repeat(repeats)
    print(f'{len(ids):,} documents, {once:,} tokens, {repeats} times; {os.cpu_count()} cores\n')

    print(f'{"":<50}{"tokens/s per core":>18}{"tokens/s wall":>15}{"us/example":>12}')
    results = {}
    for name, dataset in build_pipeline_stages(documents, vocabulary).items():
        results[name] = print_stage_speed(name, measure_speed(dataset, once * repeats))
    results['tokenize'] = print_stage_speed('tokenize (SentencePiece), before all this', measure_speed(tokenized, once))
    print_conclusion(results)


def print_stage_speed(name: str, speeds: tuple[float, float]) -> float:
    print(f'{name:<50}{speeds[0]:>18,.0f}{speeds[1]:>15,.0f}{568e6 / speeds[0]:>12,.0f}', flush=True)
    return speeds[0]


def print_conclusion(results: dict[str, float]) -> None:
    """Prints the ratio of the pipeline's speed to the target speed, and the slowest stage."""
    names = [name for name in results if name != 'tokenize' and not name.startswith('baseline')]
    speed = results[names[-1]]
    seconds = {
        name: 1 / results[name] - (1 / results[before] if before else 0)
        for before, name in zip([None, *names], names, strict=False)
    }
    slowest = max(seconds, key=lambda name: seconds[name])
    print(
        f'\nfrom tokenized text to batches: {speed:,.0f} tokens/s per core, {speed / TARGET_SPEED:.1f} times the '
        f'target of {TARGET_SPEED:,}'
    )
    print(f'slowest stage: "{slowest}", {seconds[slowest] * speed:.0%} of the time')


if __name__ == '__main__':
    main()
