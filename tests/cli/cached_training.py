"""A run on a cached task, for `test_data_cache.py`."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import seqio

from remixer_t5x.data import pipeline
from remixer_t5x.devices import partition
from remixer_t5x.evaluate import held_out_loss
from remixer_t5x.train import loop, settings
from remixer_tasks import pretraining
from remixer_tasks.corpora import text_corpus
from tests.support import tiny_training

LENGTHS = {'inputs': 24, 'targets': 10}


def task(read=None):
    """Span corruption of bytes, 'cached_span_corruption'. Without `read` its text can be had from the cache alone."""
    corpus = text_corpus.ParsedCorpus('some text', f'some text {read}', read or _refuse)
    return pretraining.span_corruption(corpus, seqio.ByteVocabulary(100), 'cached', shuffle_buffer_size=16)


def _refuse(malformed):
    raise AssertionError('the text was read instead of the cache')


def train(examples, folder, steps):
    """`steps` steps in `folder` on the cache in the folder `examples`."""
    learner = settings.StepConfig(tiny_training.TinyModel(), tiny_training._adam(1e-2), partition.Partitioner(), seed=0)
    config = pipeline.DatasetConfig(task(), LENGTHS, 8, use_cached=True, cache_dir=examples)
    held_out = pipeline.DatasetConfig(task(), LENGTHS, 8, 'validation', False, use_cached=True, cache_dir=examples)
    loop.train(
        settings.Run(
            learner,
            config,
            settings.Folder(folder, 3, None),
            settings.Periods(steps, 1, 8, 7),
            held_out_loss.Evaluation(held_out),
        ),
        config_text='# cached\n',
        show_progress=False,
    )
