"""The corpora of the project."""

import ast

import pytest

from remixer_tasks import c4, pretraining, python_docs, vocabularies
from tests.support.error_lines import error_message

SOURCE = '''
"""What the module is."""

def first(a, *, b=2):
    """Does one thing."""

def silent():
    pass

class Thing:
    """A thing."""

    def method(self):
        """Does another."""
'''


def test_docstrings_are_converted_to_documents():
    assert list(python_docs.iterate_module_documents(ast.parse(SOURCE), 'm')) == [
        'm\n\nWhat the module is.',
        'm.first(a, *, b=2)\n\nDoes one thing.',
        'class m.Thing\n\nA thing.\n\nm.Thing.method(self)\n\nDoes another.',
    ]


def test_python_documentation_is_enough_to_train_on(shared, monkeypatch):
    # All tests of the run share this cache, because parsing takes ten seconds.
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(shared / 'cache'))
    corpus = python_docs.corpus()
    train = list(corpus.read_training_documents())
    held_out = [example['text'] for example in corpus.create_source().get_dataset('validation').as_numpy_iterator()]
    assert sum(map(len, train)) > 1_000_000
    assert 0.02 < len(held_out) / len(train) < 0.08
    assert any('asyncio' in document for document in train)


def test_missing_c4_is_reported(tmp_path):
    source = c4.corpus(data_dir=str(tmp_path)).create_source()
    assert 'set TFDS_DATA_DIR' in error_message(source.get_dataset, 'train')


def test_the_vocabulary_of_a_tfds_data_set_depends_on_its_folder(monkeypatch):
    files = []
    for folder in ('/first', '/second'):
        monkeypatch.setenv('TFDS_DATA_DIR', folder)
        files += [
            vocabularies.trained(corpus, 1024).sentencepiece_model_file
            for corpus in (c4.corpus(), c4.corpus(data_dir='/first'))
        ]
    assert files[0] == files[1] == files[3] != files[2]


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_c4_examples_are_full(real_data):
    corpus = c4.corpus(data_dir=str(real_data / 'c4_en_minimal'))
    vocabulary = vocabularies.sentencepiece(str(real_data / 't5_spm' / 'spiece.model'))
    task = pretraining.span_corruption(corpus, vocabulary)
    lengths = {'inputs': 512, 'targets': 114}
    num_tokens = sum(len(vocabulary.encode(text)) for text in corpus.read_training_documents())
    examples = list(task.get_dataset(lengths, 'train', shuffle=True, seed=0).as_numpy_iterator())
    assert len(examples) == -(-num_tokens // 568)
    sizes = [(len(example['inputs']), len(example['targets'])) for example in examples]
    assert sizes.count((512, 114)) >= len(examples) - 1
