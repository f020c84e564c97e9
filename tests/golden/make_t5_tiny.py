"""Writes t5_v1_1_tiny.npz, t5_v1_0_tiny.npz, umt5_tiny.npz, t5gemma_tiny.npz and t5_generate.npz: tiny random T5s of
Hugging Face's transformers, padded batches, and outputs of the models and of `generate`.

Needs torch and transformers: `python -m tests.golden.make_t5_tiny NAME`, such as umt5_tiny.
"""

import pathlib
import sys
import warnings

import numpy as np
import torch
import transformers

from tests.support.hf_folders import T5GEMMA

PAD, EOS, BOS = 0, 1, 2
V1_1 = {
    'vocab_size': 96, 'd_model': 32, 'd_kv': 8, 'd_ff': 48, 'num_layers': 2, 'num_heads': 4,
    'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False,
}  # fmt: skip
SMALL = {'d_model': 24, 'd_kv': 8, 'd_ff': 40, 'num_layers': 3, 'num_decoder_layers': 2, 'num_heads': 2}
# (length_penalty, early_stopping) of the beam searches of `make_generate`.
SEARCHES = ((1.0, 'never'), (0.6, 'never'), (1.0, False), (0.6, False), (1.0, True))


def build(name, seed, **sizes):
    torch.manual_seed(seed)
    config = getattr(transformers, f'{name}Config')(**sizes, dropout_rate=0.0, decoder_start_token_id=PAD)
    return getattr(transformers, f'{name}ForConditionalGeneration')(config).eval()


