"""Int8 quantization: which parameters of each model are quantized, and the errors of all elements and layers."""

import numpy as np
import pytest
from flax import traverse_util

from remixer_t5x.extras.export import exported_functions
from tests.support import shipped_models

ALSO_QUANTIZED = ('logits/kernel', 'token_embedder/embedding')
# tests/optim/test_muon.py compares the hidden matrices of all models.
MODELS = ('t5_1_1', 'tim_with_adapters', 'remixer_gated_composition', 'gmlp', 'bert')


def random_weights(name):
    """float32 arrays by name; layer i is scaled by 100 ** -i."""
    boxes = traverse_util.flatten_dict(shipped_models.boxed_shapes(name), sep='/')
    rng = np.random.default_rng(0)
    weights = {}
    for path, box in boxes.items():
        weights[path] = rng.standard_normal(box.value.shape, np.float32)
        if 'layers' in box.names:
            layers = np.arange(box.value.shape[0]).reshape(-1, *[1] * (box.value.ndim - 1))
            weights[path] *= np.float32(100.0) ** -layers
    return weights


@pytest.mark.quick
@pytest.mark.parametrize('name', MODELS)
def test_int8_rounds_hidden_matrices_and_embeddings(name):
    """Errors are at most half a quantization step per element and 1.5% (RMS) per layer."""
    model, weights = shipped_models.model(name), random_weights(name)
    quantized = exported_functions.quantize_weights(model, weights)
    expanded = traverse_util.flatten_dict(exported_functions.dequantize_weights(quantized), sep='/')
    for path, array in weights.items():
        expected = bool(shipped_models.HIDDEN_KERNEL.search(path)) or path in ALSO_QUANTIZED
        assert (quantized[path].dtype == np.int8) == expected, path
        difference = np.asarray(expanded[path]) - array
        if not expected:
            assert not difference.any(), path
            continue
        axis = -1 if path.endswith('embedding') else -2
        step = np.abs(array).max(axis=axis, keepdims=True) / 127
        assert quantized[f'{path}.scale'].shape == step.shape, path
        assert (np.abs(difference) <= step * 0.501).all(), path
        matrices = tuple(range(1, array.ndim)) if array.ndim > 2 else None
        error = np.sqrt(np.mean(difference**2, axis=matrices) / np.mean(array**2, axis=matrices))
        assert np.max(error) < 0.015, (path, error)


@pytest.mark.parametrize('size', [1e-6, 1e6])
def test_int8_rounds_channels_with_zeros_and_outliers(size):
    model, weights = shipped_models.model('t5_1_1'), random_weights('t5_1_1')
    path = 'encoder/run_0/layer/gated_mlp/wo/kernel'
    array = size * np.random.default_rng(1).standard_t(2, weights[path].shape).astype(np.float32)
    array[0, 3], array[1, :, 5] = 0, 0
    expanded = exported_functions.dequantize_weights(
        exported_functions.quantize_weights(model, {**weights, path: array})
    )
    restored = np.asarray(traverse_util.flatten_dict(expanded, sep='/')[path])
    assert (np.abs(restored - array) <= np.abs(array).max(axis=-2, keepdims=True) / 127 * 0.501).all()
    largest = np.abs(array).argmax(axis=-2)[:, None]
    pairs = (np.take_along_axis(values, largest, -2) for values in (restored, array))
    np.testing.assert_allclose(*pairs, rtol=1e-6)
