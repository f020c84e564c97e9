"""GPT-2's weights from Hugging Face become ours and theirs again, and compute the same; its tokenizer gives the same
ids."""

import dataclasses
import importlib.util
import json

import gin
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import gpt2 as hf_gpt2
from remixer_t5x.models import interface
from remixer_t5x.models.losses import CrossEntropy
from remixer_tasks.vocabulary import byte_pairs
from tests.support.paths import GOLDEN

pytestmark = [
    pytest.mark.filterwarnings('ignore::DeprecationWarning'),
    pytest.mark.filterwarnings('ignore::ResourceWarning'),
]
CONFIG = {
    'model_type': 'gpt2', 'vocab_size': 60, 'n_embd': 24, 'n_layer': 3, 'n_head': 2, 'n_positions': 20, 'n_inner': 40,
    'eos_token_id': 59,
}  # fmt: skip
END, TOKENS = 59, 60
# Letters, and two merges; the end token is the last.
PIECES = [*'!abcdefghijklmnopqrstuvwxyz', 'Ġ', 'th', 'the', 'Ġthe', 'Ã', '¤']
MERGES = [('t', 'h'), ('th', 'e'), ('Ġ', 'the')]


@pytest.fixture(autouse=True)
def _clean_gin():
    yield
    gin.clear_config()


@pytest.fixture(scope='module')
def recorded():
    with np.load(GOLDEN / 'gpt2_tiny.npz') as arrays:
        return dict(arrays)


def write_tokenizer(folder, ids=TOKENS):
    names = [*PIECES, *(f'<{index}>' for index in range(len(PIECES), ids - 1)), '<|endoftext|>']
    (folder / 'vocab.json').write_text(json.dumps({piece: index for index, piece in enumerate(names)}))
    (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(map(' '.join, MERGES)) + '\n')


@pytest.fixture(scope='module')
def folder(recorded, tmp_path_factory):
    """A folder as transformers writes it."""
    folder = tmp_path_factory.mktemp('gpt2')
    (folder / 'config.json').write_text(json.dumps(CONFIG))
    weights = {name.removeprefix('weights/'): a for name, a in recorded.items() if name.startswith('weights/')}
    save_file(weights, folder / 'model.safetensors', {'format': 'pt'})
    write_tokenizer(folder)
    return folder


def test_logits_are_the_recorded_ones(recorded, folder):
    model = remixer_t5x.build_model(
        'models/gpt2.gin', 'sizes/tiny.gin', VOCAB_SIZE=61, EMBED_DIM=24, MLP_DIM=40, NUM_HEADS=2, HEAD_DIM=12,
        NUM_DECODER_LAYERS=3, MAX_TARGET_LENGTH=20,
    )  # fmt: skip
    model = dataclasses.replace(model, module=model.module.clone(begin_id=END + 1))
    params = hf_gpt2.read(str(folder)).params()
    wanted = interface.param_shapes(model, {'decoder_target_tokens': (1, 2)})
    shapes = {jax.tree_util.keystr(p[:-1]): a.shape for p, a in jax.tree_util.tree_leaves_with_path(wanted)}
    assert shapes == {jax.tree_util.keystr(p): a.shape for p, a in jax.tree_util.tree_leaves_with_path(params)}
    tokens = recorded['tokens'] + 1
    inputs = np.pad(tokens, ((0, 0), (1, 0)))
    logits = jax.jit(lambda params: model.module.apply({'params': params}, inputs, enable_dropout=False))
    ours = np.asarray(logits(params))[..., 1:]
    theirs = recorded['logits']
    assert np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)) < 1e-5
    generate = jax.jit(lambda params: model.generate(params, {'prompt_tokens': tokens}, 4, eos_id=END + 1).tokens[:, 0])
    is_end = recorded['continued'] == END
    ended = np.cumsum(is_end, axis=1) - is_end > 0
    np.testing.assert_array_equal(np.asarray(generate(params)), np.where(ended, 0, recorded['continued'] + 1))


