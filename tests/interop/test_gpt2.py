"""Hugging Face's GPT-2 computes the same on both sides, and its tokenizer gives the same ids."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.data import task_vocabulary
from remixer_t5x.models.losses import CrossEntropy
from remixer_tasks import vocabularies
from tests.support import hf_folders, references

pytestmark = [
    pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::ResourceWarning'),
    pytest.mark.usefixtures('clean_gin'),
]
END = hf_folders.GPT2['eos_token_id']


@pytest.fixture(scope='module')
def recorded():
    return hf_folders.recorded_arrays('gpt2_tiny')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return hf_folders.write_gpt2(tmp_path_factory.mktemp('gpt2') / 'theirs')


def test_continuations_equal_recorded_values(recorded, folder):
    loaded, tokens = remixer_t5x.load(str(folder)), recorded['tokens'] + 1
    generate = jax.jit(lambda params: loaded.model.generate(params, {'prompt_tokens': tokens}, 4, eos_id=END + 1))
    is_end = recorded['continued'] == END
    ended = np.cumsum(is_end, axis=1) - is_end > 0
    answers = np.asarray(generate(loaded.params).tokens[:, 0])
    np.testing.assert_array_equal(answers, np.where(ended, 0, recorded['continued'] + 1))


def test_a_start_token_that_differs_from_the_end_token_begins_each_row(tmp_path, recorded, folder, capsys):
    start = hf_folders.write_gpt2(tmp_path / 'start', bos_token_id=5)
    loaded, same, rows = remixer_t5x.load(str(start)), remixer_t5x.load(str(folder)), recorded['tokens'] + 1
    ours, expected = (
        model.module.apply({'params': same.params}, np.pad(rows, ((0, 0), (1, 0)), constant_values=first))
        for model, first in ((loaded.model, 0), (same.model, 6))
    )
    np.testing.assert_array_equal(ours, expected)
    assert hf_folders.describe(loaded.model, loaded.vocabulary).to_config()['bos_token_id'] == 5
    content = json.loads((start / 'tokenizer.json').read_text())
    content['added_tokens'].append({**content['added_tokens'][0], 'id': 5, 'content': 'd'})
    content['post_processor'] = {
        'type': 'TemplateProcessing',
        'single': [{'SpecialToken': {'id': 'd', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}],
        'pair': [],
        'special_tokens': {'d': {'id': 'd', 'ids': [5], 'tokens': ['d']}},
    }
    (start / 'tokenizer.json').write_text(json.dumps(content))
    assert main(['convert', f'--from_hf={start}', f'--to={tmp_path}/ours']) == 2
    assert 'must not add the start token 5 to texts' in capsys.readouterr().err


def test_label_smoothing_gives_no_probability_to_padding(recorded, folder):
    loaded, targets = remixer_t5x.load(str(folder)), recorded['tokens'] + 1
    batch = {'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))), 'decoder_target_tokens': targets}
    smoothed = dataclasses.replace(loaded.model.loss_function, label_smoothing=0.1)
    gradient = jax.jit(jax.grad(lambda p: dataclasses.replace(loaded.model, loss_function=smoothed).loss(p, batch)[0]))
    assert not np.any(gradient(loaded.params)['token_embedder']['embedding'][0])


def test_a_folder_without_tokenizer_json_or_end_token_raises_a_one_line_error(tmp_path, capsys):
    folder = hf_folders.write_gpt2(tmp_path / 'gpt2')
    file = folder / 'tokenizer.json'
    command = ['convert', f'--from_hf={folder}', f'--to={tmp_path}/ours']
    for setting in ('add_prefix_space', 'split_special_tokens'):
        (folder / 'tokenizer_config.json').write_text(json.dumps({setting: True}))
        assert main(command) == 2 and setting in capsys.readouterr().err
    (folder / 'tokenizer_config.json').unlink()
    file.write_text(file.read_text().replace('"added_tokens"', '"other"'))
    assert main(command) == 2 and 'an added token with the id 59' in capsys.readouterr().err
    file.unlink()
    assert main(command) == 2 and f".from_pretrained('{folder}').save_pretrained(" in capsys.readouterr().err


def test_text_is_split_into_byte_pairs_in_the_order_of_merges(folder):
    file = folder / 'tokenizer.json'
    vocabulary = vocabularies.huggingface_tokenizer(str(file), '<|endoftext|>', shifted=True)
    text = 'the ä that the cat'
    ids = vocabulary.encode(text)
    names = json.loads(file.read_text())['model']['vocab']
    pieces = ['the', 'Ġ', 'Ã', '¤', 'Ġ', 'th', 'a', 't', 'Ġthe', 'Ġ', 'c', 'a', 't']
    assert ids == [names[piece] + 1 for piece in pieces] and vocabulary.decode(ids) == text
    assert vocabulary.encode('!') == [1] and vocabulary.eos_id == END + 1 and vocabulary.pad_id == 0
    assert sum(task_vocabulary.count_bytes_per_token(vocabulary)[ids]) == len(text.encode())
    assert np.array_equal(vocabulary.encode_tf(text).numpy(), ids)


def test_rows_of_several_documents_equal_those_of_transformers(folder):
    """Logits, loss, gradients, scores and continuations with end tokens within rows and prompts."""
    references.require('torch', 'transformers')
    import torch
    import transformers

    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()
    rows = np.random.default_rng(1).integers(0, END, (3, 14))
    rows[:, 5] = rows[1:, 9] = rows[2, 6] = END
    prefixed = torch.from_numpy(np.pad(rows, ((0, 0), (1, 0)), constant_values=END))
    logits = theirs(prefixed[:, :-1]).logits
    log_likely = torch.log_softmax(logits, dim=-1).gather(2, prefixed[:, 1:, None])[..., 0]
    (-log_likely.sum()).backward()

    loaded = remixer_t5x.load(str(folder))
    tokens = (rows + 1).astype(np.int32)
    batch = {
        'decoder_input_tokens': np.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        'decoder_target_tokens': tokens,
        'decoder_loss_weights': np.ones_like(tokens),
    }
    inputs = batch['decoder_input_tokens']
    ours = loaded.model.module.apply({'params': loaded.params}, inputs, enable_dropout=False)[..., 1:]
    assert np.max(np.abs(ours - logits.detach().numpy())) / np.max(np.abs(ours)) < 1e-5
    model = dataclasses.replace(loaded.model, loss_function=CrossEntropy(z_loss=0.0))
    (loss, _), gradient = jax.jit(jax.value_and_grad(model.loss, has_aux=True))(loaded.params, batch)
    np.testing.assert_allclose(loss, -log_likely.sum().item(), rtol=1e-5)
    expected = theirs.transformer.wpe.weight.grad.numpy()
    table = gradient['decoder']['position_embedding']['table']
    np.testing.assert_allclose(table, expected, atol=1e-4 * np.abs(expected).max())
    scores = jax.jit(model.score)(loaded.params, batch)
    np.testing.assert_allclose(scores, log_likely.sum(dim=1).detach().numpy(), rtol=1e-5)

    continued = theirs.generate(prefixed, max_new_tokens=4, do_sample=False, pad_token_id=END)
    continued = continued[:, prefixed.shape[1] :].numpy()
    expected = np.where(np.cumsum(continued == END, axis=1) - (continued == END) > 0, -1, continued)
    generate = jax.jit(lambda params: model.generate(params, {'prompt_tokens': tokens}, 4, eos_id=END + 1))
    np.testing.assert_array_equal(np.asarray(generate(loaded.params).tokens[:, 0]), expected + 1)
