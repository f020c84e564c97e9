"""What `remixer-t5x convert` says while it works, and how it finds out whether it was right."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import check as hf_check
from remixer_t5x.interop.safetensors import export as safetensors_export


def say(what: str, text: str) -> None:
    """Prints a line: the conversion of a large model takes minutes."""
    print(f'{what:<12} {text}', flush=True)


def size(params: Any) -> str:
    """Number of arrays and parameters, in words."""
    leaves = jax.tree.leaves(params)
    return f'{sum(leaf.size for leaf in leaves):,} parameters in {len(leaves)} arrays'


def check_equal(before: Any, after: Any, where: str) -> None:
    """Compares two trees of parameters. Raises UserError where they are not equal, bit by bit."""
    check_same(safetensors_export.first_difference(before, after), where)
    say('check', 'every parameter, read back, is what was read, bit by bit')


def check_same(difference: str | None, where: str | os.PathLike[str]) -> None:
    """Raises UserError where there is a `difference`, the name of an array that is not what it was made from."""
    if difference:
        raise UserError(f'{difference} is another in {where} than in what was read; do not use it, and report it')


def compare_with_hugging_face(model: Any, params: Any, folder: pathlib.Path, vocabulary: Any) -> None:
    """Compares logits, and ids of texts, of Hugging Face's model and tokenizer in `folder` with ours.

    Says so where torch or transformers are not installed. Raises UserError where logits differ by more than rounding.
    """
    batch = hf_check.random_batch(model.vocab_size)
    if compare_logits(lambda: (hf_check.our_logits(model, params, batch), hf_check.their_logits(folder, batch))):
        say('check', hf_check.compared_ids(folder, vocabulary))


def compare_logits(ours_and_theirs: Callable[[], tuple[Any, Any]]) -> bool:
    """Compares logits of our model with those of Hugging Face's, and returns whether it did: it says so where torch or
    transformers are not installed. Raises UserError where they differ by more than rounding.
    """
    if missing := hf_check.missing_packages():
        say('check', hf_check.not_compared(missing))
        return False
    say('check', f"logits of Hugging Face's model and ours differ by {hf_check.compared(*ours_and_theirs())}")
    return True
