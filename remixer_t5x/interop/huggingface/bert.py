"""Hugging Face's BERT: its config.json and its weights, to and from those of models/bert.gin.

Source: `BertConfig` and `BertForMaskedLM` of transformers 4 and 5. Both sides have post-norm layers, biases, the exact
GELU and an output projection that is the table of embeddings. Not read, because no masked language model uses them: the
pooler and the head of next-sentence prediction, which published BERTs have in addition.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import arrays
from remixer_t5x.interop.huggingface.arrays import Parameter
from remixer_t5x.interop.huggingface.config import number, small
from remixer_t5x.interop.huggingface.one_stack import OneStack, check_allowed
from remixer_t5x.interop.safetensors.files import Tensors

Params = Any
MODEL_TYPE = 'bert'
CLASS = 'BertForMaskedLM'
# In the order in which they are looked for.
TOKENIZERS = ('tokenizer.json', 'vocab.txt')
TABLE = 'bert.embeddings.word_embeddings.weight'
# The output projection, which is the table of embeddings and a bias under other names, and what is not read.
COPIES = {'cls.predictions.decoder.weight': TABLE, 'cls.predictions.decoder.bias': 'cls.predictions.bias'}
UNREAD = (
    'bert.pooler.dense.weight',
    'bert.pooler.dense.bias',
    'cls.seq_relationship.weight',
    'cls.seq_relationship.bias',
    'bert.embeddings.position_ids',
)
# Published BERTs have TensorFlow's names of a norm's parameters.
OLD_NAMES = {'LayerNorm.weight': 'LayerNorm.gamma', 'LayerNorm.bias': 'LayerNorm.beta'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bert(OneStack):
    """The sizes of a BERT.

    Attributes:
        token_types: learned token types.
    """

    token_types: int = 2
    epsilon: float = 1e-12


def from_config(config: Mapping[str, Any], folder: str) -> Bert:
    """The BERT that `config`, the content of config.json in `folder`, describes.

    Raises:
        UserError: it is not a BERT, or has a part that models/bert.gin does not have.
    """
    where = f'{folder}/config.json'
    allowed = {
        'model_type': (MODEL_TYPE,),
        'hidden_act': ('gelu',),
        'position_embedding_type': ('absolute',),
        'tie_word_embeddings': (True,),
        'is_decoder': (False,),
        'pad_token_id': (0,),
    }
    check_allowed(config, allowed, where, 'BERTs')
    bert = Bert(
        vocab_size=number(config, 'vocab_size', where),
        embed_dim=number(config, 'hidden_size', where),
        mlp_dim=number(config, 'intermediate_size', where),
        num_heads=number(config, 'num_attention_heads', where),
        num_layers=number(config, 'num_hidden_layers', where),
        max_length=number(config, 'max_position_embeddings', where),
        token_types=number(config, 'type_vocab_size', where, 2),
        epsilon=small(config, 'layer_norm_eps', where, 1e-12),
    )
    bert.check_heads(where, 'hidden_size', 'num_attention_heads')
    return bert


def tokenizer_file(folder: pathlib.Path, given: str | None = None) -> str:
    """The file of the tokenizer: `given`, or the one in `folder`. Raises UserError if the folder has none."""
    if given is not None:
        return given
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return str(folder / name)
    raise UserError(f'{folder} has no {" and no ".join(TOKENIZERS)}; give --vocabulary=/path/to/{TOKENIZERS[0]}')


def to_config(bert: Bert) -> dict[str, Any]:
    """The content of a config.json that transformers reads as `bert`."""
    return {
        'architectures': [CLASS],
        'model_type': MODEL_TYPE,
        'vocab_size': bert.vocab_size,
        'hidden_size': bert.embed_dim,
        'intermediate_size': bert.mlp_dim,
        'num_attention_heads': bert.num_heads,
        'num_hidden_layers': bert.num_layers,
        'max_position_embeddings': bert.max_length,
        'type_vocab_size': bert.token_types,
        'layer_norm_eps': bert.epsilon,
        'hidden_act': 'gelu',
        'hidden_dropout_prob': 0.1,
        'attention_probs_dropout_prob': 0.1,
        'initializer_range': 0.02,
        'pad_token_id': 0,
        'tie_word_embeddings': True,
    }


def parameters(bert: Bert, runs: Sequence[int] | None = None) -> Iterator[Parameter]:
    """Every parameter of `bert`, whose layers are grouped in `runs` (None: one run)."""
    width = bert.embed_dim
    yield Parameter(('token_embedder', 'embedding'), (TABLE,), False, (bert.vocab_size, width))
    inputs: tuple[tuple[tuple[str, ...], str, tuple[int, ...]], ...] = (
        (('positions', 'table'), 'position_embeddings.weight', (bert.max_length, width)),
        (('token_types',), 'token_type_embeddings.weight', (bert.token_types, width)),
        (('norm', 'scale'), 'LayerNorm.weight', (width,)),
        (('norm', 'bias'), 'LayerNorm.bias', (width,)),
    )
    for path, name, shape in inputs:
        yield Parameter(('input', *path), (f'bert.embeddings.{name}',), False, shape)
    first = 0
    for index, count in enumerate(runs or (bert.num_layers,)):
        blocks = [f'bert.encoder.layer.{layer}' for layer in range(first, first + count)]
        for path, name, shape in _layer_parameters(bert):
            names = tuple(f'{block}.{name}' for block in blocks)
            yield Parameter(('encoder', f'run_{index}', 'layer', *path), names, True, shape, len(shape) == 2)
        first += count
    head = 'cls.predictions'
    yield Parameter(('head', 'bias'), (f'{head}.bias',), False, (bert.vocab_size,))
    yield Parameter(('head', 'dense', 'kernel'), (f'{head}.transform.dense.weight',), False, (width, width), True)
    yield Parameter(('head', 'dense', 'bias'), (f'{head}.transform.dense.bias',), False, (width,))
    for ours, theirs in (('scale', 'weight'), ('bias', 'bias')):
        yield Parameter(('head', 'output_norm', ours), (f'{head}.transform.LayerNorm.{theirs}',), False, (width,))


def _layer_parameters(bert: Bert) -> Iterator[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """(path in a layer, Hugging Face's name in a layer, Hugging Face's shape) of each parameter of a layer."""
    width, hidden = bert.embed_dim, bert.mlp_dim
    attention, mlp = 'scaled_attention', 'gelu_mlp'
    for path, name, shape in (
        ((attention, 'query'), 'attention.self.query', (width, width)),
        ((attention, 'key'), 'attention.self.key', (width, width)),
        ((attention, 'value'), 'attention.self.value', (width, width)),
        ((attention, 'out'), 'attention.output.dense', (width, width)),
        ((mlp, 'wi'), 'intermediate.dense', (hidden, width)),
        ((mlp, 'wo'), 'output.dense', (width, hidden)),
    ):
        yield (*path, 'kernel'), f'{name}.weight', shape
        yield (*path, 'bias'), f'{name}.bias', shape[:1]
    for ours, theirs in ((f'{attention}_norm', 'attention.output.LayerNorm'), (f'{mlp}_norm', 'output.LayerNorm')):
        yield (ours, 'scale'), f'{theirs}.weight', (width,)
        yield (ours, 'bias'), f'{theirs}.bias', (width,)


def renamed(tensors: Tensors) -> dict[str, str]:
    """The names of the file that differ from ours, by ours."""
    found = {}
    for old in tensors:
        for new_end, old_end in OLD_NAMES.items():
            if old.endswith(old_end):
                found[old.removesuffix(old_end) + new_end] = old
    return found


def from_huggingface(bert: Bert, tensors: Tensors, folder: str) -> Params:
    """Our parameters, float32, of the weights in `folder`, all layers in one run.

    Raises UserError with the name of a weight that is missing, has another shape than `bert` says, or would be left
    out.
    """
    wanted, other_names = list(parameters(bert)), renamed(tensors)
    arrays.check(wanted, tensors, folder, CLASS, {*COPIES, *UNREAD}, other_names)
    for copy, name in COPIES.items():
        if copy in tensors and not np.array_equal(tensors[copy], tensors[name]):
            raise UserError(f'{copy} in {folder} is not {name}; allowed is an output that is tied to the embeddings')
    return arrays.read(wanted, tensors, other_names)


def to_huggingface(bert: Bert, params: Params, runs: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Hugging Face's arrays by name, as views of `params` if possible."""
    return arrays.write(parameters(bert, runs), params)


def first_difference(bert: Bert, tensors: Tensors, params: Params, runs: Sequence[int] | None = None) -> str | None:
    """Hugging Face's name of a weight that differs in `params`, whose layers are grouped in `runs`; None if all weights
    are equal.
    """
    other_names = renamed(tensors)
    for name, array in to_huggingface(bert, params, runs).items():
        if not np.array_equal(array, tensors[other_names.get(name, name)]):
            return name
    return None
