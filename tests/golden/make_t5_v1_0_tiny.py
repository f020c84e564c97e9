"""Writes t5_v1_0_tiny.npz: a tiny random first T5 (ReLU, tied, scaled) of Hugging Face's transformers, a padded batch,
its outputs, and what `generate` makes of it, greedily and with beams.

Needs torch and transformers: `python tests/golden/make_t5_v1_0_tiny.py`.
"""

import pathlib
import warnings

import numpy as np
import torch
import transformers

PAD, EOS, VOCAB, LENGTH, BEAMS = 0, 1, 64, 10, 3


def make_model(seed: int) -> transformers.T5ForConditionalGeneration:
    """Random, with norms and biases away from their first values, and an end token that comes sooner or later."""
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_decoder_layers=2, num_heads=2,
        feed_forward_proj='relu', dropout_rate=0.0, decoder_start_token_id=PAD,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if 'layer_norm' in name:
                weight.uniform_(0.5, 1.5)
            if 'relative_attention_bias' in name:
                weight.normal_()
            if name.endswith('.wo.weight') or name.endswith('.o.weight'):
                weight.mul_(12.0)  # Else the last token alone would settle the next one.
        model.shared.weight[EOS].mul_(4.0)
    return model


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Weights under `weights/NAME`, the batch, encoder output, logits, mean loss; tokens and scores of `generate`."""
    model, rng = make_model(seed), np.random.default_rng(seed)
    inputs, targets = rng.integers(2, VOCAB, (4, 20)), rng.integers(2, VOCAB, (4, 9))
    for row, (input_length, target_length) in enumerate([(20, 9), (13, 5), (4, 7), (1, 2)]):
        inputs[row, input_length:] = PAD
        targets[row, target_length:] = PAD
    ids, mask = torch.from_numpy(inputs), torch.from_numpy((inputs != PAD).astype(int))
    with torch.no_grad():
        labels = torch.from_numpy(np.where(targets == PAD, -100, targets))
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
    greedy, _ = generate(model, ids, mask)
    beams, scores = generate(
        model, ids, mask, num_beams=BEAMS, num_return_sequences=BEAMS, length_penalty=0.6, early_stopping='never'
    )
    return {
        **{f'weights/{name}': weight.numpy() for name, weight in weights(model).items()},
        'inputs': inputs.astype(np.int32),
        'targets': targets.astype(np.int32),
        'encoded': out.encoder_last_hidden_state.numpy(),
        'logits': out.logits.numpy(),
        'loss': out.loss.numpy(),
        'greedy': greedy[:, 0],
        'beams': beams,
        'beam_scores': scores,
    }


def weights(model) -> dict[str, torch.Tensor]:
    """The tied ones once."""
    copies = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight')
    return {name: weight for name, weight in model.state_dict().items() if name not in copies}


def generate(model, ids, mask, **options) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens [batch, n, LENGTH] without the start token, 0 behind the end, and scores [batch, n] of beam search."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False, return_dict_in_generate=True,
            output_scores=True, pad_token_id=PAD, eos_token_id=EOS, **options,
        )  # fmt: skip
    tokens = out.sequences[:, 1:].numpy()
    tokens = np.pad(tokens, ((0, 0), (0, LENGTH - tokens.shape[1])), constant_values=PAD)
    is_after_end = np.cumsum(tokens == EOS, axis=-1) - (tokens == EOS) > 0
    tokens = np.where(is_after_end, PAD, tokens).reshape(len(ids), -1, LENGTH).astype(np.int32)
    scores = out.sequences_scores.numpy().reshape(len(ids), -1) if 'num_beams' in options else None
    return tokens, scores


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('t5_v1_0_tiny.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
