"""Exported models, in processes that cannot import this package, give the results of the original models."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import seqio

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.data import task_vocabulary
from remixer_t5x.extras.export import exported_functions, standalone
from tests.support import command_folder, feed_forward, hf_folders, saved_run

# With sentinels, an unknown letter, a text that is too long, and one without tokens.
TEXTS = ['this is a <extra_id_0>. test', 'Ünknown', '', 'the ' * 60, 'a test']
PAIRS = [['a <extra_id_1>.t<extra_id_0>', 'this', ''], ['a', 'te', 'tes']]
LENGTHS = {'inputs': 12, 'targets': 6}
# The byte ids of PAIRS, truncated, with an end token, and padded.
IDS = {
    side: [([*saved_run.VOCABULARY.encode(text)][: length - 1] + [1] + [0] * length)[:length] for text in texts]
    for (side, length), texts in zip(LENGTHS.items(), PAIRS, strict=True)
}
WITHOUT_ATTENTION = saved_run.CONFIG + ''.join(f'{name} = {value}\n' for name, value in feed_forward.SETTINGS.items())
BEAMS = ['--gin.DECODER=@beam_search.BeamSearch()', '--gin.beam_search.BeamSearch.beams=2']
# Raises an error if the program imports this package or its libraries.
REFUSE_IMPORTS = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('remixer_t5x', 'remixer_tasks', 'flax', 'seqio'):
            raise ImportError(f'{name} is imported')
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with two models: `pieces`, with SentencePiece, and `bytes`."""
    with command_folder.working_directory(tmp_path_factory.mktemp('export')) as folder:
        pieces = seqio.SentencePieceVocabulary(str(hf_folders.SPIECE), extra_ids=2)
        task_vocabulary.save_vocabulary(pieces, folder / 'vocabulary')
        saved = f"@vocabularies.saved()\nvocabularies.saved.folder = '{folder}'"
        config = saved_run.CONFIG.replace('@vocabularies.byte()', saved).replace('384', '30')
        saved_run.write_run(folder / 'pieces', config, (1,), pieces)
        saved_run.write_run(folder / 'bytes', WITHOUT_ATTENTION, steps=(1,))
        yield folder


def export(name, to, *flags):
    command = ['export', f'--gin_file={name}/config.gin', '--gin_file=hardware/cpu.gin', f'--checkpoint={name}']
    command.append(f'--gin.TASK_FEATURE_LENGTHS={LENGTHS}')
    return main([*command, f'--to={to}', *flags])


# Runs StableHLO, which requires neither TensorFlow nor this package, and then SavedModels.
PROGRAM = f"""
import json
sys.path.insert(0, '.')
import run
model, texts, pairs = run.Model(), {TEXTS!r}, {PAIRS!r}
results = [model.generate(texts), model.score(*pairs).tolist(), model.encode(texts).tolist()]
results.append(run.Model('../small').score(*pairs).tolist())
assert 'tensorflow' not in sys.modules
import tensorflow as tf
import tensorflow_text
model, texts, pairs = tf.saved_model.load('saved_model'), tf.constant(texts), tf.constant(pairs)
ids = {{name: tf.constant(rows) for name, rows in {IDS!r}.items()}}
small = tf.saved_model.load('../small/saved_model').signatures['score_ids'](**ids)
call = lambda name, **inputs: {{key: value.numpy() for key, value in model.signatures[name](**inputs).items()}}
generated = call('generate', inputs=texts)
rows = zip(generated['texts'], generated['scores'])
answers = [[[text.decode(), float(score)] for text, score in zip(*row)] for row in rows]
score = call('score', inputs=pairs[0], targets=pairs[1])['scores'].tolist()
assert call('encode_ids', inputs=tf.zeros([3, 12], tf.int32))['hidden'].shape[:2] == (3, 12)
served = [answers, score, call('encode', inputs=texts)['mean'].tolist(), small['scores'].numpy().tolist()]
print(json.dumps([results, served]))
"""


