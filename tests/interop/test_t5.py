"""Hugging Face's T5s compute the same on both sides: logits, losses, generated tokens; safetensors of any model."""

import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import t5_tokenizer
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.sublayers.feed_forward import ReluMLP
from tests.interop import small_models
from tests.support import hf_folders

MLP = functools.partial(ReluMLP, hidden_dim=40)
pytestmark = pytest.mark.usefixtures('clean_gin')


def test_losses_gradients_and_answers_of_a_tied_scaled_t5(tmp_path):
    """The loss and the generated tokens equal recorded values; the gradient equals a difference quotient."""
    arrays = hf_folders.recorded_arrays('t5_v1_0_tiny')
    params = hf_folders.read_params(hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_0_tiny'))
    model = small_models.t5(MLP, MLP, (3, 2), 64, 24, head_dim=8, tied=True, scaled_output=True)
    targets, inputs = arrays['targets'], {'encoder_input_tokens': arrays['inputs']}
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch = {**inputs, 'decoder_input_tokens': shifted, 'decoder_target_tokens': targets}
    compute_loss = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    (loss, sums), gradient = compute_loss(params, batch)
    expected = pytest.approx(float(arrays['loss']), rel=1e-5)
    assert float((loss - sums['z_loss']) / sums['weights']) == expected
    assert -float(jax.jit(model.score)(params, batch).sum() / sums['weights']) == expected

    length = arrays['greedy'].shape[1]
    search = BeamSearch(arrays['beams'].shape[1], PowerPenalty(0.6))
    beams = jax.jit(lambda params: model.generate(params, inputs, length, decoder=search))(params)
    np.testing.assert_array_equal(beams.tokens, arrays['beams'])
    np.testing.assert_allclose(beams.scores, arrays['beam_scores'], rtol=1e-5)

    # The loss computes its own gradient of the transposed table, which is also the embedding.
    table = params['token_embedder']['embedding']
    direction = np.random.default_rng(0).standard_normal(table.shape, np.float32)
    above, below = (
        float(compute_loss({**params, 'token_embedder': {'embedding': table + sign * 1e-3 * direction}}, batch)[0][0])
        for sign in (1, -1)
    )
    slope = np.sum(gradient['token_embedder']['embedding'] * direction)
    assert slope == pytest.approx((above - below) / 2e-3, rel=2e-2)


def test_the_number_of_sentinels_is_read_from_the_tokenizer(tmp_path):
    folder = hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_0_tiny')
    tokenizer = folder / 'tokenizer_config.json'
    model = str(folder / 'spiece.model')
    expected = ('sentencepiece', {'path': model, 'extra_ids': 10})
    assert t5_tokenizer.find_t5_tokenizer(folder) == expected
    assert t5_tokenizer.find_t5_tokenizer(folder, '/other.model')[1]['path'] == '/other.model'
    names = [f'<extra_id_{i}>' for i in range(7)]
    # ByT5 was pretrained with the last bytes as sentinels.
    byt5 = {'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 125}
    for config, extra_ids in (({'additional_special_tokens': names}, 7), ({'extra_ids': 0}, 0), (byt5, 0), ({}, 100)):
        tokenizer.write_text(json.dumps(config))
        assert t5_tokenizer.find_t5_tokenizer(folder)[1]['extra_ids'] == extra_ids
    (folder / 'spiece.model').unlink()
    with pytest.raises(UserError, match='--vocabulary'):
        t5_tokenizer.find_t5_tokenizer(folder)


def test_any_model_is_written_to_safetensors_and_read(tmp_path):
    params = small_models.random_params(small_models.t5(MLP, MLP, (1, 1), 64, 24))
    record = {'config': 'X = 1\n', 'vocabulary': 'abc of 48 ids', 'versions': {'jax': '0'}, 'task': 'other'}
    for dtype in ('float32', 'bfloat16'):
        file = safetensors_files.write_params(str(tmp_path / dtype), params, 12, record, dtype)
        read, step, read_record = safetensors_files.read_params(str(file))
        rounded = safetensors_files.round_params(params, dtype)
        assert safetensors_files.find_differing_array(rounded, read) is None and step == 12
        assert read_record == {name: record[name] for name in ('config', 'vocabulary', 'versions')}
    assert safetensors_files.find_differing_array(params, rounded) is not None
    with pytest.raises(UserError, match='already exists'):
        safetensors_files.write_params(str(file), params, 12, record)
    save_file({'x': np.ones(2, np.float32)}, tmp_path / 'foreign.safetensors', {'format': 'pt'})
    with pytest.raises(UserError, match='--from_hf'):
        safetensors_files.read_params(str(tmp_path / 'foreign.safetensors'))
