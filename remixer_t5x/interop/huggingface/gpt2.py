"""Converts GPT-2 models between Hugging Face and models/gpt2.gin.

Source: `GPT2Config` and `GPT2LMHeadModel` of transformers 4 and 5. Both implementations have pre-norm layers, biases,
the tanh approximation of GELU, learned positions, and an output projection tied to the embedding.

remixer_t5x ids are GPT-2 ids plus one, because GPT-2 has no padding token and id 0 is padding in remixer_t5x. The first
row of the embedding table is zero. With `DecoderOnly.begin_id`, the model reads GPT-2's start token, `bos_token_id`, in
place of id 0 at the start of a sequence, and never predicts id 0.
"""

import dataclasses
import pathlib
from typing import Any

from remixer_t5x import tokenizer_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig, ModelFamily, Tokenizer
from remixer_t5x.interop.huggingface.param_mapping import HuggingFaceModule
from remixer_t5x.interop.huggingface.traced_modules import TracedModules
from remixer_t5x.interop.safetensors_files import Tensors
from remixer_t5x.models.language_model import LanguageModel

PREFIX, EMBEDDING_TABLE = 'transformer.', 'transformer.wte.weight'
ATTENTION, LAYER = 'decoder/layer/scaled_attention', 'transformer.h.{}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2(ModelFamily):
    """A GPT-2 language model; texts begin with the token `bos_id` and end with `end_id`, both Hugging Face ids."""

    model_types = ('gpt2',)
    hf_class = 'GPT2LMHeadModel'
    auto_class = 'AutoModelForCausalLM'
    model_class = LanguageModel
    stack_names = ('decoder',)
    gin_files = ('models/gpt2.gin',)
    sizes = {
        'vocab_size': 'vocab_size',
        'n_embd': 'embed_dim',
        'n_inner': 'mlp_dim',
        'n_head': 'num_heads',
        'n_layer': 'num_decoder_layers',
        'n_positions': 'max_length',
        'layer_norm_epsilon': 'epsilon',
        'eos_token_id': 'end_id',
        'bos_token_id': 'bos_id',
    }
    allowed = {
        'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
        'scale_attn_weights': (True,),
        'scale_attn_by_inverse_layer_idx': (False,),
        'tie_word_embeddings': (True,),
        'add_cross_attention': (False,),
    }
    copies = {'lm_head.weight': EMBEDDING_TABLE}
    # Older checkpoints contain the causal masks.
    ignored = r'transformer\.h\.\d+\.attn\.(masked_)?bias'

    attention_name = 'scaled_attention'
    module_names = {
        'token_embedder': 'transformer.wte',
        'decoder/position_embedding': 'transformer.wpe',
        'decoder/final_norm': 'transformer.ln_f',
        f'{ATTENTION}_norm': f'{LAYER}.ln_1',
        # Conv1D of transformers stores weights as [inputs, outputs], so they are not transposed.
        **{
            f'{ATTENTION}/{name}': HuggingFaceModule(f'{LAYER}.attn.c_attn', (index, 3), transposed=False)
            for index, name in enumerate(('query', 'key', 'value'))
        },
        f'{ATTENTION}/out': HuggingFaceModule(f'{LAYER}.attn.c_proj', transposed=False),
        'decoder/layer/gelu_mlp_norm': f'{LAYER}.ln_2',
        'decoder/layer/gelu_mlp/wi': HuggingFaceModule(f'{LAYER}.mlp.c_fc', transposed=False),
        'decoder/layer/gelu_mlp/wo': HuggingFaceModule(f'{LAYER}.mlp.c_proj', transposed=False),
    }
    id_offset = 1

    num_decoder_layers: int
    max_length: int
    end_id: int = 50256
    bos_id: int = 50256
    epsilon: float = 1e-5

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        end = config.values.get('eos_token_id', cls.end_id)
        return super().read_fields(
            config.with_defaults({'n_inner': 4 * config.read_number('n_embd'), 'bos_token_id': end})
        )

    @staticmethod
    def map_canonical_names(tensors: Tensors) -> dict[str, str]:
        # Array names in older checkpoints do not have the prefix `transformer.`.
        has_prefix = any(name.startswith(PREFIX) for name in tensors)
        return {name if has_prefix or name in Gpt2.copies else PREFIX + name: name for name in tensors}

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        modules.require_condition(not model.prefix, 'PREFIX_LM is True')
        modules.require_condition(model.module.begin_id > 0, 'decoder_only.DecoderOnly.begin_id is 0')
        return super().read_model_fields(model, vocabulary, modules) | {
            'max_length': modules.find_module('decoder/position_embedding').max_length,
            'end_id': vocabulary.eos_id - 1,
            'bos_id': model.module.begin_id - 1,
        }

    def build_gin_settings(self) -> dict[str, Any]:
        return {
            'decoder_only.DecoderOnly.begin_id': self.bos_id + 1,
            'MAX_TARGET_LENGTH': self.max_length,
            'TASK_FEATURE_LENGTHS': {'targets': self.max_length},
            'gpt2/norms.LayerNorm.epsilon': self.epsilon,
        }

    def check_vocabulary(self, vocabulary: Any, folder: str) -> None:
        super().check_vocabulary(vocabulary, folder)
        if vocabulary.bos_id == self.bos_id + 1:
            raise UserError(
                f'the tokenizer of {folder} must not add the start token {self.bos_id} to texts, because the '
                'model adds it; set post_processor in tokenizer.json to null'
            )

    def find_tokenizer(self, folder: pathlib.Path, file: str | None) -> Tokenizer:
        function, arguments = super().find_tokenizer(folder, file)
        path = pathlib.Path(arguments['path'])
        # transformers inserts this space independently of tokenizer.json.
        config = tokenizer_files.read_tokenizer_config(path.parent)
        tokenizer_files.check_tokenizer_settings(config, {'add_prefix_space': (None, False)}, str(path.parent))
        ends = [name for name, index in tokenizer_files.read_added_tokens(path.parent).items() if index == self.end_id]
        if not ends:
            raise UserError(
                f'{path} must have an added token with the id {self.end_id}, the eos_token_id in config.json; '
                'correct eos_token_id'
            )
        return function, {**arguments, 'end': ends[0]}