def untie(model):
    """Unties the output matrix, which version 5 of transformers ties despite `tie_word_embeddings=False`."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))


@torch.no_grad()
def randomize(model, factor, norms=True):
    """Randomizes norms and position biases, and scales output matrices of sublayers."""
    for name, weight in model.named_parameters():
        if norms and 'layer_norm' in name:
            weight.uniform_(0.5, 1.5)
        if 'relative_attention_bias' in name:
            weight.normal_()
        if name.endswith('.wo.weight') or name.endswith('.o.weight'):
            weight.mul_(factor)  # Otherwise, the next token depends only on the last token.


def padded(rng, vocab, width, lengths, low=2):
    """Returns random ids [rows, width] int64 from `low`, with padding after the length of each row."""
    ids = rng.integers(low, vocab, (len(lengths), width))
    return np.where(np.arange(width) < np.asarray(lengths)[:, None], ids, PAD)


def read(inputs):
    return {'input_ids': torch.from_numpy(inputs), 'attention_mask': torch.from_numpy((inputs != PAD).astype(int))}


@torch.no_grad()
def outputs(model, inputs, targets):
    return model(**read(inputs), labels=torch.from_numpy(np.where(targets == PAD, -100, targets)))


@torch.no_grad()
def generate(model, inputs, length, **options):
    """Returns tokens [rows, n, length] without the start token, 0 after the end, and scores [rows, n] of beam search.

    With padding id 0, beam search pads rows with the end token.
    """
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        out = model.generate(
            **read(inputs), max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_scores=True,
            pad_token_id=PAD, **{'eos_token_id': EOS, **options},
        )  # fmt: skip
    tokens = out.sequences[:, 1:].numpy()
    tokens = np.pad(tokens, ((0, 0), (0, length - tokens.shape[1])), constant_values=PAD)
    is_after_end = np.cumsum(tokens == EOS, axis=-1) - (tokens == EOS) > 0
    tokens = np.where(is_after_end, PAD, tokens).reshape(len(inputs), -1, length).astype(np.int32)
    return tokens, out.sequences_scores.numpy().reshape(len(inputs), -1) if 'num_beams' in options else None


def weights(model, *copies):
    """Returns the state dict without `embed_tokens` and `copies`, which equal the shared embedding."""
    state = {name: weight for name, weight in model.state_dict().items() if 'embed_tokens' not in name}
    return {f'weights/{name}': weight.numpy() for name, weight in state.items() if name not in copies}


def make_v1_1(seed):
    """Returns weights, a batch, encoder output, logits and mean loss."""
    model, rng = build('T5', seed, **V1_1, num_decoder_layers=3), np.random.default_rng(seed)
    untie(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if 'layer_norm' in name:
                weight.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, weight.shape)).float())
            if 'relative_attention_bias' in name:
                weight.copy_(torch.from_numpy(rng.normal(0, 1, weight.shape)).float())
    inputs, targets = padded(rng, 96, 24, (24, 17, 1)), padded(rng, 96, 11, (11, 5, 2))
    return {**weights(model), **batch_and_outputs(model, inputs, targets)}


def batch_and_outputs(model, inputs, targets):
    out = outputs(model, inputs, targets)
    return {
        'inputs': inputs.astype(np.int32),
        'targets': targets.astype(np.int32),
        'encoded': out.encoder_last_hidden_state.numpy(),
        'logits': out.logits.numpy(),
        'loss': out.loss.numpy(),
    }


def make_v1_0(seed):
    """Returns the arrays of `make_v1_1`, greedy tokens and three beams for T5 v1.0 (ReLU, tied, scaled)."""
    model, rng = build('T5', seed, **SMALL, vocab_size=64, feed_forward_proj='relu'), np.random.default_rng(seed)
    randomize(model, 12.0)
    with torch.no_grad():
        model.shared.weight[EOS].mul_(4.0)  # Generates end tokens.
    inputs, targets = padded(rng, 64, 20, (20, 13, 4, 1)), padded(rng, 64, 9, (9, 5, 7, 2))
    arrays = {**weights(model, 'lm_head.weight'), **batch_and_outputs(model, inputs, targets)}
    beams, scores = generate(
        model, inputs, 10, num_beams=3, num_return_sequences=3, length_penalty=0.6, early_stopping='never'
    )
    return {**arrays, 'greedy': generate(model, inputs, 10)[0][:, 0], 'beams': beams, 'beam_scores': scores}


def make_umt5(seed):
    model, rng = build('UMT5', seed, **SMALL, vocab_size=80), np.random.default_rng(seed)
    model.config.tie_word_embeddings = False
    untie(model)
    randomize(model, 8.0)
    inputs, targets = padded(rng, 80, 24, (24, 17, 1)), padded(rng, 80, 11, (11, 5, 2))
    arrays = batch_and_outputs(model, inputs, targets)
    greedy = generate(model, inputs, 8, eos_token_id=None)[0][:, 0]
    return {**weights(model), **{name: arrays[name] for name in ('inputs', 'targets', 'logits')}, 'greedy': greedy}


def make_t5gemma(seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    stacks = {side: T5GEMMA[side] for side in ('encoder', 'decoder')}
    config = transformers.T5GemmaConfig(**stacks, vocab_size=48, attn_implementation='eager')
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    inputs, targets = padded(rng, 48, 14, (14, 10, 1), low=3), padded(rng, 48, 9, (9, 5, 2), low=3)
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
        logits = model(decoder_input_ids=torch.from_numpy(shifted), **read(inputs)).logits
    greedy = generate(model, inputs, 8, eos_token_id=None, decoder_start_token_id=BOS)[0][:, 0]
    state = {f'weights/{name}': weight.numpy() for name, weight in model.state_dict().items() if 'lm_head' not in name}
    batch = {'inputs': inputs.astype(np.int32), 'targets': targets.astype(np.int32)}
    return {**state, **batch, 'logits': logits.numpy(), 'greedy': greedy}


def generating_model(seed):
    """Returns a model that generates sequences of different lengths, because the end token has a larger output row."""
    model = build('T5', seed, **V1_1, num_decoder_layers=2)
    randomize(model, 3.0, norms=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
        model.lm_head.weight[EOS].mul_(2.0)
    return model


def make_generate(seed):
    model, rng = generating_model(seed), np.random.default_rng(seed)
    inputs = padded(rng, 96, 9, (9, 9, 7, 4, 2, 1))
    arrays = {'inputs': inputs.astype(np.int32), 'greedy': generate(model, inputs, 12)[0][:, 0]}
    for penalty, stopping in SEARCHES:
        options = {'num_beams': 4, 'num_return_sequences': 4, 'length_penalty': penalty, 'early_stopping': stopping}
        beams = zip(('tokens', 'scores'), generate(model, inputs, 12, **options), strict=True)
        arrays |= {f'{penalty}/{stopping}/{name}': array for name, array in beams}
    return {**weights(model), **arrays}


FILES = {
    't5_v1_1_tiny': make_v1_1,
    't5_v1_0_tiny': make_v1_0,
    'umt5_tiny': make_umt5,
    't5gemma_tiny': make_t5gemma,
    't5_generate': make_generate,
}

if __name__ == '__main__':
    name = sys.argv[1]
    np.savez_compressed(pathlib.Path(__file__).with_name(f'{name}.npz'), **FILES[name](seed=0))
