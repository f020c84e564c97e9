"""Converts T5Gemma (Zhang et al. 2025) between Hugging Face and models/modern_t5.gin with Gemma's norms and embeddings.

Source: `T5GemmaConfig` and `T5GemmaForConditionalGeneration` of transformers 4.53 to 5. Encoder and decoder are stacks
of Gemma 2 layers: RMSNorm before and after each sublayer, rotary positions, grouped-query attention, soft-capped
logits, and sliding-window attention in layers 0, 2, 4, ... Each stack has a separate token embedding, which is
multiplied by sqrt(hidden_size). The norms multiply their input by 1 + weight.

The query kernels include the factor query_pre_attn_scalar ** -0.5, because `SelfAttention` does not scale the logits.
In local encoder layers of transformers, tokens attend to tokens at a distance of at most `sliding_window`. For
`SelfAttention`, the distance must be less than the window, so the window of the remixer_t5x encoder is larger by one.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig, ModelFamily
from remixer_t5x.interop.huggingface.traced_modules import TracedModules
from remixer_t5x.models.seq2seq import Seq2Seq

STACKS = ('encoder', 'decoder')
LOCAL_OR_GLOBAL = ('sliding_attention', 'full_attention')
# Maps each sublayer to the X in its norms pre_X_layernorm and post_X_layernorm.
SUBLAYER_NORMS = {'self_attention': 'self_attn', 'cross_attention': 'cross_attn', 'gated_mlp': 'feedforward'}


def _list_module_names() -> Iterator[tuple[str, str]]:
    yield 'logits', 'lm_head.out_proj'
    for side, table in (('encoder', 'token_embedder'), ('decoder', 'decoder_token_embedder')):
        ours, theirs = f'{side}/layer', f'model.{side}.layers.{{}}'
        yield table, f'model.{side}.embed_tokens'
        yield f'{side}/final_norm', f'model.{side}.norm'
        for name, norm in SUBLAYER_NORMS.items():
            yield f'{ours}/{name}_norm', f'{theirs}.pre_{norm}_layernorm'
            yield f'{ours}/{name}_post_norm', f'{theirs}.post_{norm}_layernorm'
        for name in ('self', 'cross'):
            for part, projection in (('query', 'q'), ('key', 'k'), ('value', 'v'), ('out', 'o')):
                yield f'{ours}/{name}_attention/{part}', f'{theirs}.{name}_attn.{projection}_proj'
        for part, projection in (('wi_0', 'gate'), ('wi_1', 'up'), ('wo', 'down')):
            yield f'{ours}/gated_mlp/{part}', f'{theirs}.mlp.{projection}_proj'


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Gemma(ModelFamily):
    """A T5Gemma encoder-decoder whose stacks have the same sizes.

    Attributes:
        window: width of the sliding window (`sliding_window` in transformers).
        query_scale: a power of 4, by whose square root transformers divides the attention logits.
        softcap, final_softcap: soft caps of the attention logits and of the output logits, or None.
        tied: whether the output projection is tied to the decoder's embedding.
        max_length: maximum number of tokens, used only by transformers.
    """

    model_types = ('t5gemma',)
    hf_class = 'T5GemmaForConditionalGeneration'
    auto_class = 'AutoModelForSeq2SeqLM'
    model_class: ClassVar[type] = Seq2Seq
    stack_names = STACKS
    gin_files: ClassVar[tuple[str, ...]] = ('models/modern_t5.gin',)
    # These sizes are repeated in the configuration of each stack.
    sizes = {
        'hidden_size': 'embed_dim',
        'intermediate_size': 'mlp_dim',
        'num_attention_heads': 'num_heads',
        'num_key_value_heads': 'num_kv_heads',
        'head_dim': 'head_dim',
        'query_pre_attn_scalar': 'query_scale',
        'sliding_window': 'window',
        'rms_norm_eps': 'epsilon',
        'vocab_size': 'vocab_size',
        'max_position_embeddings': 'max_length',
        'bos_token_id': 'bos_id',
        'eos_token_id': 'eos_id',
        'attn_logit_softcapping': 'softcap',
        'final_logit_softcapping': 'final_softcap',
    }
    allowed = {
        'hidden_activation': ('gelu_pytorch_tanh',),
        'attention_bias': (False,),
        'pad_token_id': (0,),
        'rope_scaling': (None,),
    }
    module_names = dict(_list_module_names())
    ignored = r'(model\.)?decoder\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq'

    num_encoder_layers: int
    num_decoder_layers: int
    num_kv_heads: int
    # `max_length` is not compared for equality, because the remixer_t5x model has no maximum length.
    max_length: int = dataclasses.field(default=8192, compare=False)
    window: int = 4096
    query_scale: int = 256
    softcap: float | None = 50.0
    final_softcap: float | None = 30.0
    theta: float = 10_000.0
    epsilon: float = 1e-6
    tied: bool = True
    bos_id: int = 2
    eos_id: int = 1

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for side in STACKS:
            values = config.values.get(side)
            if not isinstance(values, dict):
                raise config.setting_error(side, 'it must be an object with the settings of the stack')
            stack = HuggingFaceConfig(values, config.folder)
            layers = stack.read_number('num_hidden_layers')
            stack.check_layer_types([LOCAL_OR_GLOBAL[layer % 2] for layer in range(layers)])
            sizes = super().read_fields(stack)
            sizes['theta'] = stack.read_rope_theta(values.get('rope_parameters'), 'rope_theta', cls.theta)
            if differing := [name for name, value in sizes.items() if fields.get(name, value) != value]:
                field = differing[0]
                names = {**{field: name for name, field in cls.sizes.items()}, 'theta': 'rope_theta'}
                raise UserError(
                    f'{config.file} sets {names[field]} to {sizes[field]}; it must equal the value in the encoder, '
                    f'{fields[field]}'
                )
            fields |= {**sizes, f'num_{side}_layers': layers}
        if math.log2(fields['query_scale']) % 2:
            raise config.setting_error('encoder', 'query_pre_attn_scalar must be a power of 4, such as 64 or 256')
        return {**fields, 'tied': config.values.get('tie_word_embeddings', True) is not False}

    def to_config(self) -> dict[str, Any]:
        stack = {
            **{name: getattr(self, field) for name, field in self.sizes.items()},
            **{name: values[0] for name, values in self.allowed.items()},
            'rope_theta': self.theta,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': self.theta},
            'tie_word_embeddings': self.tied,
        }
        stacks = {
            side: {
                **stack,
                'model_type': 't5_gemma_module',
                'num_hidden_layers': count,
                'layer_types': [LOCAL_OR_GLOBAL[layer % 2] for layer in range(count)],
                'is_decoder': side == 'decoder',
            }
            for side, count in self.layer_counts.items()
        }
        return {
            'architectures': [self.hf_class],
            'model_type': self.model_types[0],
            **stacks,
            'is_encoder_decoder': True,
            'dropout_rate': 0.0,
            'tie_word_embeddings': self.tied,
            'vocab_size': self.vocab_size,
            'bos_token_id': self.bos_id,
            'eos_token_id': self.eos_id,
            'pad_token_id': 0,
        }

    @property
    def query_factor(self) -> float:
        return self.query_scale**-0.5

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        module, attention = model.module, modules.find_module('encoder/layer/self_attention')
        return super().read_model_fields(model, vocabulary, modules) | {
            'num_kv_heads': attention.num_kv_heads or attention.num_heads,
            'softcap': attention.logit_softcap,
            'window': (attention.sliding_window or cls.window + 1) - 1,
            'theta': modules.find_module('encoder/layer/self_attention/rotary').theta,
            'final_softcap': module.logit_softcap,
            'tied': module.tied,
            'bos_id': module.begin_id,
            'eos_id': int(vocabulary.eos_id or 1),
            # The query kernels include the scale, so any power of 4 is valid. The largest that is at most head_dim is
            # the usual value in transformers.
            'query_scale': 4 ** ((attention.head_dim.bit_length() - 1) // 2),
        }

    def build_gin_settings(self) -> dict[str, Any]:
        return {
            'WIDER_MLP_DIM': self.mlp_dim,
            'NUM_KV_HEADS': self.num_kv_heads,
            'LOGIT_SOFTCAP': self.softcap,
            'LOCAL_WINDOW': self.window,
            'encoder_local/attention.SelfAttention.sliding_window': self.window + 1,
            'LAYER_NORM': '@norms.RMSNorm',
            'norms.RMSNorm.zero_centered': True,
            'norms.RMSNorm.epsilon': self.epsilon,
            'positions.RotaryEmbedding.theta': self.theta,
            'embedding.Embed.scale': self.embed_dim**0.5,
            'embedding.Embed.stddev': 0.02,
            'encoder_decoder.EncoderDecoder.shared_embedding': False,
            'encoder_decoder.EncoderDecoder.tied': self.tied,
            'encoder_decoder.EncoderDecoder.begin_id': self.bos_id,
            'encoder_decoder.EncoderDecoder.logit_softcap': self.final_softcap,
        }

    def build_json_files(self) -> dict[str, Any]:
        ids = {'decoder_start_token_id': self.bos_id, 'bos_token_id': self.bos_id, 'eos_token_id': self.eos_id}
        return {**super().build_json_files(), 'generation_config.json': {**ids, 'pad_token_id': 0}}
