"""`remixer-t5x info`: parameters and FLOPs of a model, module by module."""

from collections.abc import Mapping

from remixer_t5x.cli import console
from remixer_t5x.costs import counts, table
from remixer_t5x.data import frames
from remixer_t5x.models.interface import Model


def show(model: Model, feature_lengths: Mapping[str, int] | None, depth: int) -> None:
    """Prints the table of a model, `depth` levels of modules deep.

    Raises:
        UserError: a feature length is missing, or is not for the model's frame.
    """
    lengths = checked_lengths(model.frame, feature_lengths)
    counted = counts.count(model, lengths)
    console.show(table.cost_table(counted, depth), *table.summary(counted, lengths), pipe_width=110)


def checked_lengths(frame: str, feature_lengths: Mapping[str, int] | None) -> Mapping[str, int]:
    """The lengths, those that the frame usually has where they are None. Raises UserError for features that the frame
    does not take.
    """
    if feature_lengths is None:
        return frames.formats(frame)[0].example
    frames.batch_format(frame, feature_lengths)
    return feature_lengths
