"""Converts ModernBERT models and classifiers (Warner et al. 2024) between Hugging Face and models/modern_bert.gin.

Source: `ModernBertConfig`, `ModernBertForMaskedLM` and `ModernBertForSequenceClassification` of transformers 4.48 to 5.
The norms have no bias, layer 0 has no norm before its attention, and each attention layer is global or uses a sliding
window. Global and local layers have rotary embeddings with different bases.

remixer_t5x ids are ModernBERT ids plus one, because ModernBERT's id 0 is a regular token and id 0 is padding in
remixer_t5x. The query kernels include the factor head_dim ** -0.5, because `SelfAttention` does not scale the logits.
"""

import dataclasses
import math
from typing import Any, ClassVar

from remixer_t5x.interop.huggingface.bert import ClassifierFamily
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig, ModelFamily
from remixer_t5x.interop.huggingface.param_mapping import HuggingFaceModule, ModuleNames
from remixer_t5x.interop.huggingface.traced_modules import TracedModules
from remixer_t5x.models.architecture.encoder_only import first_token, mean_of_tokens
from remixer_t5x.models.masked_lm import MaskedLM

EMBEDDING_TABLE = 'model.embeddings.tok_embeddings.weight'
GLOBAL_ATTENTION, LOCAL_ATTENTION = 'full_attention', 'sliding_attention'
ATTENTION, LAYER = 'encoder/layer/self_attention', 'model.layers.{}'
SPECIAL_TOKENS = ('pad', 'cls', 'sep')
POOLINGS = {'cls': first_token, 'mean': mean_of_tokens}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBert(ModelFamily):
    """A ModernBERT masked language model.

    Attributes:
        window: number of tokens in the sliding window of local layers, half of them on each side.
        global_every: interval between global layers; if it is n, layers 0, n, 2n, ... attend globally.
        max_length: maximum number of tokens, used only by transformers.
        pad_id, cls_id, sep_id: Hugging Face ids of padding and of the first and the last token of a text.
    """

    model_types = ('modernbert',)
    hf_class = 'ModernBertForMaskedLM'
    auto_class = 'AutoModelForMaskedLM'
    model_class: ClassVar[type] = MaskedLM
    gin_files: ClassVar[tuple[str, ...]] = ('models/modern_bert.gin',)
    sizes = {
        'vocab_size': 'vocab_size',
        'hidden_size': 'embed_dim',
        'intermediate_size': 'mlp_dim',
        'num_attention_heads': 'num_heads',
        'num_hidden_layers': 'num_encoder_layers',
        'max_position_embeddings': 'max_length',
        'local_attention': 'window',
        'global_attn_every_n_layers': 'global_every',
        'norm_eps': 'epsilon',
        **{f'{role}_token_id': f'{role}_id' for role in SPECIAL_TOKENS},
    }
    allowed = {
        **dict.fromkeys(('hidden_activation', 'classifier_activation'), ('gelu',)),
        **dict.fromkeys(('norm_bias', 'attention_bias', 'mlp_bias', 'classifier_bias'), (False,)),
        **dict.fromkeys(('decoder_bias', 'tie_word_embeddings'), (True,)),
        'rope_scaling': (None,),
    }
    copies = {'decoder.weight': EMBEDDING_TABLE}

    module_names: ClassVar[ModuleNames] = {
        'token_embedder': 'model.embeddings.tok_embeddings',
        'input/norm': 'model.embeddings.norm',
        f'{ATTENTION}_norm': f'{LAYER}.attn_norm',
        **{
            f'{ATTENTION}/{name}': HuggingFaceModule(f'{LAYER}.attn.Wqkv', (index, 3))
            for index, name in enumerate(('query', 'key', 'value'))
        },
        f'{ATTENTION}/out': f'{LAYER}.attn.Wo',
        'encoder/layer/gated_mlp_norm': f'{LAYER}.mlp_norm',
        **{f'encoder/layer/gated_mlp/wi_{index}': HuggingFaceModule(f'{LAYER}.mlp.Wi', (index, 2)) for index in (0, 1)},
        'encoder/layer/gated_mlp/wo': f'{LAYER}.mlp.Wo',
        'encoder/final_norm': 'model.final_norm',
        'head': 'decoder',
        'head/dense': 'head.dense',
        'head/output_norm': 'head.norm',
        'head/output': 'classifier',
    }
    id_offset = 1

    num_encoder_layers: int
    # `max_length` is not compared for equality, because the remixer_t5x model has no maximum length.
    max_length: int = dataclasses.field(default=8192, compare=False)
    window: int = 128
    global_every: int = 3
    global_theta: float = 160_000.0
    local_theta: float = 10_000.0
    epsilon: float = 1e-5
    pad_id: int = 50283
    cls_id: int = 50281
    sep_id: int = 50282

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        # In transformers 5, layer_types and rope_parameters replace global_attn_every_n_layers and *_rope_theta.
        types, ropes = config.values.get('layer_types'), config.values.get('rope_parameters')
        if isinstance(types, list) and types:
            interval = (types + [GLOBAL_ATTENTION])[1:].index(GLOBAL_ATTENTION) + 1
            config = HuggingFaceConfig({**config.values, 'global_attn_every_n_layers': interval}, config.folder)
        fields = super().read_fields(config)
        layers, every = fields['num_encoder_layers'], fields['global_every']
        config.check_layer_types([LOCAL_ATTENTION if layer % every else GLOBAL_ATTENTION for layer in range(layers)])
        for field, kind in (('global_theta', GLOBAL_ATTENTION), ('local_theta', LOCAL_ATTENTION)):
            rope = ropes.get(kind) if isinstance(ropes, dict) else None
            fields[field] = config.read_rope_theta(rope, field.replace('_', '_rope_'), getattr(cls, field))
        if math.log2(fields['head_dim']) % 2:
            raise config.setting_error(
                'num_attention_heads', 'hidden_size / num_attention_heads must be 4, 16, 64 or 256'
            )
        return fields

    def to_config(self) -> dict[str, Any]:
        return {
            **super().to_config(),
            'bos_token_id': self.cls_id,
            'eos_token_id': self.sep_id,
            'global_rope_theta': self.global_theta,
            'local_rope_theta': self.local_theta,
        }

    @property
    def query_factor(self) -> float:
        return self.head_dim**-0.5

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        fields = super().read_model_fields(model, vocabulary, modules)
        special = vocabulary.special_ids_in_file
        missing = ', '.join(role for role, index in special.items() if index is None)
        modules.require_condition(not missing, f'VOCABULARY has no token for {missing}')
        windows = [layer.sliding_window for layer in modules.find_modules(ATTENTION)]
        thetas = [rotary.theta for rotary in modules.find_modules(f'{ATTENTION}/rotary')]
        every = [*windows[1:], None].index(None) + 1
        window, local_theta = (windows[1], thetas[:2][-1]) if every > 1 else (cls.window // 2 + 1, cls.local_theta)
        return fields | {
            'window': 2 * (window - 1),
            'global_every': every,
            'global_theta': thetas[0],
            'local_theta': local_theta,
            **{f'{role}_id': special[role] for role in SPECIAL_TOKENS},
        }

    def build_gin_settings(self) -> dict[str, Any]:
        return {
            'LOCAL_WINDOW': self.window // 2 + 1,
            'GLOBAL_EVERY': self.global_every,
            'GLOBAL_THETA': self.global_theta,
            'LOCAL_THETA': self.local_theta,
            'modern_bert/norms.LayerNorm.epsilon': self.epsilon,
        }

    @property
    def max_lengths(self) -> dict[str, int]:
        return dict.fromkeys(('inputs', 'targets'), min(self.max_length, 512))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertClassifier(ClassifierFamily, ModernBert):
    """A ModernBERT classifier or regression model, whose head pools the token `cls` or the mean of all tokens."""

    hf_class = 'ModernBertForSequenceClassification'
    gin_files = ('models/modern_bert.gin', 'model_types/classifier.gin')

    pooling: str = 'cls'

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        config.check_allowed_values({'classifier_pooling': tuple(POOLINGS)})
        return {**super().read_fields(config), 'pooling': config.values.get('classifier_pooling', 'cls')}

    def to_config(self) -> dict[str, Any]:
        return {**super().to_config(), 'classifier_pooling': self.pooling}

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        pooling = next(
            (name for name, function in POOLINGS.items() if modules.find_module('head').pooling is function), None
        )
        modules.require_condition(pooling is not None, 'POOLING is neither first_token nor mean_of_tokens')
        return super().read_model_fields(model, vocabulary, modules) | {'pooling': pooling}

    def build_gin_settings(self) -> dict[str, Any]:
        return {
            **super().build_gin_settings(),
            'POOLING': f'@encoder_only.{POOLINGS[self.pooling].__name__}',
            'LABELS': self.labels,
            'classifier/encoder_only.EncoderOnly.head_layer': '@encoder_only.TransformedClassifierHead',
            'encoder_only.TransformedClassifierHead.outputs': len(self.labels or ' '),
            'encoder_only.TransformedClassifierHead.pooling': '%POOLING',
            'encoder_only.TransformedClassifierHead.norm': '@modern_bert/norms.LayerNorm',
        }
