"""Maps Hugging Face's `config.json` of a T5 to and from the settings of our encoder-decoder.

Source: `T5Config`, `MT5Config` and `UMT5Config` of transformers 4 and 5. The versions differ in two facts. Up to 4,
`tie_word_embeddings` decided both whether the output is the embedding table and whether the decoder's output is scaled
by d_model ** -0.5. Version 5 writes the scale as `scale_decoder_outputs`, ties the output if `lm_head.weight` is absent
from the file, and never scales an mT5. It computes every umT5 with the scale, whatever config.json says; we do what the
file says, as version 4 does.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from remixer_t5x.errors import UserError


class Refusal(UserError):
    """A model of ours that Hugging Face does not have."""


UMT5 = 'umt5'
MODEL_TYPES = ('t5', 'mt5', UMT5)
# Hugging Face's name of the feed-forward sublayer, by `T5.gated`.
FEED_FORWARD = {True: 'gated-gelu', False: 'relu'}
# T5's value for finetuning; only training under Hugging Face reads it.
DROPOUT_RATE = 0.1
# We look for every layer among the weights, so a number from a file must have a limit.
MAX_LAYERS = 4096
MAX_NUMBER = 2**31 - 1
# Ids of published T5s, all of which generation_config.json repeats. The two ids that are 0 are also 0 in our models.
GENERATION = {'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0}


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """The sizes of a model, with the names of our macros."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    head_dim: int
    num_encoder_layers: int
    num_decoder_layers: int


@dataclasses.dataclass(frozen=True)
class T5:
    """An architecture that Hugging Face's T5 and ours have in common.

    Attributes:
        dimensions: sizes.
        gated: the feed-forward sublayer is T5.1.1's (gated, GELU) and not the first T5's (ReLU).
        tied: the output projection is the embedding table.
        scaled_output: the decoder's output is scaled by embed_dim ** -0.5.
        num_buckets: number of buckets of relative positions.
        max_distance: beyond it all distances share a bucket.
        epsilon: epsilon of the norms.
        own_biases: each layer has a position bias of its own, as in umT5, and not the stack.
    """

    dimensions: Dimensions
    gated: bool
    tied: bool
    scaled_output: bool
    num_buckets: int = 32
    max_distance: int = 128
    epsilon: float = 1e-6
    own_biases: bool = False


def from_config(config: Mapping[str, Any], has_output_matrix: bool, folder: str) -> T5:
    """The architecture that `config`, the content of config.json in `folder`, describes.

    Args:
        config: content of the file.
        has_output_matrix: the weights have an `lm_head.weight` that differs from the embedding table.
        folder: named in errors.

    Raises:
        UserError: it is not a T5, or has a part that our encoder-decoder does not have.
    """
    where = f'{folder}/config.json'
    check_kind(config, folder)
    kind = config.get('feed_forward_proj', 'relu')
    scaled = _is_scaled(config)
    own_biases = config['model_type'] == UMT5
    # Version 5 writes tie_word_embeddings for every umT5, and keeps an lm_head.weight that differs.
    if has_output_matrix and scaled and 'scale_decoder_outputs' not in config and not own_biases:
        raise UserError(
            f'{where} ties the output to the embedding (tie_word_embeddings), and the weights have an lm_head.weight '
            'too; set tie_word_embeddings to false if the model uses it, or remove it from the weights'
        )
    return T5(
        dimensions=_dimensions(config, where),
        gated=kind == FEED_FORWARD[True],
        tied=not has_output_matrix,
        scaled_output=scaled,
        num_buckets=number(config, 'relative_attention_num_buckets', where, 32),
        max_distance=number(config, 'relative_attention_max_distance', where, 128),
        epsilon=small(config, 'layer_norm_epsilon', where, 1e-6),
        own_biases=own_biases,
    )


