"""Small training runs of a feed-forward model on a task whose text is in memory.

`main` is the function of each process of a run; `TrainingRuns` starts these processes.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import jax
import jax.numpy as jnp
import optax
import seqio
import tensorflow as tf
from flax import linen as nn

from remixer_t5x.cli import console
from remixer_t5x.data import pipeline
from remixer_t5x.devices import partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import held_out_loss
from remixer_t5x.optim import optimizer
from remixer_t5x.train import loop, settings
from tests.support.real_processes import Process

# Training lines that consist of a single letter, by index. `loss_factors` scales their losses.
MARKED_LINES = {77: 'Z', 33: 'Y'}
LENGTHS = {'inputs': 16, 'targets': 12}


class TinyModule(nn.Module):
    """Adds the mean input embedding to each target embedding, and applies one hidden layer."""

    vocab_size: int
    embed: int = 16

    @nn.compact
    def __call__(self, inputs, decoder_inputs, dropout_rate=0.0, dropout_rng=None):
        sizes = {'vocab': self.vocab_size, 'embed': self.embed, 'mlp': 2 * self.embed}

        def matrix(name, initializer, *axes):
            boxed = nn.with_logical_partitioning(initializer, axes)
            return self.param(name, boxed, tuple(sizes[axis] for axis in axes))

        table = matrix('table', nn.initializers.normal(1.0), 'vocab', 'embed')
        kernel = matrix('kernel', nn.initializers.lecun_normal(), 'embed', 'mlp')
        logits = matrix('logits', nn.initializers.lecun_normal(), 'mlp', 'vocab')
        weights = (inputs > 0).astype(jnp.float32)[..., None]
        memory = jnp.sum(table[inputs] * weights, 1, keepdims=True) / (1.0 + jnp.sum(weights, 1, keepdims=True))
        hidden = jax.nn.gelu((table[decoder_inputs] + memory) @ kernel)
        if dropout_rate and dropout_rng is not None:
            keep = 1 - dropout_rate
            hidden = hidden * jax.random.bernoulli(dropout_rng, keep, hidden.shape) / keep
        return hidden @ logits


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """The part of the model interface that training requires, implemented with `TinyModule`."""

    model_type = 'encoder_decoder'
    module = None
    vocab_size: int = 384
    nan_below: int = -1  # target ids below it make the loss NaN
    loss_factors: tuple[float, ...] = ()  # factors of the losses of MARKED_LINES
    embed: int = 16
    dropout_rate: float = 0.0

    def init(self, rng, batch_shapes):
        shape = batch_shapes['encoder_input_tokens'], batch_shapes['decoder_target_tokens']
        return TinyModule(self.vocab_size, self.embed).init(rng, *(jnp.ones(s, jnp.int32) for s in shape))['params']

    def without_label_smoothing(self):
        return self

    def loss(self, params, batch, dropout_rng=None):
        targets, weights = batch['decoder_target_tokens'], batch['decoder_loss_weights'].astype(jnp.float32)
        arrays = batch['encoder_input_tokens'], batch['decoder_input_tokens']
        module = TinyModule(self.vocab_size, self.embed)
        logits = module.apply({'params': params}, *arrays, self.dropout_rate, dropout_rng)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        losses = jnp.where((targets > 0) & (targets < self.nan_below), jnp.nan, losses)
        for letter, factor in zip(MARKED_LINES.values(), self.loss_factors, strict=False):
            # The byte vocabulary has three special tokens before the bytes.
            marked = jnp.any(targets == ord(letter) + 3, -1, keepdims=True)
            losses = losses * jnp.where(marked, factor, 1.0)
        loss = jnp.sum(losses * weights)
        correct = jnp.sum((jnp.argmax(logits, -1) == targets) * weights)
        sequences = jnp.sum(jnp.any(targets > 0, -1).astype(jnp.float32))
        sums = {'weights': jnp.sum(weights), 'correct': correct, 'sequences': sequences}
        return loss, {'loss': loss, 'z_loss': 0.0 * loss, **sums}


def lines(count, start=0):
    """Returns distinct lines of different lengths."""
    return [f'line {i} {"abcdefg"[: i % 7]}' for i in range(start, start + count)]


def task(name='tiny', train=200, validation=21, shuffle_buffer_size=32, poison=None, marked=False):
    """Returns a task over `lines` whose input ids have random noise.

    Args:
        poison: a line that raises an error when it is read.
        marked: whether the training data contains MARKED_LINES.
    """
    texts = {'train': lines(train), 'validation': lines(validation, 1000)}
    for line in MARKED_LINES if marked else ():
        texts['train'][line] = MARKED_LINES[line]
    features = {key: seqio.Feature(seqio.ByteVocabulary(extra_ids=100)) for key in LENGTHS}

    def read(split, shuffle_files, seed=None):
        strings = tf.data.Dataset.from_tensor_slices(tf.constant(texts[split], tf.string))
        dataset = strings.map(lambda x: {'inputs': x, 'targets': x})
        if poison is not None:
            dataset = dataset.map(lambda x: {**x, 'inputs': _refuse(x['inputs'], poison)})
        return dataset

    @seqio.map_over_dataset(num_seeds=1)
    def noise(example, seed):
        ids = example['inputs']
        return {**example, 'inputs': ids + tf.random.stateless_uniform(tf.shape(ids), seed, 0, 3, tf.int32)}

    return seqio.Task(
        name,
        source=seqio.FunctionDataSource(read, ['train', 'validation']),
        output_features=features,
        preprocessors=[seqio.preprocessors.tokenize, noise, seqio.preprocessors.append_eos_after_trim],
        shuffle_buffer_size=shuffle_buffer_size,
    )


def _refuse(text, poison):
    check = tf.debugging.Assert(tf.not_equal(text, poison), [f'UserError: notes.jsonl line 7 is not JSON: {poison}'])
    with tf.control_dependencies([check]):
        return tf.identity(text)


def _adam(learning_rate):
    return optimizer.Optimizer(lambda step: jnp.float32(learning_rate), lambda axes: optax.adam(learning_rate))


def run(
    model_dir,
    train_steps,
    *,
    batch_size=8,
    log_period=3,
    eval_period=10,
    checkpoint_period=5,
    keep=3,
    seed=0,
    nan_below=-1,
    dropout_rate=0.1,
    mesh=None,
    learning_rate=1e-2,
    microbatches=1,
    vocab_size=384,
    embed=16,
    poison=None,
    loss_factors=(),
    recovery=None,
    stop_after_evaluations=None,
    save_position=True,
    length_buckets=(),
    eval_at_start=False,
    quiet=True,
):
    """Trains, and returns `settings.TrainResult`. `recovery`: arguments of `settings.Recovery`."""
    tiny = task(poison=poison, marked=bool(loss_factors))
    step_config = settings.StepConfig(
        TinyModel(vocab_size, nan_below, tuple(loss_factors), embed, dropout_rate),
        _adam(learning_rate),
        partition.Partitioner(**(mesh or {})),
        microbatches,
        seed=seed,
    )
    data_options = {'save_position': save_position, 'length_buckets': length_buckets}
    config = pipeline.DatasetConfig(tiny, LENGTHS, batch_size, seed=seed, **data_options)
    held_out = dataclasses.replace(config, split='validation', shuffle=False)
    evaluation_options = {'stop_after_evaluations': stop_after_evaluations, 'eval_at_start': eval_at_start}
    periods = settings.Periods(train_steps, log_period, eval_period, checkpoint_period, **evaluation_options)
    folder, evaluation = settings.Folder(model_dir, keep), held_out_loss.Evaluation(held_out)
    run_settings = settings.Run(
        step_config, config, folder, periods, evaluation, recovery=settings.Recovery(**(recovery or {}))
    )
    return loop.train(run_settings, config_text='# tiny\n', show_progress=not quiet)


def main(settings: dict[str, Any]) -> int:
    """Calls `train` in a new process."""
    console.silence_library_logs()
    return train(settings)


def train(settings: dict[str, Any]) -> int:
    """Calls `run`, prints the result as JSON, and returns the exit code that the command line would return."""
    try:
        # AutoGraph takes seconds to rewrite the functions of seqio, none of which requires it.
        result = tf.autograph.experimental.do_not_convert(run)(**settings)
        print(json.dumps(dataclasses.asdict(result)), flush=True)
    except UserError as error:
        print(f'error: {error}', file=sys.stderr, flush=True)
        return 2
    return 0


class TrainingRuns:
    """Runs trainings in this process, or starts them in processes that write their output to files in `folder`."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._numbers = itertools.count(1)

    def start(
        self,
        *,
        devices: int = 1,
        file_size: int | None = None,
        environment: Mapping[str, str] | None = None,
        **settings,
    ) -> Process:
        """Starts a process with the arguments `settings` of `run`; see `Process` for the other arguments."""
        output = self._folder / f'output{next(self._numbers)}.txt'
        return Process(main, settings, output=output, devices=devices, environment=environment, file_size=file_size)

    def run(self, **settings: Any) -> tuple[int, str]:
        """Runs to the end, and returns the exit code and the output. Arguments of `start` require a new process."""
        if settings.keys() & {'devices', 'file_size', 'environment'}:
            process = self.start(**settings)
            return process.wait(), process.output()
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = train(settings)
        return code, output.getvalue()