def test_the_loss_is_the_cross_entropy_of_recorded_logits(recorded, folder):
    """Padding has no probability, and an end token inside of a row is a token as all others."""
    loaded = remixer_t5x.load(str(folder))
    begun = np.pad(recorded['tokens'], ((0, 0), (1, 0)), constant_values=END)
    theirs = recorded['logits'] - np.log(np.sum(np.exp(recorded['logits']), -1, keepdims=True))
    targets = recorded['tokens'] + 1
    inputs = np.where(np.arange(targets.shape[1]) == 0, 0, begun[:, :-1] + 1)
    batch = {'decoder_input_tokens': inputs, 'decoder_target_tokens': targets}
    wanted = np.take_along_axis(theirs[:, :-1], recorded['tokens'][..., None], -1)[..., 0].sum(-1)
    np.testing.assert_allclose(loaded.model.score(loaded.params, batch), wanted, rtol=1e-5)
    smoothed = dataclasses.replace(loaded.model.loss_function, label_smoothing=0.1)
    gradient = jax.grad(lambda p: dataclasses.replace(loaded.model, loss_function=smoothed).loss(p, batch)[0])
    assert not np.any(gradient(loaded.params)['token_embedder']['embedding'][0])


def test_a_folder_is_converted_and_loaded(folder, tmp_path, capsys):
    assert not main(['convert', f'--from_hf={folder}', f'--to={tmp_path}/ours'])
    assert 'bit by bit' in capsys.readouterr().out
    texts = [remixer_t5x.load(str(place)).generate('the cat', max_length=4)[0] for place in (folder, tmp_path / 'ours')]
    assert texts[0].texts == texts[1].texts and np.isfinite(texts[0].scores[0])


