"""Hugging Face's GPT-2: its config.json and its weights, to and from those of models/gpt2.gin.

Source: `GPT2Config` and `GPT2LMHeadModel` of transformers 4 and 5. Both sides have pre-norm layers, biases, the tanh
form of GELU, learned positions and an output projection that is the table of embeddings.

Our ids are GPT-2's plus one, because id 0 is padding, which GPT-2 does not have. Our table of embeddings has a first
row of zeros, which the model neither reads nor predicts (`DecoderOnly.begin_id`).
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import arrays, one_stack
from remixer_t5x.interop.huggingface.arrays import Parameter
from remixer_t5x.interop.huggingface.config import number, small
from remixer_t5x.interop.huggingface.one_stack import OneStack, check_allowed
from remixer_t5x.interop.safetensors import files as safetensors_files
from remixer_t5x.interop.safetensors.files import Tensors

Params = Any
MODEL_TYPE, CLASS = 'gpt2', 'GPT2LMHeadModel'
CONFIG = 'config.json'
PREFIX, TABLE, OUTPUT = 'transformer.', 'wte.weight', 'lm_head.weight'
JOINED, PARTS = 'attn.c_attn.', ('query', 'key', 'value')
# One of these is what a tokenizer is made of; transformers prefers the first. The others are optional.
TOKENIZER_FILES = (('tokenizer.json',), ('vocab.json', 'merges.txt'))
OPTIONAL_FILES = ('tokenizer_config.json', 'added_tokens.json')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2(OneStack):
    """The sizes of a GPT-2.

    Attributes:
        end_id: Hugging Face's id of the token that ends, and begins, a text.
    """

    end_id: int
    epsilon: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder that contains a GPT-2; its weights are read on demand."""

    folder: pathlib.Path
    gpt2: Gpt2
    tensors: Tensors

    def params(self) -> Params:
        """Our parameters, numpy float32. Raises UserError if a weight is missing, has another shape, or is unknown."""
        return from_huggingface(self.gpt2, self.tensors, str(self.folder))


def is_gpt2(folder: pathlib.Path) -> bool:
    """Whether config.json in `folder` says so."""
    path = pathlib.Path(folder).expanduser() / CONFIG
    return path.is_file() and untrusted_files.read_object(path).get('model_type') == MODEL_TYPE


def read(path: str) -> Source:
    """Opens the folder `path`. Raises UserError if it does not contain a GPT-2 that models/gpt2.gin can express."""
    folder = pathlib.Path(path).expanduser()
    safe_paths.check_inside(folder)
    gpt2 = from_config(untrusted_files.read_object(folder / CONFIG), str(folder))
    return Source(folder, gpt2, safetensors_files.read_folder(folder))


def from_config(config: Mapping[str, Any], folder: str) -> Gpt2:
    """The GPT-2 that `config`, the content of config.json in `folder`, describes. Raises UserError for a part that
    models/gpt2.gin does not have.
    """
    where = f'{folder}/{CONFIG}'
    allowed = {
        'model_type': (MODEL_TYPE,),
        'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
        'scale_attn_weights': (True,),
        'scale_attn_by_inverse_layer_idx': (False,),
        'tie_word_embeddings': (True,),
        'add_cross_attention': (False,),
    }
    check_allowed(config, allowed, where, 'GPT-2s')
    width = number(config, 'n_embd', where)
    gpt2 = Gpt2(
        vocab_size=number(config, 'vocab_size', where),
        embed_dim=width,
        mlp_dim=4 * width if config.get('n_inner') is None else number(config, 'n_inner', where),
        num_heads=number(config, 'n_head', where),
        num_layers=number(config, 'n_layer', where),
        max_length=number(config, 'n_positions', where),
        end_id=number(config, 'eos_token_id', where, 50256),
        epsilon=small(config, 'layer_norm_epsilon', where, 1e-5),
    )
    gpt2.check_heads(where, 'n_embd', 'n_head')
    if gpt2.end_id >= gpt2.vocab_size:
        raise UserError(f'{where} says eos_token_id {gpt2.end_id} and vocab_size {gpt2.vocab_size}; give one below it')
    return gpt2


