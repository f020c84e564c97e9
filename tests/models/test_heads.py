"""Heads for classes, regression, token labels, spans and embeddings against transformers and their equations."""

import jax
import numpy as np
import pytest

from remixer_t5x import build_model
from remixer_t5x.devices.partition import unbox
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import model_folders
from tests.support import hf_folders, references

LENGTH, LABELS = 12, ('O', 'B-PER', 'I-PER')
SMALL = {'EMBED_DIM': 16, 'NUM_HEADS': 2, 'HEAD_DIM': 8, 'MLP_DIM': 24, 'NUM_ENCODER_LAYERS': 2, 'VOCAB_SIZE': 64}


def make_model(model_type, **macros):
    return build_model('models/t5_1_1.gin', 'sizes/tiny.gin', f'model_types/{model_type}.gin', **SMALL, **macros)


def init_params(model):
    params = unbox(jax.jit(lambda key: model.init(key, {'encoder_input_tokens': (2, LENGTH)}))(jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: np.asarray(a) + 0.2 * rng.standard_normal(a.shape, np.float32), params)


def make_tokens(rows=4):
    tokens = np.random.default_rng(1).integers(3, 60, (rows, LENGTH)).astype(np.int32)
    tokens[1, 7:] = 0
    return tokens


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize('labels', [('no', 'maybe', 'yes'), None], ids=['classes', 'regression'])
def test_classifier_loss_is_the_cross_entropy_or_the_squared_error(labels):
    model = make_model('classifier', LABELS=labels)
    params, tokens = init_params(model), make_tokens()
    tokens[3] = 0
    answers, weights = [0.5, -1.0, 3.8] if labels is None else [2, 0, 1], np.float32([1, 1, 1, 0])
    batch = {'encoder_input_tokens': tokens, 'labels': np.float32([*answers, 0]), 'label_weights': weights}
    outputs = np.asarray(jax.jit(model.classify)(params, tokens))
    loss, sums = jax.jit(model.loss)(params, batch)
    if labels is None:
        assert outputs.shape == (4, 1)
        assert float(loss) == pytest.approx(((outputs[:3, 0] - answers) ** 2).sum(), rel=1e-5)
        assert sums['squared_error'] == loss and 'correct' not in sums
    else:
        np.testing.assert_allclose(np.exp(outputs).sum(-1), 1.0, rtol=1e-5)
        assert float(loss) == pytest.approx(-outputs[[0, 1, 2], answers].sum(), rel=1e-5)
        assert float(sums['weights']) == 3 == float(sums['sequences'])
        assert float(sums['correct']) == (outputs.argmax(-1)[:3] == answers).sum()


def test_token_label_loss_equals_its_equation():
    model = make_model('token_labels', LABELS=LABELS)
    params, tokens, rng = init_params(model), make_tokens(), np.random.default_rng(2)
    labels, weights = rng.integers(0, 3, tokens.shape), (tokens > 0) * rng.integers(0, 2, tokens.shape)
    batch = {'encoder_input_tokens': tokens, 'labels': np.float32(labels), 'label_weights': np.float32(weights)}
    loss, sums = jax.jit(model.loss)(params, batch)
    log_p = log_softmax(jax.jit(model.compute_head_outputs)(params, tokens))
    expected = -np.sum(weights * np.take_along_axis(log_p, labels[..., None], -1)[..., 0])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert sums['weights'] == weights.sum() and sums['sequences'] == 4
    assert sums['correct'] == np.sum((log_p.argmax(-1) == labels) * weights)


def test_span_loss_equals_its_equation():
    model = make_model('span')
    params, tokens = init_params(model), make_tokens()
    start, end, weights = np.array([0, 2, 3, 1]), np.array([0, 6, 3, 11]), np.array([1, 1, 0, 1], np.float32)
    batch = {'encoder_input_tokens': tokens, 'start_positions': start, 'end_positions': end, 'label_weights': weights}
    loss, sums = jax.jit(model.loss)(params, batch)
    logits = np.asarray(jax.jit(model.compute_head_outputs)(params, tokens), np.float64)
    expected = 0.0
    for row in (0, 1, 3):
        count = np.sum(tokens[row] > 0)
        expected -= log_softmax(logits[row, :count, 0])[start[row]] + log_softmax(logits[row, :count, 1])[end[row]]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert sums['weights'] == 6 and sums['sequences'] == 3


def info_nce(a, b, temperature, weights):
    """Van den Oord et al. 2018, equation 4, with cosine similarities."""
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    log_p = log_softmax(a @ b.T / temperature)
    return -np.sum(weights * np.diag(log_p))


def test_contrastive_loss_equals_info_nce():
    temperature = 0.05
    model = make_model('embedding', CONTRASTIVE_TEMPERATURE=temperature)
    params, first, second = init_params(model), make_tokens(6), np.roll(make_tokens(6), 1, axis=1)
    second[1] = np.sort(second[1])[::-1]
    weights = np.array([1, 1, 0.5, 1, 0, 1], np.float32)
    batch = {'encoder_input_tokens': first, 'positive_input_tokens': second, 'label_weights': weights}
    loss, sums = jax.jit(model.loss)(params, batch)
    encode = jax.jit(model.encode)
    means = [
        np.stack([np.mean(row[ids > 0], axis=0) for row, ids in zip(np.asarray(encode(params, x)), x, strict=True)])
        for x in (first, second)
    ]
    np.testing.assert_allclose(loss, info_nce(*means, temperature, weights), rtol=2e-5)
    assert sums['weights'] == 4.5 and sums['sequences'] == 5
    # Padding rows are not negatives.
    padded = {name: np.concatenate([array, np.zeros_like(array[:2])]) for name, array in batch.items()}
    np.testing.assert_allclose(jax.jit(model.loss)(params, padded)[0], loss, rtol=1e-6)


@pytest.mark.parametrize(
    ('model_type', 'labels'),
    [('token_labels', None), ('token_labels', ('O',)), ('classifier', ('a', 'a')), ('classifier', 'ab')],
)
def test_invalid_labels_raise(model_type, labels):
    with pytest.raises(UserError, match='LABELS'):
        make_model(model_type, LABELS=labels)


def test_a_classifier_without_pooling_raises():
    model = make_model('classifier', LABELS=LABELS, POOLING=None)
    batch = {'encoder_input_tokens': make_tokens(), 'labels': np.zeros(4, np.float32), 'label_weights': np.ones(4)}
    with pytest.raises(UserError, match='POOLING must be a function'):
        model.loss(init_params(model), batch)


@pytest.mark.parametrize('name', ['T5', 'Bert'])
@pytest.mark.parametrize('model_type', ['token_labels', 'span'])
def test_logits_equal_transformers(name, model_type, tmp_path):
    """T5ForQuestionAnswering projects its decoder's output; this test projects the encoder's output instead."""
    references.require('torch', 'transformers')
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {'T5': hf_folders.V1_1, 'Bert': hf_folders.BERT}[name]
    config = getattr(transformers, f'{name}Config')(**sizes, num_labels=3 if model_type == 'token_labels' else 2)
    base = {'T5': transformers.T5ForConditionalGeneration, 'Bert': transformers.BertForMaskedLM}[name](config).eval()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    task = 'TokenClassification' if model_type == 'token_labels' else 'QuestionAnswering'
    reference = getattr(transformers, f'{name}For{task}')(config).eval()
    backbone = reference.bert if name == 'Bert' else getattr(reference, 'transformer', reference)
    missing = backbone.load_state_dict((base.bert if name == 'Bert' else base).state_dict(), strict=False).missing_keys
    output = reference.classifier if model_type == 'token_labels' else reference.qa_outputs
    assert not [key for key in missing if not key.startswith('qa_outputs')]

    tokens = np.random.default_rng(0).integers(3, 60, (3, LENGTH)).astype(np.int32)
    tokens[1, 7:] = 0
    inputs = {'input_ids': torch.tensor(tokens).long(), 'attention_mask': torch.tensor(tokens > 0).long()}
    with torch.no_grad():
        if model_type == 'token_labels':
            expected = reference(**inputs).logits.numpy()
        elif name == 'Bert':
            outputs = reference(**inputs)
            expected = torch.stack([outputs.start_logits, outputs.end_logits], -1).numpy()
        else:
            expected = output(reference.encoder(**inputs).last_hidden_state).numpy()

    weights = {key: array.numpy() for key, array in base.state_dict().items()}
    source = model_folders.open_model_folder(hf_folders.write(tmp_path / 'hf', sizes, weights))
    (tmp_path / 'model.gin').write_text(source.family.build_gin_text('A test.'))
    labels = {'LABELS': LABELS} if model_type == 'token_labels' else {}
    model = build_model(str(tmp_path / 'model.gin'), f'model_types/{model_type}.gin', **labels)
    kernel, bias = (array.detach().numpy() for array in (output.weight, output.bias))
    modules = ('token_embedder', 'encoder', 'input')
    backbone_params = {name: tree for name, tree in hf_folders.read_params(source.folder).items() if name in modules}
    params = {**backbone_params, 'head': {'output': {'kernel': kernel.T, 'bias': bias}}}
    logits = np.asarray(jax.jit(model.compute_head_outputs)(params, tokens))
    is_token = tokens > 0
    error = np.max(np.abs(logits[is_token] - expected[is_token])) / np.max(np.abs(expected[is_token]))
    assert error < 1e-5
