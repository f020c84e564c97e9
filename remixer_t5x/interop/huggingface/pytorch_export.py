"""Exports models that have no equivalent in transformers, by writing PyTorch code next to the weights.

    config.json               the tree of modules: class, settings and parameter shapes of each module
    modeling_remixer_t5x.py   the PyTorch classes, copied from this package
    model.safetensors         the parameters, with a separate array for each layer

The tree is recorded while Flax initializes the model, so any gin configuration is supported.
"""

import ast
import functools
import importlib.resources
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import linen as nn
from flax import traverse_util

from remixer_t5x.interop.huggingface import model_folders, traced_modules
from remixer_t5x.interop.huggingface.param_mapping import LayerIndices
from remixer_t5x.interop.huggingface.traced_modules import UnsupportedModelError
from remixer_t5x.models import lora
from remixer_t5x.models.interface import Model, Params
from remixer_t5x.models.layers import dense

CODE_FILE = 'modeling_remixer_t5x.py'
# Maps each model type to the class in `CODE_FILE`, and to the auto class of transformers that loads it.
MODEL_CLASSES = {
    'encoder_decoder': ('RemixerT5xForConditionalGeneration', 'AutoModelForSeq2SeqLM'),
    'decoder_only': ('RemixerT5xForCausalLM', 'AutoModelForCausalLM'),
    'encoder_only': ('RemixerT5xForMaskedLM', 'AutoModelForMaskedLM'),
    'classifier': ('RemixerT5xForSequenceClassification', 'AutoModelForSequenceClassification'),
}
# Root modules, which have no PyTorch class.
CLASSES_WITHOUT_CODE = ('EncoderDecoder', 'DecoderOnly', 'EncoderOnly')


@functools.cache
def read_pytorch_code() -> str:
    """Reads the source code of the PyTorch classes."""
    return importlib.resources.files(__package__).joinpath(CODE_FILE).read_text(encoding='utf-8')


@functools.cache
def list_supported_classes() -> frozenset[str]:
    """Returns the names of the Flax modules that have a PyTorch class."""
    return frozenset(node.name for node in ast.parse(read_pytorch_code()).body if isinstance(node, ast.ClassDef))


def to_config(model: Model, vocabulary: Any) -> dict[str, Any]:
    """Returns the content of config.json. Raises UnsupportedModelError if a module has no PyTorch class."""
    if getattr(model, 'prefix', False):
        raise UnsupportedModelError('--to_hf does not support prefix language models; set PREFIX_LM = False')
    if model.model_type not in MODEL_CLASSES:
        raise UnsupportedModelError(f'--to_hf does not support models with MODEL_TYPE = {model.model_type!r}')
    if model.model_type != 'classifier' and model.module.base_embed_dim and getattr(model.module, 'tied', True):
        raise UnsupportedModelError('--to_hf does not support MUP_BASE_WIDTH with a tied output projection')
    class_name, auto_class = MODEL_CLASSES[model.model_type]
    config = {
        'architectures': [class_name],
        'model_type': model_folders.PYTORCH_MODEL_TYPE,
        'auto_map': {
            'AutoConfig': f'{pathlib.Path(CODE_FILE).stem}.RemixerT5xConfig',
            auto_class: f'{pathlib.Path(CODE_FILE).stem}.{class_name}',
        },
        'vocab_size': model.vocab_size,
        'hidden_size': model.module.embed_dim,
        'is_encoder_decoder': model.model_type == 'encoder_decoder',
        'pad_token_id': 0,
        'decoder_start_token_id': 0,
        'eos_token_id': vocabulary.eos_id,
        'tie_word_embeddings': False,
        'use_cache': False,
        'module': build_module_tree(model),
    }
    if model.model_type == 'classifier':
        names = getattr(model, 'labels', None) or ['number']
        config['id2label'] = {str(index): name for index, name in enumerate(names)}
        config['label2id'] = {name: index for index, name in enumerate(names)}
    return config


def build_module_tree(model: Model) -> dict[str, Any]:
    """Returns the modules as nested dicts: class, settings, parameter shapes, submodules and the submodules' order."""
    modules, shapes = traced_modules.record_modules(model)
    layers = LayerIndices(shapes)
    tree: dict[str, Any] = {}
    for path, module in modules.items():
        for name in _list_pytorch_names(path, layers):
            _find_or_add_module(tree, name).update(_describe_module(module))
    for path, shape in shapes.items():
        is_stacked = layers.locate(path)[1] is not None
        for name in _list_pytorch_names(path, layers):
            if not lora.is_adapter(path):
                module_name, _, leaf = name.rpartition('.')
                _find_or_add_module(tree, module_name).setdefault('params', {})[leaf] = list(shape[is_stacked:])
    return _add_submodule_order(tree)