def to_config(t5: T5, eos_id: int = 1) -> dict[str, Any]:
    """The content of a config.json, for transformers 4.50 to 5; see `writes_output` for the weights."""
    d = t5.dimensions
    config = {
        'architectures': ['UMT5ForConditionalGeneration' if t5.own_biases else 'T5ForConditionalGeneration'],
        'model_type': UMT5 if t5.own_biases else 't5',
        'vocab_size': d.vocab_size,
        'd_model': d.embed_dim,
        'd_ff': d.mlp_dim,
        'd_kv': d.head_dim,
        'num_heads': d.num_heads,
        'num_layers': d.num_encoder_layers,
        'num_decoder_layers': d.num_decoder_layers,
        'feed_forward_proj': FEED_FORWARD[t5.gated],
        'relative_attention_num_buckets': t5.num_buckets,
        'relative_attention_max_distance': t5.max_distance,
        'layer_norm_epsilon': t5.epsilon,
        'dropout_rate': DROPOUT_RATE,
        'initializer_factor': 1.0,
        'is_encoder_decoder': True,
        'use_cache': True,
        'tie_word_embeddings': t5.scaled_output,
        **GENERATION,
        'eos_token_id': eos_id,
    }
    if t5.scaled_output and not t5.tied and not t5.own_biases:
        # Only transformers 5 supports this combination, and it reads this key.
        config['scale_decoder_outputs'] = True
    return config


def writes_output(t5: T5) -> bool:
    """Whether `lm_head.weight` goes into the file.

    A tied table without the scale is also written: transformers 4 cannot tie without the scale, and version 5 sees that
    both are equal.
    """
    return not (t5.tied and t5.scaled_output)


def check_kind(config: Mapping[str, Any], folder: str) -> None:
    """Raises UserError unless `config` describes a T5 whose feed-forward sublayer and ids our models have."""
    where = f'{folder}/config.json'
    kind = config.get('model_type')
    if kind not in MODEL_TYPES:
        raise UserError(f'{where} says model_type {shown(kind)}; allowed are {" and ".join(map(repr, MODEL_TYPES))}')
    if not config.get('is_encoder_decoder', True):
        raise UserError(f'{where} describes only an encoder; give a T5ForConditionalGeneration')
    feed_forward = config.get('feed_forward_proj', FEED_FORWARD[False])
    if feed_forward not in FEED_FORWARD.values():
        raise UserError(
            f'{where} says feed_forward_proj {shown(feed_forward)}; allowed are '
            f'{" and ".join(FEED_FORWARD.values())}, the feed-forward sublayers of T5.1.1 and of the first T5'
        )
    for name in ('decoder_start_token_id', 'pad_token_id'):
        if config.get(name) not in (0, None):
            raise UserError(f'{where} says {name} {shown(config[name])}; allowed is 0, as in every published T5')
    if not isinstance(config.get('eos_token_id'), int | None):
        raise UserError(
            f'{where} says eos_token_id {shown(config["eos_token_id"])}; allowed is one id, as in the vocabulary'
        )


def _is_scaled(config: Mapping[str, Any]) -> bool:
    if 'scale_decoder_outputs' in config:
        return bool(config['scale_decoder_outputs'])
    return config['model_type'] in ('t5', UMT5) and config.get('tie_word_embeddings') is not False


def _dimensions(config: Mapping[str, Any], where: str) -> Dimensions:
    encoder_layers = number(config, 'num_layers', where)
    return Dimensions(
        vocab_size=number(config, 'vocab_size', where),
        embed_dim=number(config, 'd_model', where),
        mlp_dim=number(config, 'd_ff', where),
        num_heads=number(config, 'num_heads', where),
        head_dim=number(config, 'd_kv', where),
        num_encoder_layers=encoder_layers,
        num_decoder_layers=number(config, 'num_decoder_layers', where, encoder_layers),
    )


def number(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """A positive whole number in a config.json. Raises UserError, with the file `where`, for anything else."""
    found = config.get(name)
    found = default if found is None else found
    largest = MAX_LAYERS if name.endswith('_layers') else MAX_NUMBER
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= largest:
        raise UserError(f'{where} says {name} {shown(found)}; it takes a positive whole number up to {largest:,}')
    return found


def small(config: Mapping[str, Any], name: str, where: str, default: float) -> float:
    """A number between 0 and 1 in a config.json. Raises UserError, with the file `where`, for anything else."""
    found = config.get(name, default)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < 1:
        raise UserError(f'{where} says {name} {shown(found)}; it takes a number between 0 and 1')
    return float(found)


def shown(value: object) -> str:
    """The value on one line of limited length."""
    text = ascii(value)
    return text if len(text) <= 60 else f'{text[:60]}...'
