"""Maps T5 parameters to and from Hugging Face's names and shapes.

Hugging Face has one matrix [out, in] for each layer, named after its place in the block. We have one kernel [layers,
in, out] for each run of identical layers. Nothing else differs: both keep heads joined, and neither has biases.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import arrays
from remixer_t5x.interop.huggingface.arrays import Parameter
from remixer_t5x.interop.huggingface.config import T5
from remixer_t5x.interop.safetensors.files import Tensors

Params = Any
# Number of layers of each run, by stack.
Runs = Mapping[str, Sequence[int]]

TABLE = 'shared.weight'
OUTPUT = 'lm_head.weight'
# Copies of the embedding table, and a bias that the first T5's converter wrote and nothing reads.
COPIES_OF_TABLE = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
UNREAD = ('decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight',)
BIAS = 'SelfAttention.relative_attention_bias'
ATTENTION = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}


def one_run(t5: T5) -> Runs:
    """All layers of a stack in one run, as in models/*.gin."""
    return {'encoder': (t5.dimensions.num_encoder_layers,), 'decoder': (t5.dimensions.num_decoder_layers,)}


def parameters(t5: T5, runs: Runs) -> Iterator[Parameter]:
    """Every parameter of `t5`, whose layers are grouped in `runs`."""
    d = t5.dimensions
    table = (d.vocab_size, d.embed_dim)
    yield Parameter(('token_embedder', 'embedding'), (TABLE,), False, table)
    if not t5.tied:
        yield Parameter(('logits', 'kernel'), (OUTPUT,), False, table, transposed=True)
    for stack in ('encoder', 'decoder'):
        if not t5.own_biases:
            bias = f'{stack}.block.0.layer.0.{BIAS}.weight'
            yield Parameter((stack, 'position_bias', 'embedding'), (bias,), False, (t5.num_buckets, d.num_heads), True)
        yield Parameter((stack, 'final_norm', 'scale'), (f'{stack}.final_layer_norm.weight',), False, (d.embed_dim,))
        first = 0
        for index, count in enumerate(runs[stack]):
            blocks = [f'{stack}.block.{layer}' for layer in range(first, first + count)]
            for path, name, shape in _layer_parameters(t5, stack):
                names = tuple(f'{block}.{name}.weight' for block in blocks)
                yield Parameter((stack, f'run_{index}', 'layer', *path), names, True, shape, transposed=len(shape) == 2)
            first += count


def _layer_parameters(t5: T5, stack: str) -> Iterator[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """(path in a layer, Hugging Face's name in a block, Hugging Face's shape) of each parameter of a layer."""
    d = t5.dimensions
    width = d.num_heads * d.head_dim
    sublayers = [('self_attention', 'SelfAttention')]
    if stack == 'decoder':
        sublayers.append(('cross_attention', 'EncDecAttention'))
    for place, (ours, theirs) in enumerate(sublayers):
        for name, letter in ATTENTION.items():
            shape = (d.embed_dim, width) if name == 'out' else (width, d.embed_dim)
            yield (ours, name, 'kernel'), f'layer.{place}.{theirs}.{letter}', shape
        yield (f'{ours}_norm', 'scale'), f'layer.{place}.layer_norm', (d.embed_dim,)
    if t5.own_biases:
        yield ('self_attention', 'position_bias', 'embedding'), f'layer.0.{BIAS}', (t5.num_buckets, d.num_heads)
    last = len(sublayers)
    feed_forward = 'gated_mlp' if t5.gated else 'relu_mlp'
    for name in ('wi_0', 'wi_1') if t5.gated else ('wi',):
        shape = (d.mlp_dim, d.embed_dim)
        yield (feed_forward, name, 'kernel'), f'layer.{last}.DenseReluDense.{name}', shape
    yield (feed_forward, 'wo', 'kernel'), f'layer.{last}.DenseReluDense.wo', (d.embed_dim, d.mlp_dim)
    yield (f'{feed_forward}_norm', 'scale'), f'layer.{last}.layer_norm', (d.embed_dim,)


def has_output_matrix(tensors: Tensors) -> bool:
    """Whether the output projection is another matrix than the embedding table. Reads both if both exist."""
    if OUTPUT not in tensors:
        return False
    table = table_name(tensors)
    same_shape = tensors.shape(OUTPUT) == tensors.shape(table)
    return not (same_shape and np.array_equal(tensors[OUTPUT], tensors[table]))


def table_name(tensors: Tensors) -> str:
    """The name of the embedding table in the file. Raises UserError if there is none."""
    for name in (TABLE, *COPIES_OF_TABLE):
        if name in tensors:
            return name
    raise UserError(f'the weights have no {TABLE}; give a T5ForConditionalGeneration')


def from_huggingface(t5: T5, tensors: Tensors, folder: str) -> Params:
    """Our parameters, float32, of the weights in `folder`, all layers of a stack in one run.

    Raises UserError with the name of a weight that is missing, has another shape than `t5` says, or would be left out.
    """
    wanted = list(parameters(t5, one_run(t5)))
    renamed = {TABLE: table_name(tensors)}
    known = {*UNREAD, TABLE, OUTPUT, *COPIES_OF_TABLE}
    arrays.check(wanted, tensors, folder, 'T5ForConditionalGeneration', known, renamed)
    table = tensors[renamed[TABLE]]
    for name in (TABLE, *COPIES_OF_TABLE):
        if name in tensors and name != renamed[TABLE] and not np.array_equal(tensors[name], table):
            raise UserError(f'{name} in {folder} is not {renamed[TABLE]}; allowed is one table for both stacks')
    return arrays.read(wanted, tensors, renamed)


def to_huggingface(t5: T5, params: Params, runs: Runs) -> dict[str, np.ndarray]:
    """Hugging Face's arrays by name, as views of `params` if possible."""
    return arrays.write(parameters(t5, runs), params)