def _list_pytorch_names(path: str, layers: LayerIndices) -> list[str]:
    """Returns the PyTorch names of a Flax module or parameter, one for each of its layers."""
    key, indices = layers.locate(path)
    if indices is None:
        return [path.replace('/', '.')]
    stack, _, rest = key.partition('/layer')
    return [f'{stack}.layers.{index}{rest.replace("/", ".")}' for index in indices]


def _find_or_add_module(tree: dict[str, Any], name: str) -> dict[str, Any]:
    for part in name.split('.') if name else ():
        tree = tree.setdefault('children', {}).setdefault(part, {'class': 'LayerList'})
    return tree


def _describe_module(module: nn.Module) -> dict[str, Any]:
    settings = traced_modules.read_module_settings(module)
    has_code = settings['class'] in {*list_supported_classes(), *CLASSES_WITHOUT_CODE}
    unsupported = [name for name in settings.values() if isinstance(name, traced_modules.CustomName)]
    if unsupported or not has_code:
        name = [*unsupported, settings['class']][0]
        raise UnsupportedModelError(f'--to_hf has no PyTorch code for {name}; use --to_shared=DIR')
    return {name: value for name, value in settings.items() if value is not None}


def _add_submodule_order(tree: dict[str, Any]) -> dict[str, Any]:
    """Adds the list `order` to each module with children, because transformers sorts the keys of config.json."""
    children = {name: _add_submodule_order(child) for name, child in tree.get('children', {}).items()}
    order = sorted(children, key=int) if tree.get('class') == 'LayerList' else list(children)
    return {**tree, 'children': children, 'order': order} if children else tree


def convert_to_pytorch(params: Params) -> dict[str, np.ndarray]:
    """Converts parameters to arrays with PyTorch names, such as `encoder.layers.3.remixer.wi_0.kernel`.

    LoRA adapters are merged into their kernels.
    """
    flat = {name: np.asarray(array) for name, array in traverse_util.flatten_dict(params, sep='/').items()}
    for name in [name for name in flat if name.rpartition('/')[0] + f'/{dense.LORA_IN}' in flat]:
        if name == lora.get_adapted_kernel_name(name):
            flat[name] = np.asarray(
                dense.merge_adapter(flat[name], *(flat[matrix] for matrix in lora.get_adapter_names(name)))
            )
    layers = LayerIndices({name: array.shape for name, array in flat.items()})
    arrays: dict[str, np.ndarray] = {}
    for path, array in flat.items():
        if not lora.is_adapter(path):
            is_stacked = layers.locate(path)[1] is not None
            arrays |= zip(_list_pytorch_names(path, layers), array if is_stacked else [array], strict=True)
    return arrays


def write_pytorch_model(
    folder: pathlib.Path, config: Mapping[str, Any], params: Params, dtype: str = 'float32'
) -> None:
    """Writes the result of `to_config`, the PyTorch code and the weights, converted to `dtype`, to an empty folder."""
    model_folders.write_files(folder, {model_folders.CONFIG: config}, convert_to_pytorch(params), dtype)
    (folder / CODE_FILE).write_text(read_pytorch_code(), encoding='utf-8')


def compare_logits(folder: pathlib.Path, model: Any, params: Params) -> str:
    """Compares the float32 logits of the PyTorch and the Flax model; returns a description of the largest difference.

    Raises UserError if the difference exceeds the tolerance. Executes the code in `folder`, which must be trusted.
    """
    length = min(16, find_max_row_length(build_module_tree(model)) - 1)
    tokens = np.random.default_rng(0).integers(2, model.vocab_size, (2, length), dtype=np.int32)
    shifted = np.pad(tokens, ((0, 0), (1, 0)))
    inputs = {'input_ids': tokens}
    if model.model_type == 'encoder_decoder':
        inputs['decoder_input_ids'] = shifted[:, :-1]
    arguments = [shifted] if model.model_type == 'decoder_only' else list(inputs.values())
    ours = model_folders.apply_module(model, params, arguments)
    auto_class = MODEL_CLASSES[model.model_type][1]
    theirs = model_folders.compute_reference_output(folder, auto_class, inputs, trust_remote_code=True)
    return model_folders.describe_logits_difference(ours[:, 1:] if model.model_type == 'decoder_only' else ours, theirs)


def find_max_row_length(tree: Mapping[str, Any]) -> int:
    """Returns the maximum row length that all modules of `build_module_tree` accept, at most 1024."""
    return min([tree.get('max_length', 1024), *map(find_max_row_length, tree.get('children', {}).values())])