def to_config(gpt2: Gpt2) -> dict[str, Any]:
    """The content of a config.json that transformers reads as `gpt2`."""
    return {
        'architectures': [CLASS],
        'model_type': MODEL_TYPE,
        'vocab_size': gpt2.vocab_size,
        'n_embd': gpt2.embed_dim,
        'n_inner': gpt2.mlp_dim,
        'n_head': gpt2.num_heads,
        'n_layer': gpt2.num_layers,
        'n_positions': gpt2.max_length,
        'layer_norm_epsilon': gpt2.epsilon,
        'bos_token_id': gpt2.end_id,
        'eos_token_id': gpt2.end_id,
        'activation_function': 'gelu_new',
        'scale_attn_weights': True,
        'tie_word_embeddings': True,
        'initializer_range': 0.02,
        **dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), 0.1),
    }


def parameters(gpt2: Gpt2, runs: Sequence[int] | None = None) -> Iterator[Parameter]:
    """Every parameter, by the names that `_Plain` gives; layers are grouped in `runs` (None: one run)."""
    width, hidden = gpt2.embed_dim, gpt2.mlp_dim
    yield Parameter(('token_embedder', 'embedding'), (TABLE,), False, (gpt2.vocab_size, width))
    yield Parameter(('decoder', 'position_embedding', 'table'), ('wpe.weight',), False, (gpt2.max_length, width))
    for ours, theirs in (('scale', 'weight'), ('bias', 'bias')):
        yield Parameter(('decoder', 'final_norm', ours), (f'ln_f.{theirs}',), False, (width,))
    layer: list[tuple[tuple[str, ...], str, tuple[int, ...]]] = []
    for norm, theirs in (('scaled_attention_norm', 'ln_1'), ('gelu_mlp_norm', 'ln_2')):
        layer += [((norm, 'scale'), f'{theirs}.weight', (width,)), ((norm, 'bias'), f'{theirs}.bias', (width,))]
    dense = [('scaled_attention', part, f'{JOINED}{part}.', width, width) for part in PARTS]
    dense += [
        ('scaled_attention', 'out', 'attn.c_proj.', width, width),
        ('gelu_mlp', 'wi', 'mlp.c_fc.', width, hidden),
        ('gelu_mlp', 'wo', 'mlp.c_proj.', hidden, width),
    ]
    for module, ours, theirs, inward, outward in dense:
        layer += [((module, ours, 'kernel'), f'{theirs}weight', (inward, outward))]
        layer += [((module, ours, 'bias'), f'{theirs}bias', (outward,))]
    first = 0
    for run, count in enumerate(runs or (gpt2.num_layers,)):
        for path, name, shape in layer:
            names = tuple(f'h.{index}.{name}' for index in range(first, first + count))
            yield Parameter(('decoder', f'run_{run}', 'layer', *path), names, True, shape)
        first += count


