"""Runs on a cached task, each in a process of its own, for `test_data_cache.py`.

Usage: `python -m tests.support.cached_training SETTINGS`.

SETTINGS is JSON: `examples`, the cache; `folder`, where the
runs go; `steps`. Three processes run one after the other: one is let be, one is killed on its way, one resumes it.
"""

import json
import os
import pathlib
import signal
import sys
import time

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import seqio

from remixer_t5x.data import pipeline
from remixer_t5x.devices import partition
from remixer_t5x.evaluation import held_out_loss
from remixer_t5x.training import loop, settings
from remixer_tasks import pretraining
from remixer_tasks.text import text_corpus
from tests.support import tiny_training

LENGTHS = {'inputs': 24, 'targets': 10}


def task(read=None):
    """Span corruption of bytes, 'cached_text'. Without `read` its text can be had from the cache alone."""
    corpus = text_corpus.ParsedCorpus('some text', f'some text {read}', read or _refuse)
    return pretraining.span_corruption(corpus, seqio.ByteVocabulary(100), 'cached_text', shuffle_buffer_size=16)


def _refuse(malformed):
    raise AssertionError('the text was read instead of the cache')


def _run(given, name):
    learner = settings.Learner(tiny_training.TinyModel(), tiny_training._adam(1e-2), partition.Partitioner(), seed=0)
    config = pipeline.DatasetConfig(task(), LENGTHS, 8, use_cached=True, cache_dir=given['examples'])
    held_out = pipeline.DatasetConfig(
        task(), LENGTHS, 8, 'validation', False, use_cached=True, cache_dir=given['examples']
    )
    loop.train(
        settings.Run(
            learner,
            config,
            settings.Folder(os.path.join(given['folder'], name), 3, None),
            settings.Periods(given['steps'], 1, 8, 7),
            held_out_loss.Evaluation(held_out),
        ),
        config_text='# cached\n',
        show_progress=False,
    )


def _start(given, name):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _run(given, name)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def _end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(given):
    codes = [_end(_start(given, 'unbroken'))]
    child = _start(given, 'broken')
    log = pathlib.Path(given['folder'], 'broken', 'metrics.jsonl')
    # Not for ever: a run that fails must not stall whoever waits for it.
    until = time.monotonic() + 120
    while time.monotonic() < until and not (log.exists() and len(log.read_bytes().splitlines()) > given['steps'] // 2):
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    codes.append(_end(child))
    codes.append(_end(_start(given, 'broken')))
    print(json.dumps(codes))


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
