"""Writes Hugging Face folders of the tiny models in tests/golden, without torch."""

import json
import pathlib

import numpy as np
import seqio
from safetensors.numpy import save_file

from remixer_t5x import build_model
from remixer_t5x.api import saved_models
from remixer_t5x.cli import conversions
from remixer_t5x.interop.huggingface import model_folders
from remixer_t5x.interop.huggingface.t5 import T5
from tests.support.paths import GOLDEN

# A vocabulary of 26 pieces, which is included in seqio.
SPIECE = pathlib.Path(seqio.__file__).parent / 'test_data' / 'sentencepiece' / 'sentencepiece.model'
SENTINELS = 10

COMMON = {'model_type': 't5', 'd_kv': 8, 'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0}
V1_1 = {
    **COMMON, 'vocab_size': 96, 'd_model': 32, 'd_ff': 48, 'num_layers': 2, 'num_decoder_layers': 3, 'num_heads': 4,
    'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False,
}  # fmt: skip
V1_0 = {
    **COMMON, 'vocab_size': 64, 'd_model': 24, 'd_ff': 40, 'num_layers': 3, 'num_decoder_layers': 2, 'num_heads': 2,
    'feed_forward_proj': 'relu',
}  # fmt: skip
UMT5 = {
    **COMMON, 'model_type': 'umt5', 'vocab_size': 80, 'd_model': 24, 'd_ff': 40, 'num_layers': 3,
    'num_decoder_layers': 2, 'num_heads': 2, 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False,
}  # fmt: skip
GPT2 = {
    'model_type': 'gpt2', 'vocab_size': 60, 'n_embd': 24, 'n_layer': 3, 'n_head': 2, 'n_positions': 20, 'n_inner': 40,
    'eos_token_id': 59,
}  # fmt: skip
BERT = {
    'model_type': 'bert', 'vocab_size': 60, 'hidden_size': 24, 'intermediate_size': 40, 'num_hidden_layers': 3,
    'num_attention_heads': 2, 'max_position_embeddings': 20,
}  # fmt: skip
_GEMMA_STACK = {
    'vocab_size': 48, 'hidden_size': 16, 'intermediate_size': 20, 'num_attention_heads': 2, 'head_dim': 16,
    'num_key_value_heads': 1, 'query_pre_attn_scalar': 16, 'sliding_window': 4, 'attn_logit_softcapping': 1.0,
    'final_logit_softcapping': 3.0, 'rms_norm_eps': 1e-6, 'max_position_embeddings': 8192, 'bos_token_id': 2,
    'eos_token_id': 1,
}  # fmt: skip
T5GEMMA = {
    'model_type': 't5gemma',
    'encoder': {**_GEMMA_STACK, 'num_hidden_layers': 3},
    'decoder': {**_GEMMA_STACK, 'num_hidden_layers': 2},
}
CONFIGS = {
    't5_v1_1_tiny': V1_1, 't5_v1_0_tiny': V1_0, 'umt5_tiny': UMT5, 'bert_tiny': BERT, 'gpt2_tiny': GPT2,
    't5gemma_tiny': T5GEMMA,
}  # fmt: skip


def recorded_arrays(name):
    with np.load(GOLDEN / f'{name}.npz') as arrays:
        return dict(arrays)


def weights_of(arrays):
    return {name.removeprefix('weights/'): array for name, array in arrays.items() if name.startswith('weights/')}


def weights(name):
    """Returns the recorded weights of a tiny model."""
    return weights_of(recorded_arrays(name))


def write_tiny(folder, name, **options):
    """Writes the folder of a recorded tiny model."""
    return write(folder, CONFIGS[name], weights(name), **options)


def model_from_source(source, folder):
    """Builds the model described by the gin text of `source`, which is written to `folder`/model.gin."""
    (folder / 'model.gin').write_text(source.family.build_gin_text('A test.'))
    return build_model(str(folder / 'model.gin'))


def write_gpt2(folder, **settings):
    """Writes the recorded GPT-2, with a byte-level BPE tokenizer of letters and three merges."""
    write(folder, {**GPT2, **settings}, weights('gpt2_tiny'))
    pieces = [*'!.abcdefghijklmnopqrstuvwxyz', 'Ġ', 'th', 'the', 'Ġthe', 'Ã', '¤']
    names = [*pieces, *(f'<{index}>' for index in range(len(pieces), GPT2['eos_token_id'])), '<|endoftext|>']
    return write_byte_pairs(folder, names, ['t h', 'th e', 'Ġ the'], '<|endoftext|>')


def write_byte_pairs(folder, names, merges, end, *added):
    """Writes GPT-2's tokenizer.json with the pieces `names`, a special end token, and further added tokens."""
    ids = {piece: index for index, piece in enumerate(names)}
    byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
    flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    tokens = [{'id': ids[token], 'content': token, 'special': token == end, **flags} for token in (end, *added)]
    model = {'type': 'BPE', 'vocab': ids, 'merges': merges}
    content = {'added_tokens': tokens, 'pre_tokenizer': byte_level, 'decoder': byte_level, 'model': model}
    (folder / 'tokenizer.json').write_text(json.dumps({'version': '1.0', **content}))
    return folder


def abstract_params(family):
    """Returns the shapes of the parameters of the model that the gin text of `family` configures."""
    return saved_models.get_abstract_params(conversions.build_model_from_gin(family.build_gin_text('A test.')))


def read_params(folder):
    """Reads the parameters in a Hugging Face folder."""
    source = model_folders.open_model_folder(folder)
    return source.read_params(abstract_params(source.family))


def describe(model, vocabulary):
    """Returns the Hugging Face model that `model` corresponds to."""
    return model_folders.find_equivalent_model(model, vocabulary, conversions.build_model_from_gin)


def bert_model(*files, **macros):
    """Builds a model with the sizes of the recorded BERT."""
    return build_model(
        'models/bert.gin', 'sizes/_common.gin', *files, EMBED_DIM=24, MLP_DIM=40, NUM_HEADS=2, HEAD_DIM=12,
        NUM_ENCODER_LAYERS=3, NUM_DECODER_LAYERS=3, VOCAB_SIZE=60, MAX_INPUT_LENGTH=20, **macros,
    )  # fmt: skip


def write(folder, config, weights, shards=1):
    """Writes `weights` to `shards` files with Hugging Face's file names, and T5's tokenizer; returns the folder."""
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(config))
    weights = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    if shards == 1:
        save_file(weights, folder / 'model.safetensors', {'format': 'pt'})
    else:
        files = [f'model-{i + 1:05}-of-{shards:05}.safetensors' for i in range(shards)]
        weight_map = {name: files[i % shards] for i, name in enumerate(sorted(weights))}
        for file in files:
            save_file({n: weights[n] for n, f in weight_map.items() if f == file}, folder / file, {'format': 'pt'})
        (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
    if config['model_type'] in T5.model_types:
        (folder / 'spiece.model').write_bytes(SPIECE.read_bytes())
        (folder / 'tokenizer_config.json').write_text(json.dumps({'extra_ids': SENTINELS}))
    return folder
