"""A BERT as a gin file of ours, and a model of ours as a BERT. Most encoders that our gin files describe have none."""

from typing import Any

from remixer_t5x.interop.huggingface import one_stack
from remixer_t5x.interop.huggingface.bert import Bert
from remixer_t5x.models.architecture.encoder_only import BertHead, BertInput, EncoderOnly
from remixer_t5x.models.architecture.layer import PostNorm
from remixer_t5x.models.layers.norms import LayerNorm
from remixer_t5x.models.sublayers.gelu_mlp import GeluMLP
from remixer_t5x.models.sublayers.scaled_attention import ScaledAttention

KIND = 'BERT'


def model_gin(bert: Bert, tokenizer: str, source: str) -> str:
    """The text of a gin file that provides MODEL, FRAME, VOCAB_SIZE and VOCABULARY; `source` names the origin of the
    weights.
    """
    lines = [
        *one_stack.gin_header(source, 'MODEL, FRAME, VOCAB_SIZE, VOCABULARY'),
        "include 'models/bert.gin'",
        'from __gin__ import dynamic_registration',
        '',
        'from remixer_t5x.models.architecture import encoder_only',
        'from remixer_t5x.models.layers import norms',
        'from remixer_tasks import vocabularies',
        '',
        *one_stack.gin_dimensions(bert),
        f'MAX_INPUT_LENGTH = {bert.max_length}',
        f'encoder_only.BertInput.token_types = {bert.token_types}',
        f'bert/norms.LayerNorm.epsilon = {bert.epsilon!r}',
        '',
        f'VOCABULARY_PATH = {tokenizer!r}',
        'VOCABULARY = @vocabularies.wordpiece()',
        'vocabularies.wordpiece.path = %VOCABULARY_PATH',
    ]
    return '\n'.join(lines) + '\n'


def describe(module: EncoderOnly) -> tuple[Bert, tuple[int, ...]]:
    """The BERT that `module` is, and the lengths of its runs of layers.

    Calls factories for their attributes and does not trace anything. Raises UserError with the first part that Hugging
    Face's BERT does not have.
    """
    stack = module.encoder_stack()
    found = one_stack.layer_sizes(stack, PostNorm, (ScaledAttention, GeluMLP), LayerNorm, KIND)
    head_dim = found.pop('head_dim')
    _require(found['num_heads'] * head_dim == module.embed_dim, 'its heads do not share the width')
    _require(not found.pop('approximate'), 'GELU is approximate')
    _require(stack.position_embedding is None, 'the stack adds positions')
    _require(stack.final_norm is None, 'the stack has a final norm')
    entry = one_stack.part(module.input_layer, BertInput, KIND, 'INPUT_LAYER')
    one_stack.part(module.head_layer, BertHead, KIND, 'TOKEN_HEAD')
    runs = tuple(count for _, count in stack.runs)
    bert = Bert(
        vocab_size=module.vocab_size,
        embed_dim=module.embed_dim,
        num_layers=sum(runs),
        max_length=entry.max_length,
        token_types=entry.token_types,
        **found,
    )
    return bert, runs


def _require(holds: Any, difference: str) -> None:
    one_stack.require(holds, KIND, difference)
