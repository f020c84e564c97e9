"""Modules written by a test are found even if Python has already listed their folder."""

import importlib
import os
import sys

import pytest
import seqio

from tests.support import temporary_modules


def test_a_module_with_the_mtime_of_an_earlier_listing_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match='written_in_one_tick'):
        importlib.import_module('written_in_one_tick')
    mtime = tmp_path.stat().st_mtime_ns
    (tmp_path / 'written_in_one_tick.py').write_text('VALUE = 1\n')
    os.utime(tmp_path, ns=(mtime, mtime))
    assert importlib.import_module('written_in_one_tick').VALUE == 1
    del sys.modules['written_in_one_tick']


MODULE = """
import gin
import seqio
import tensorflow as tf

VALUE = {value}


@gin.configurable
def twice(number=VALUE):
    return 2 * number


def examples(split, shuffle_files, seed=None):
    return tf.data.Dataset.from_tensors({{'targets': 'a'}})


seqio.TaskRegistry.add(
    'written_task',
    source=seqio.FunctionDataSource(examples, splits=['train']),
    preprocessors=[],
    output_features={{'targets': seqio.Feature(seqio.ByteVocabulary())}},
)
seqio.MixtureRegistry.add('written_mixture', ['written_task'], default_rate=1.0)
"""


def test_an_unloaded_module_can_be_written_again_with_the_same_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'written_package').mkdir()
    modules_before = set(sys.modules)
    for value in (1, 22):
        (tmp_path / 'written_package' / 'written_module.py').write_text(MODULE.format(value=value))
        assert importlib.import_module('written_package.written_module').twice() == 2 * value
        assert 'written_mixture' in seqio.MixtureRegistry.names()
        others = set(seqio.TaskRegistry.names()) - {'written_task'}
        temporary_modules.unload(tmp_path)
        assert set(seqio.TaskRegistry.names()) == others and 'written_mixture' not in seqio.MixtureRegistry.names()
        assert not {'written_package', 'written_package.written_module'} & set(sys.modules)
        assert modules_before <= set(sys.modules)
