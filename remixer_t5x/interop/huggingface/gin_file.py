"""The gin file of a converted model: its dimensions, what differs from the shipped model, its vocabulary."""

from collections.abc import Iterator

from remixer_t5x.interop.huggingface.config import T5
from remixer_t5x.interop.huggingface.tokenizer import Tokenizer

# Shipped models by `T5.gated`, with the `tied` and `scaled_output` of each.
MODELS = {True: ('models/t5_1_1.gin', False), False: ('models/t5_1_0.gin', True)}


def model_gin(t5: T5, tokenizer: Tokenizer, source: str) -> str:
    """The text of a gin file that provides MODEL, VOCAB_SIZE and VOCABULARY; `source` names the origin of the
    weights.
    """
    model, published = MODELS[t5.gated]
    lines = [
        f'# {" ".join(source.split())}',
        '# Requires: nothing; give it after the data file, whose VOCABULARY it replaces.',
        '# Provides: MODEL, VOCAB_SIZE, VOCABULARY, and the dimensions.',
        f"include '{model}'",
        'from __gin__ import dynamic_registration',
        '',
        *_imports(t5, published),
        'from remixer_tasks import vocabularies',
        '',
        *_dimensions(t5),
        *_differences(t5, published),
        '',
        *_vocabulary(tokenizer),
    ]
    return '\n'.join(lines) + '\n'


def _imports(t5: T5, published: bool) -> Iterator[str]:
    if (t5.tied, t5.scaled_output) != (published, published):
        yield 'from remixer_t5x.models.architecture import encoder_decoder'
    if t5.epsilon != 1e-6:
        yield 'from remixer_t5x.models.architecture import layer'
        yield 'from remixer_t5x.models.architecture import stack'
        yield 'from remixer_t5x.models.layers import norms'
    if t5.own_biases or (t5.num_buckets, t5.max_distance) != (32, 128):
        yield 'from remixer_t5x.models.layers import positions'
    if t5.own_biases:
        yield 'from remixer_t5x.models.sublayers import attention'


def _dimensions(t5: T5) -> Iterator[str]:
    d = t5.dimensions
    yield f'VOCAB_SIZE = {d.vocab_size}'
    yield f'EMBED_DIM = {d.embed_dim}'
    yield f'MLP_DIM = {d.mlp_dim}'
    yield f'NUM_HEADS = {d.num_heads}'
    yield f'HEAD_DIM = {d.head_dim}'
    yield f'NUM_ENCODER_LAYERS = {d.num_encoder_layers}'
    yield f'NUM_DECODER_LAYERS = {d.num_decoder_layers}'


def _differences(t5: T5, published: bool) -> Iterator[str]:
    if (t5.tied, t5.scaled_output) != (published, published):
        yield f'encoder_decoder.EncoderDecoder.tied = {t5.tied}'
        yield f'encoder_decoder.EncoderDecoder.scaled_output = {t5.scaled_output}'
    if t5.epsilon != 1e-6:
        yield 'layer.make_layer.norm = @norms.RMSNorm'
        yield 'stack.Stack.final_norm = @norms.RMSNorm'
        yield f'norms.RMSNorm.epsilon = {t5.epsilon!r}'
    if t5.own_biases:
        yield 'ENCODER_POSITION_BIAS = None'
        yield 'DECODER_POSITION_BIAS = None'
        yield 'attention.SelfAttention.position_bias = @positions.RelativePositionBias'
    if (t5.num_buckets, t5.max_distance) != (32, 128):
        yield f'positions.RelativePositionBias.num_buckets = {t5.num_buckets}'
        yield f'positions.RelativePositionBias.max_distance = {t5.max_distance}'


def _vocabulary(tokenizer: Tokenizer) -> Iterator[str]:
    if tokenizer.path is None:
        yield 'VOCABULARY = @vocabularies.byte()'
        yield f'vocabularies.byte.extra_ids = {tokenizer.extra_ids}'
    else:
        yield f'VOCABULARY_PATH = {tokenizer.path!r}'
        yield 'VOCABULARY = @vocabularies.sentencepiece()'
        yield 'vocabularies.sentencepiece.path = %VOCABULARY_PATH'
        yield f'vocabularies.sentencepiece.extra_ids = {tokenizer.extra_ids}'
