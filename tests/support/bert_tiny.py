"""The recorded tiny BERT: its arrays, its config.json, and our model of it."""

import json

import numpy as np
from safetensors.numpy import save_file

from remixer_t5x import build_model
from tests.support.paths import GOLDEN

CONFIG = {
    'model_type': 'bert',
    'vocab_size': 60,
    'hidden_size': 24,
    'intermediate_size': 40,
    'num_hidden_layers': 3,
    'num_attention_heads': 2,
    'max_position_embeddings': 20,
}


def recorded():
    """The arrays that `make_bert_tiny.py` has written."""
    with np.load(GOLDEN / 'bert_tiny.npz') as arrays:
        return dict(arrays)


def weights():
    return {name.removeprefix('weights/'): a for name, a in recorded().items() if name.startswith('weights/')}


def write(folder, config=CONFIG, **changed):
    """A folder as Hugging Face writes it, with some weights changed, or left out where they are None."""
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(config))
    arrays = {name: np.ascontiguousarray(a) for name, a in {**weights(), **changed}.items() if a is not None}
    save_file(arrays, folder / 'model.safetensors', {'format': 'pt'})
    return folder


def model(*files, **macros):
    """Our model of its sizes."""
    return build_model(
        'models/bert.gin', 'sizes/_common.gin', *files, EMBED_DIM=24, MLP_DIM=40, NUM_HEADS=2, HEAD_DIM=12,
        NUM_ENCODER_LAYERS=3, NUM_DECODER_LAYERS=3, VOCAB_SIZE=60, MAX_INPUT_LENGTH=20, **macros,
    )  # fmt: skip
