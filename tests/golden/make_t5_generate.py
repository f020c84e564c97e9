"""Writes t5_generate.npz: what Hugging Face's `generate` makes of a tiny random T5 v1.1, greedily and with 4 beams.

Needs torch and transformers: `python tests/golden/make_t5_generate.py`.
"""

import pathlib
import warnings

import numpy as np
import torch
import transformers

PAD, EOS, VOCAB, LENGTH, BEAMS = 0, 1, 96, 12, 4
# (length_penalty, early_stopping) of beam search.
SEARCHES = ((1.0, 'never'), (0.6, 'never'), (1.0, False), (0.6, False), (1.0, True))


def name_of(length_penalty: float, early_stopping) -> str:
    return f'{length_penalty}/{early_stopping}'


def make_model(seed: int) -> transformers.T5ForConditionalGeneration:
    """A model whose sequences differ in length: a larger row makes the logit of the end token vary more."""
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj='gated-gelu', tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=PAD,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if 'relative_attention_bias' in name:
                weight.normal_()
            if name.endswith('.wo.weight') or name.endswith('.o.weight'):
                weight.mul_(3.0)  # Else the last token alone would settle the next one.
        model.lm_head.weight.mul_(0.3)
        model.lm_head.weight[EOS].mul_(2.0)
    return model


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Weights under `weights/NAME`, inputs, `greedy`, and tokens and scores of each beam search, n best."""
    model = make_model(seed)
    rng = np.random.default_rng(seed)
    inputs = rng.integers(2, VOCAB, (6, 9))
    for row, input_length in enumerate([9, 9, 7, 4, 2, 1]):
        inputs[row, input_length:] = PAD
    ids, mask = torch.from_numpy(inputs), torch.from_numpy((inputs != PAD).astype(int))
    # The stacks' embed_tokens are the shared embedding once more.
    state = {name: weight for name, weight in model.state_dict().items() if 'embed_tokens' not in name}
    arrays = {f'weights/{name}': weight.numpy() for name, weight in state.items()}
    arrays |= {'inputs': inputs.astype(np.int32), 'greedy': generate(model, ids, mask)['tokens'][:, 0]}
    for length_penalty, early_stopping in SEARCHES:
        found = generate(
            model, ids, mask, num_beams=BEAMS, num_return_sequences=BEAMS,
            length_penalty=length_penalty, early_stopping=early_stopping,
        )  # fmt: skip
        arrays |= {f'{name_of(length_penalty, early_stopping)}/{name}': array for name, array in found.items()}
    return arrays


def generate(model, ids, mask, **options) -> dict[str, np.ndarray]:
    """Tokens [batch, n, LENGTH] without the start token, padded; scores [batch, n] of beam search."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False, return_dict_in_generate=True,
            output_scores=True, pad_token_id=PAD, eos_token_id=EOS, **options,
        )  # fmt: skip
    tokens = out.sequences[:, 1:].numpy()
    tokens = np.pad(tokens, ((0, 0), (0, LENGTH - tokens.shape[1])), constant_values=PAD)
    # Beam search fills up with the end token where the padding id is 0.
    is_after_end = np.cumsum(tokens == EOS, axis=-1) - (tokens == EOS) > 0
    tokens = np.where(is_after_end, PAD, tokens)
    arrays = {'tokens': tokens.reshape(len(ids), -1, LENGTH).astype(np.int32)}
    if 'num_beams' in options:
        arrays['scores'] = out.sequences_scores.numpy().reshape(len(ids), -1)
    return arrays


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('t5_generate.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
