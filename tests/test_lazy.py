"""TensorFlow and seqio are imported at their first use, with no accelerator and without Keras."""

import gc
import importlib.util
import os
import subprocess
import sys
import types

import pytest

from remixer_t5x import lazy
from remixer_t5x.errors import UserError

_LIGHT = (
    'remixer_tasks.python_docs',
    'remixer_tasks.local_files',
    'remixer_tasks.c4',
    'remixer_tasks.vocabularies',
    'remixer_tasks.pretraining',
    'remixer_t5x.data.pipeline',
    'remixer_t5x.evaluate.task_evaluation',
    'remixer_t5x.train.loop',
)
_LOADED = 'print(*sorted({"tensorflow", "seqio", "keras", "pandas", "matplotlib", "pyglove"} & set(sys.modules)))\n'


def _run(program):
    return subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True).stdout


def test_modules_that_gin_files_name_load_neither_library():
    assert _run(f'import sys, {", ".join(_LIGHT)}\n{_LOADED}') == '\n'


def test_the_first_use_loads_them_without_keras_which_can_be_used_later():
    said = _run(
        'import sys\n'
        'from remixer_t5x.lazy import seqio, tf\n'
        f'assert seqio.ByteVocabulary().eos_id == 1\n{_LOADED}'
        'print(tf.config.get_visible_devices("GPU"), tf is not sys.modules["tensorflow"], tf.data.Dataset.__name__)\n'
        'import matplotlib, pandas, tensorflow, tensorflow_text\nprint(pandas.DataFrame.__name__)\n'
        'print("keras" in sys.modules, tensorflow.keras.layers.Layer.__name__)\n'
        'print(tensorflow_text.keras.layers.ToDense.__name__)\n'
        'from tensorflow.keras import losses\nfrom tensorflow_text.python import keras\n'
        'print(keras.layers.ToDense is tensorflow_text.keras.layers.ToDense)\n'
        'print(seqio.dataset_providers.pg.hyper.HyperPrimitive.__name__)'
    )
    layers = ['False Layer', 'ToDense', 'True']
    assert said.splitlines() == ['seqio tensorflow', '[] True DatasetV2', 'DataFrame', *layers, 'HyperPrimitive']


def test_accelerators_are_hidden_where_another_library_has_imported_tensorflow(monkeypatch):
    tensorflow, hidden = types.ModuleType('tensorflow'), []
    tensorflow.data = 'data'
    tensorflow.config = types.SimpleNamespace(set_visible_devices=lambda *given: hidden.append(given))
    monkeypatch.setitem(sys.modules, 'tensorflow', tensorflow)
    spec = importlib.util.find_spec('remixer_t5x.lazy')
    first = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(first)
    assert (first.tf.data, first.tf.data) == ('data', 'data')
    assert hidden == [([], 'GPU'), ([], 'TPU')]


def test_a_name_that_the_library_lacks_is_an_attribute_error():
    pytest.importorskip('tensorflow')
    from remixer_t5x.lazy import tf

    with pytest.raises(AttributeError, match='nothing_like_this'):
        tf.nothing_like_this  # noqa: B018


@pytest.mark.parametrize('collects', [True, False])
def test_an_import_is_not_interrupted_by_garbage_collection(collects, monkeypatch):
    """Each collection would look through all that the import has made; a process that switched it off keeps it off."""
    while_importing = []
    monkeypatch.setattr(lazy, '_tensorflow', lambda: None)
    monkeypatch.setattr(lazy, 'check_installed', lambda name: None)
    monkeypatch.setattr(importlib, 'import_module', lambda name: while_importing.append(gc.isenabled()))
    monkeypatch.setitem(sys.modules, 'imported_late', None)
    monkeypatch.delitem(sys.modules, 'imported_late')
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError, match='imported_late'):
            lazy._load('imported_late')
        assert while_importing == [False] and gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(('error', 'shown'), [(UserError('a mistake'), ''), (ImportError('a bug'), 'the reason')])
def test_output_of_libraries_is_shown_only_if_their_import_fails(error, shown, capfd):
    with pytest.raises(type(error)), lazy.without_stderr():
        os.write(2, b'the reason')
        raise error
    assert capfd.readouterr().err == shown


def test_loading_tensorflow_in_a_command_prints_nothing():
    pytest.importorskip('tensorflow')
    code = 'from remixer_t5x import lazy\nfrom remixer_t5x.cli import streams\nstreams.hush()\nlazy.tf.__version__'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