@pytest.fixture(scope='module')
def ours(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp('converted') / 'ours'
    assert not main(['convert', f'--from_hf={folder}', f'--to={place}'])
    return place


def test_the_way_back_gives_the_same_bits_and_tokenizer(folder, ours, recorded, tmp_path, capsys):
    command = ['convert', f'--gin_file={ours}/model.gin', f'--checkpoint={ours}', f'--to_hf={tmp_path}/theirs']
    assert not main(command), capsys.readouterr().err
    assert 'every weight, read back, is what was written' in capsys.readouterr().out
    written = load_file(tmp_path / 'theirs/model.safetensors')
    weights = {name.removeprefix('weights/'): a for name, a in recorded.items() if name.startswith('weights/')}
    assert set(written) == set(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)
    config = json.loads((tmp_path / 'theirs/config.json').read_text())
    assert hf_gpt2.from_config(config, 'theirs') == hf_gpt2.from_config(CONFIG, 'a folder')
    for file in ('vocab.json', 'merges.txt'):
        assert (tmp_path / 'theirs' / file).read_text() == (folder / file).read_text()


@pytest.mark.parametrize('runs', [(1, 2), (2, 1)])
def test_layers_in_several_runs_are_written_in_their_order(folder, runs):
    source = hf_gpt2.read(str(folder))
    params = source.params()
    whole = hf_gpt2.to_huggingface(source.gpt2, params)
    stacked, start = params['decoder'].pop('run_0'), 0
    for index, count in enumerate(runs):
        part = slice(start, start + count)
        params['decoder'][f'run_{index}'] = jax.tree.map(lambda leaf, part=part: leaf[part], stacked)
        start += count
    apart = hf_gpt2.to_huggingface(source.gpt2, params, runs)
    assert set(apart) == set(whole) and all(np.array_equal(apart[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ('flags', 'words'),
    [(['--gin_file=sublayers/fnet.gin', '--gin.DECODER_MIXER=@fnet.FNet'],
      "GPT-2 does not have this model: a layer has the sublayer FNet"),
     (['--gin.gpt2/gelu_mlp.GeluMLP.approximate=False'], 'GELU is exact'),
     (['--gin.TIED_OUTPUT=False'], 'the output has a matrix of its own'),
     (['--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384'], 'VOCABULARY is a ByteVocabulary')],
)  # fmt: skip
def test_another_decoder_is_not_a_gpt2(ours, tmp_path, capsys, flags, words):
    command = ['convert', f'--gin_file={ours}/model.gin', *flags, f'--checkpoint={ours}', f'--to_hf={tmp_path}/theirs']
    assert main(command) == 2
    error = capsys.readouterr().err
    assert words in error and error.count('\n') == 1 and not (tmp_path / 'theirs').exists()


def test_text_becomes_the_byte_pairs_that_were_learned_first(folder):
    vocabulary = byte_pairs.BytePairs(str(folder), END)
    text = 'the ä that the cat'
    ids = vocabulary.encode(text)
    names = json.loads((folder / 'vocab.json').read_text())
    wanted = ['the', 'Ġ', 'Ã', '¤', 'Ġ', 'th', 'a', 't', 'Ġthe', 'Ġ', 'c', 'a', 't']
    assert ids == [names[piece] + 1 for piece in wanted] and vocabulary.decode(ids) == text
    assert vocabulary.encode('!') == [1] and vocabulary.eos_id == END + 1 and vocabulary.pad_id == 0
    assert sum(task_vocabulary.token_bytes(vocabulary)[ids]) == len(text.encode())
    assert np.array_equal(vocabulary.encode_tf(text).numpy(), ids)


def test_words_are_gpt2s():
    text = "I'll take 25 of  them,\n\n  it's Émile's -- ok?\t"
    wanted = ['I', "'ll", ' take', ' 25', ' of', ' ', ' them', ',', '\n\n ', ' it', "'s", ' Émile', "'s", ' --', ' ok']
    assert list(byte_pairs.words(text)) == [*wanted, '?', '\t']


@pytest.mark.parametrize(
    ('changed', 'words'),
    [({'activation_function': 'relu'}, 'activation_function'),
     ({'tie_word_embeddings': False}, 'tie_word_embeddings'),
     ({'n_head': 7}, 'does not divide'),
     ({'eos_token_id': 60}, 'eos_token_id 60')],
)  # fmt: skip
def test_another_architecture_is_refused_in_one_line(changed, words):
    with pytest.raises(UserError, match=words) as error:
        hf_gpt2.from_config({**CONFIG, **changed}, 'a folder')
    assert '\n' not in str(error.value)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec('torch') is None or importlib.util.find_spec('transformers') is None,
    reason='torch and transformers are not installed: scripts/test.sh --references',
)


@needs_transformers
def test_logits_are_those_of_transformers(folder):
    import torch
    import transformers

    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()
    loaded = remixer_t5x.load(str(folder))
    ids = np.array([loaded.vocabulary.encode('the cat that')])
    begun = np.pad(ids - 1, ((0, 0), (1, 0)), constant_values=END)
    with torch.no_grad():
        found = theirs(input_ids=torch.from_numpy(begun.astype(np.int64))).logits.numpy()
    inputs = np.pad(ids, ((0, 0), (1, 0))).astype(np.int32)
    ours = loaded.model.module.apply({'params': loaded.params}, inputs, enable_dropout=False)[..., 1:]
    assert np.max(np.abs(ours - found)) / np.max(np.abs(found)) < 1e-5


@needs_transformers
def test_rows_of_several_documents_are_transformers(folder):
    """Loss, gradients, scores and continuations with end tokens inside of rows and prompts."""
    import torch
    import transformers

    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()
    rows = np.random.default_rng(1).integers(0, END, (3, 14))
    rows[:, 5] = rows[1:, 9] = rows[2, 6] = END
    begun = torch.from_numpy(np.pad(rows, ((0, 0), (1, 0)), constant_values=END))
    log_likely = torch.log_softmax(theirs(begun[:, :-1]).logits, dim=-1).gather(2, begun[:, 1:, None])[..., 0]
    (-log_likely.sum()).backward()

    loaded = remixer_t5x.load(str(folder))
    tokens = (rows + 1).astype(np.int32)
    batch = {
        'decoder_input_tokens': np.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        'decoder_target_tokens': tokens,
        'decoder_loss_weights': np.ones_like(tokens),
    }
    model = dataclasses.replace(loaded.model, loss_function=CrossEntropy(z_loss=0.0))
    (loss, _), gradient = jax.jit(jax.value_and_grad(model.loss, has_aux=True))(loaded.params, batch)
    np.testing.assert_allclose(loss, -log_likely.sum().item(), rtol=1e-5)
    wanted = theirs.transformer.wpe.weight.grad.numpy()
    table = gradient['decoder']['position_embedding']['table']
    np.testing.assert_allclose(table, wanted, atol=1e-4 * np.abs(wanted).max())
    scores = jax.jit(model.score)(loaded.params, batch)
    np.testing.assert_allclose(scores, log_likely.sum(dim=1).detach().numpy(), rtol=1e-5)

    continued = theirs.generate(begun, max_new_tokens=4, do_sample=False, pad_token_id=END)[:, begun.shape[1] :].numpy()
    wanted = np.where(np.cumsum(continued == END, axis=1) - (continued == END) > 0, -1, continued)
    generate = jax.jit(lambda params: model.generate(params, {'prompt_tokens': tokens}, 4, eos_id=END + 1))
    found = np.asarray(generate(loaded.params).tokens[:, 0])
    np.testing.assert_array_equal(found, wanted + 1)
