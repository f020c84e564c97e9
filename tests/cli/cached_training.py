"""Runs on a cached task, each in a process of its own, for `test_data_cache.py`: `python cached_training.py SETTINGS`.

SETTINGS is JSON: `training`, the path of the runtime's `tiny_training.py`; `examples`, the cache; `folder`, where the
runs go; `steps`. Three processes run one after the other: one is let be, one is killed on its way, one resumes it.
"""

import json
import os
import pathlib
import runpy
import signal
import sys
import time
import types

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import seqio

from remixer_t5x.runtime import data, evaluation, loop, partition, settings
from tasks import pretraining, text_corpus

LENGTHS = {'inputs': 24, 'targets': 10}


def task(read=None):
    """Span corruption of bytes, 'cached_text'. Without `read` its text can be had from the cache alone."""
    corpus = text_corpus.ParsedCorpus('some text', f'some text {read}', read or _refuse)
    return pretraining.span_corruption(corpus, seqio.ByteVocabulary(100), 'cached_text', shuffle_buffer_size=16)


def _refuse(malformed):
    raise AssertionError('the text was read instead of the cache')


def _run(tiny, given, name):
    learner = settings.Learner(tiny.TinyModel(), tiny._adam(1e-2), partition.Partitioner(), seed=0)
    config = data.DatasetConfig(task(), LENGTHS, 8, use_cached=True, cache_dir=given['examples'])
    held_out = data.DatasetConfig(task(), LENGTHS, 8, 'validation', False, use_cached=True, cache_dir=given['examples'])
    loop.train(
        settings.Run(
            learner,
            config,
            settings.Folder(os.path.join(given['folder'], name), 3, None),
            settings.Periods(given['steps'], 1, 8, 7),
            evaluation.Evaluation(held_out),
        ),
        config_text='# cached\n',
        show_progress=False,
    )


def _start(tiny, given, name):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _run(tiny, given, name)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def _end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(given):
    tiny = types.SimpleNamespace(**runpy.run_path(given['training']))
    codes = [_end(_start(tiny, given, 'unbroken'))]
    child = _start(tiny, given, 'broken')
    log = pathlib.Path(given['folder'], 'broken', 'metrics.jsonl')
    # Not for ever: a run that fails must not stall whoever waits for it.
    until = time.monotonic() + 120
    while time.monotonic() < until and not (log.exists() and len(log.read_bytes().splitlines()) > given['steps'] // 2):
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    codes.append(_end(child))
    codes.append(_end(_start(tiny, given, 'broken')))
    print(json.dumps(codes))


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