@pytest.fixture(scope='module')
def outputs(current_folder):
    """Returns the outputs of StableHLO and of SavedModel for `pieces` and a quantized `bytes`, without this package."""
    assert export('pieces', 'served', '--formats=stablehlo,saved_model', *BEAMS) == 0
    assert export('bytes', 'small', '--quantize=int8', '--functions=score', '--formats=stablehlo,saved_model') == 0
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    command = [sys.executable, '-c', REFUSE_IMPORTS + PROGRAM]
    done = subprocess.run(command, cwd=current_folder / 'served', env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_exported_model_runs_without_this_package(outputs):
    trained = remixer_t5x.load('pieces', lengths=LENGTHS)
    expected = trained.generate(TEXTS, decoder=remixer_t5x.BeamSearch(beams=2))
    for generated, scores, means, _ in outputs:
        assert [[text for text, _ in answers] for answers in generated] == [answer.texts for answer in expected]
        ours = [[score for _, score in answers] for answers in generated]
        np.testing.assert_allclose(ours, [answer.scores for answer in expected], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(scores, trained.score(*PAIRS), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(means, trained.encode(TEXTS).mean, rtol=1e-4, atol=1e-4)


def test_a_model_is_exported_without_a_gin_file(current_folder):
    command = ['export', '--checkpoint=pieces', '--to=from_flag', '--functions=encode', '--gin.STOP_STRINGS=END']
    assert main(command) == 0
    contents = json.loads((current_folder / 'from_flag/contents.json').read_text())
    assert contents['lengths'] == {'inputs': 40, 'targets': 12}
    assert contents['decoder'] == "Greedy() until 'END'"
    # A server of another user can read the weights if the umask permits it.
    modes = {path.stat().st_mode for path in (current_folder / 'from_flag').iterdir()}
    assert len(modes) == 1


def test_an_exported_embedding_model_returns_its_embeddings(current_folder):
    pooling = 'from remixer_t5x.models.architecture import encoder_only\nPOOLING = @encoder_only.first_token\n'
    config = f"{WITHOUT_ATTENTION}include 'model_types/embedding.gin'\n{pooling}"
    saved_run.write_run(current_folder / 'embedder', config, steps=(1,))
    assert main(['export', '--checkpoint=embedder', '--to=embedded']) == 0
    expected = remixer_t5x.load('embedder').encode(TEXTS).sentence
    np.testing.assert_allclose(standalone.Model('embedded').encode(TEXTS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('function', 'text', 'result'),
    [
        ('generate', b'one\rtwo\n', 'a\\r\\nb\n'),
        ('score', b'\xef\xbb\xbfa\tbc\r\na\tbc\n', '1.000000\n1.000000\n'),
        ('score', b'a\tbc\na\n', 'line 2 must be INPUT<tab>TARGET, but it has no tab'),
        ('score', b'a\tb\xff\n', 'the input must be UTF-8'),
    ],
)
def test_an_exported_program_reads_and_writes_lines(monkeypatch, capsys, function, text, result):
    model = types.SimpleNamespace(
        generate=lambda lines: [[('a\r\nb', -1.0)] for _ in lines],
        score=lambda inputs, targets: [float((*pair,) == ('a', 'bc')) for pair in zip(inputs, targets, strict=True)],
    )
    monkeypatch.setattr(standalone, 'Model', lambda: model)
    monkeypatch.setattr(sys, 'argv', ['run.py', function])
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(text)))
    if result.endswith('\n'):
        standalone.main()
        assert capsys.readouterr().out == result
    else:
        with pytest.raises(SystemExit, match=result):
            standalone.main()


def test_each_row_is_sampled_with_a_different_seed_for_every_seed_of_the_call(monkeypatch):
    drawn = []
    monkeypatch.setattr(standalone.Model, '__init__', lambda self: None)
    monkeypatch.setattr(standalone.Model, '_tokenize', lambda self, texts, side: texts)
    monkeypatch.setattr(
        standalone.Model,
        '_run_function',
        lambda self, name, texts, seeds: drawn.append([*seeds]) or {'tokens': [], 'scores': []},
    )
    for seed, rows in ((0, 3), (0, 2), (1, 3)):
        standalone.Model().generate(['a'] * rows, seed)
    first, fewer, other = drawn
    assert fewer == first[:2] and len({*first, *other}) == 6


def test_an_int8_export_is_a_quarter_of_the_size_and_nearly_equal(outputs, current_folder):
    trained = remixer_t5x.load('bytes', lengths=LENGTHS)
    scores, expected = np.asarray([output[-1] for output in outputs]), trained.score(*PAIRS)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)
    assert 0 < np.abs(scores[0] - expected).max() < 0.02 * np.abs(expected).max()
    rounded = dataclasses.replace(trained, params=exported_functions.round_params(trained.model, trained.params))
    np.testing.assert_allclose(scores[0], rounded.score(*PAIRS), rtol=1e-5)
    float32_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(trained.params))
    # Each row of 16 has a scale, and the file has a header: together about 1% at usual widths.
    assert (current_folder / 'small/weights.safetensors').stat().st_size < 0.6 * float32_bytes


def test_an_unsupported_function_raises_a_one_line_error(current_folder, capsys):
    assert export('bytes', 'refused', '--functions=classify') == 2
    assert 'must be classifier for' in capsys.readouterr().err and not (current_folder / 'refused').exists()


def test_a_failed_export_leaves_no_folder_that_the_next_run_refuses(current_folder, capsys):
    flags = ['--functions=generate', '--gin.BAD_WORDS_IDS=[[99999]]']
    assert export('bytes', 'failed', *flags) == 2
    assert 'BAD_WORDS_IDS must contain ids' in capsys.readouterr().err and not (current_folder / 'failed').exists()
