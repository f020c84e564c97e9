"""`convert` of a BERT from Hugging Face to a MODEL_DIR and back, and its vocabulary."""

import json
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import remixer_t5x
from remixer_t5x.cli.main import main
from tests.support import command_folder, hf_folders

PIECES = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'text', '##s', 'of', 'words']


@pytest.fixture
def folder(tmp_path):
    """Yields the folder of a tiny BERT with a vocabulary of ten pieces."""
    folder = hf_folders.write_tiny(tmp_path / 'bert', 'bert_tiny')
    (folder / 'vocab.txt').write_text('\n'.join(PIECES) + '\n')
    with command_folder.working_directory(tmp_path):
        yield folder


def test_a_bert_goes_to_a_model_dir_and_back_bit_for_bit(folder, tmp_path, capsys):
    assert main(['convert', f'--from_hf={folder}', f'--to={tmp_path / "ours"}']) == 0
    assert 'all weights in the output equal those in the input' in capsys.readouterr().out
    gin_file = f'--gin_file={tmp_path / "ours/model.gin"}'
    assert main(['convert', gin_file, f'--checkpoint={tmp_path / "ours"}', f'--to_hf={tmp_path / "theirs"}']) == 0
    assert 'all weights, read back from the output, equal those written' in capsys.readouterr().out
    written = load_file(tmp_path / 'theirs/model.safetensors')
    jax.tree.map(np.testing.assert_array_equal, written, hf_folders.weights('bert_tiny'))
    config = json.loads((tmp_path / 'theirs/config.json').read_text())
    assert hf_folders.BERT.items() <= config.items()
    # The model has 20 positions.
    loaded = [remixer_t5x.load(str(path)) for path in (folder, tmp_path / 'ours')]
    first, second = (model.encode('a text of words ' * 10) for model in loaded)
    assert first.truncated and first.mask.shape == (1, 20)
    np.testing.assert_array_equal(first.mean, second.mean)


def test_a_missing_library_or_vocabulary_raises_a_one_line_error(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    assert main(['convert', f'--from_hf={folder}', f'--to={tmp_path / "ours"}']) == 2
    assert "pip install 'remixer-t5x[tokenizers]'" in capsys.readouterr().err
    (folder / 'vocab.txt').unlink()
    assert main(['convert', f'--from_hf={folder}', f'--to={tmp_path / "ours"}']) == 2
    assert 'has no tokenizer.json and no vocab.txt; pass vocabulary' in capsys.readouterr().err


def test_masked_tokens_are_the_mask_piece_of_a_bert(folder):
    """[CLS] at the start of a document is not predicted."""
    import seqio
    import tensorflow as tf

    from remixer_tasks import language_modeling, vocabularies

    vocabulary = vocabularies.wordpiece(str(folder / 'vocab.txt'))
    mask, cls = PIECES.index('[MASK]'), PIECES.index('[CLS]')
    assert vocabulary.mask_id == mask
    features = {name: seqio.Feature(vocabulary) for name in ('inputs', 'targets')}
    text = vocabulary.encode('a texts of words a texts of words')
    signature = {'targets': tf.TensorSpec([None], tf.int32)}
    documents = tf.data.Dataset.from_generator(lambda: iter([{'targets': text}] * 40), output_signature=signature)
    masking = {'rate': 0.5, 'masked_share': 1.0, 'random_share': 0.0, 'whole_words': True}
    length = {'inputs': 32, 'targets': 32}
    rows = list(language_modeling.masked_lm(documents, length, features, **masking).as_numpy_iterator())
    inputs, targets = (np.stack([row[name] for row in rows[:-1]]) for name in ('inputs', 'targets'))
    assert (inputs[targets > 0] == mask).all() and (targets > 0).sum() > 20
    assert cls not in targets and (inputs == cls).any()
    # '##s' is masked with the piece before it.
    piece, suffix = PIECES.index('text'), PIECES.index('##s')
    original = np.where(targets > 0, targets, inputs)
    positions = np.argwhere((original[:, :-1] == piece) & (original[:, 1:] == suffix))
    assert len(positions) and all(
        (targets[row, column] > 0) == (targets[row, column + 1] > 0) for row, column in positions
    )
