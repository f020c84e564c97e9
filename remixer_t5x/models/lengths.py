"""The longest rows of a model whose parameters depend on them, by the lengths of its task.

configs/models/t5_1_1.gin binds MAX_INPUT_LENGTH and MAX_TARGET_LENGTH to these functions.
"""

from collections.abc import Mapping

# T5's, for a model without data.
DEFAULT = 512


def inputs(lengths: Mapping[str, int] | None = None) -> int:
    """The longest inputs by TASK_FEATURE_LENGTHS."""
    return (lengths or {}).get('inputs', DEFAULT)


def targets(lengths: Mapping[str, int] | None = None, frame: str = 'encoder_decoder') -> int:
    """The longest targets by TASK_FEATURE_LENGTHS; a decoder alone reads inputs and targets in one row."""
    if frame == 'decoder_only' and lengths:
        return sum(lengths.values())
    return (lengths or {}).get('targets', DEFAULT)