class _Plain(Tensors):
    """The weights without the prefix that newer files have, with queries, keys and values apart."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._names: dict[str, tuple[str, int | None]] = {}
        for name in tensors:
            plain = name.removeprefix(PREFIX)
            if JOINED not in plain:
                self._names[plain] = name, None
                continue
            for index, part in enumerate(PARTS):
                self._names[plain.replace(JOINED, f'{JOINED}{part}.')] = name, index

    def __getitem__(self, name: str) -> np.ndarray:
        theirs, index = self._names[name]
        array = self._tensors[theirs]
        return array if index is None else np.split(array, len(PARTS), axis=-1)[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        theirs, index = self._names[name]
        shape = self._tensors.shape(theirs)
        # What three parts do not divide keeps its shape, which is then wrong.
        return shape if index is None or shape[-1] % len(PARTS) else (*shape[:-1], shape[-1] // len(PARTS))


def from_huggingface(gpt2: Gpt2, tensors: Tensors, folder: str) -> Params:
    """Our parameters, float32, of the weights in `folder`. Raises UserError with the name of a weight that is missing,
    has another shape than `gpt2` says, or would be left out.
    """
    plain, wanted = _Plain(tensors), list(parameters(gpt2))
    # Older files have the causal masks.
    masks = {f'h.{layer}.attn.{name}' for layer in range(gpt2.num_layers) for name in ('bias', 'masked_bias')}
    arrays.check(wanted, plain, folder, CLASS, {*masks, OUTPUT})
    if OUTPUT in plain and not np.array_equal(plain[OUTPUT], plain[TABLE]):
        raise UserError(f'{OUTPUT} in {folder} is not {TABLE}; allowed is an output that is tied to the embeddings')
    params = arrays.read(wanted, plain)
    params['token_embedder']['embedding'] = np.pad(params['token_embedder']['embedding'], ((1, 0), (0, 0)))
    return params


def to_huggingface(gpt2: Gpt2, params: Params, runs: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Hugging Face's arrays by name."""
    table = {'embedding': np.asarray(params['token_embedder']['embedding'])[1:]}
    plain = arrays.write(parameters(gpt2, runs), {**params, 'token_embedder': table})
    found: dict[str, np.ndarray] = {}
    for name, array in plain.items():
        first, joined, rest = name.partition(JOINED)
        part, _, kind = rest.partition('.')
        if not joined:
            found[PREFIX + name] = array
        elif part == PARTS[0]:
            parts = [plain[f'{first}{JOINED}{each}.{kind}'] for each in PARTS]
            found[f'{PREFIX}{first}{JOINED}{kind}'] = np.concatenate(parts, axis=-1)
    return found


def first_difference(gpt2: Gpt2, tensors: Tensors, params: Params, runs: Sequence[int] | None = None) -> str | None:
    """The name of a weight of `tensors`, which `to_huggingface` has written, that differs in `params`; None if all are
    equal.
    """
    ours = to_huggingface(gpt2, params, runs)
    return next((name for name, array in ours.items() if not np.array_equal(array, tensors[name])), None)


def tokenizer_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of the tokenizer in `folder`. Raises UserError if the folder has no tokenizer."""
    for names in TOKENIZER_FILES:
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in (*names, *OPTIONAL_FILES) if (folder / name).is_file()]
    raise UserError(f'{folder} has neither tokenizer.json nor vocab.json and merges.txt; ids mean nothing without them')


def model_gin(gpt2: Gpt2, tokenizer_folder: str, source: str) -> str:
    """The text of a gin file that provides MODEL, VOCAB_SIZE and VOCABULARY; `source` names the origin of the weights,
    `tokenizer_folder` has the tokenizer's files.
    """
    lines = [
        *one_stack.gin_header(source, 'MODEL, FRAME, VOCAB_SIZE, VOCABULARY, TASK_FEATURE_LENGTHS'),
        "include 'models/gpt2.gin'",
        'from __gin__ import dynamic_registration',
        '',
        'from remixer_t5x.models.architecture import decoder_only',
        'from remixer_t5x.models.layers import norms',
        'from remixer_tasks import vocabularies',
        '',
        *one_stack.gin_dimensions(dataclasses.replace(gpt2, vocab_size=gpt2.vocab_size + 1)),
        f'decoder_only.DecoderOnly.begin_id = {gpt2.end_id + 1}',
        f'MAX_TARGET_LENGTH = {gpt2.max_length}',
        f"TASK_FEATURE_LENGTHS = {{'targets': {gpt2.max_length}}}",
        f'gpt2/norms.LayerNorm.epsilon = {gpt2.epsilon!r}',
        '',
        f'TOKENIZER = {tokenizer_folder!r}',
        'VOCABULARY = @vocabularies.byte_pairs()',
        'vocabularies.byte_pairs.folder = %TOKENIZER',
        f'vocabularies.byte_pairs.end_id = {gpt2.end_id}',
    ]
    return '\n'.join(lines) + '\n'
