"""seqio tasks with a few short texts, and gin files that train on them."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from remixer_tasks.benchmarks import prompts
from tests.support import feed_forward

LABELS = ('no', 'yes')
EXAMPLES = {'train': 64, 'validation': 10, 'test': 5, 'empty': 0}


def source(labels: Sequence[str], examples: Mapping[str, int]) -> seqio.FunctionDataSource:
    """Returns a source with `examples` per split, which repeats seven labelled texts."""

    def read(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        numbers = np.arange(examples[split])
        texts = {'inputs': [f'text {i % 7}' for i in numbers], 'targets': [labels[i % 7 % 2] for i in numbers]}
        strings = {name: tf.constant(values, tf.string) for name, values in texts.items()}
        return tf.data.Dataset.from_tensor_slices({**strings, 'idx': numbers})

    return seqio.FunctionDataSource(read, list(examples))


def accuracy(targets: Sequence[object], predictions: Sequence[object]) -> dict[str, float]:
    return {'accuracy': 100 * float(np.mean([a == b for a, b in zip(targets, predictions, strict=True)]))}


def labelled(vocabulary: seqio.Vocabulary, name: str = 'labelled', labels: Sequence[str] = LABELS) -> seqio.Task:
    """Returns a classification task."""
    feature = seqio.Feature(vocabulary, add_eos=True)
    return seqio.Task(
        name,
        source=source(labels, EXAMPLES),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={'inputs': feature, 'targets': feature},
        postprocess_fn=prompts.ClassIdPostprocessor(labels),
        metric_fns=[accuracy],
    )


def masked(vocabulary: seqio.Vocabulary) -> seqio.Task:
    """Returns a masked language modelling task, which replaces every third byte with id 300."""

    def mask(dataset: tf.data.Dataset) -> tf.data.Dataset:
        def mask_example(example):
            ids = tf.cast(vocabulary.encode_tf(example['inputs']), tf.int32)
            chosen = tf.range(tf.size(ids)) % 3 == 0
            return {'inputs': tf.where(chosen, 300, ids), 'targets': tf.where(chosen, ids, 0)}

        return dataset.map(mask_example)

    feature = seqio.Feature(vocabulary)
    features = {'inputs': feature, 'targets': feature}
    return seqio.Task('masked', source=source(LABELS, EXAMPLES), preprocessors=[mask], output_features=features)


def config(task: str, lengths: Mapping[str, int], model_type: str = '') -> str:
    """Returns the text of a gin file for one of the tasks above and a T5, or an encoder for a `model_type`.

    The model has one layer per stack, without attention, which takes long to compile.
    """
    include = f"include 'model_types/{model_type}.gin'" if model_type else ''
    settings = {name: value for name, value in feed_forward.SETTINGS.items() if not model_type or 'ENCODER' in name}
    sublayers = '\n'.join(f'{name} = {value}' for name, value in settings.items())
    return f"""
from __gin__ import dynamic_registration
from remixer_tasks import vocabularies
from tests.support import toy_tasks

include 'models/t5_1_1.gin'
{include}
include 'optimizers/adafactor_constant.gin'
include 'hardware/cpu.gin'

EMBED_DIM = 16
MLP_DIM = 32
NUM_HEADS = 2
HEAD_DIM = 8
NUM_ENCODER_LAYERS = 1
NUM_DECODER_LAYERS = 1
{sublayers}
VOCAB_SIZE = 384
TASK_FEATURE_LENGTHS = {dict(lengths)}
MIXTURE_OR_TASK_NAME = @toy_tasks.{task}()
toy_tasks.{task}.vocabulary = @vocabularies.byte()
"""


def prepare_super_glue(config: str, files: pathlib.Path, data_dir: pathlib.Path, rows_per_file: int = 20) -> None:
    """Converts published SuperGLUE `files` to a TFDS dataset."""
    builder = tfds.text.super_glue.SuperGlue(config=config, data_dir=data_dir)
    pathlib.Path(builder.data_dir).mkdir(parents=True)
    writer = tfds.core.SequentialWriter(builder.info, max_examples_per_shard=rows_per_file)
    for name, split in (('train', 'train'), ('val', 'validation'), ('test', 'test')):
        path = files / f'{name}.jsonl'
        if path.exists():
            writer.initialize_splits([split])
            writer.add_examples({split: [example for _, example in builder._generate_examples(path, 'test')]})
    writer.close_all()
    builder.info.features.save_config(builder.data_dir)
