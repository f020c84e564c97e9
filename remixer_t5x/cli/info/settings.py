"""`remixer-t5x info --settings`: the table of gin macros."""

from remixer_t5x.cli import console
from remixer_t5x.config import macro_table
from remixer_t5x.errors import UserError


def show(word: str) -> None:
    """Prints the macros that contain `word`. Raises UserError if there are none."""
    rows = macro_table.rows(word)
    if not rows:
        raise UserError(f'no macro contains {word!r} in its name, reader or meaning; type info --settings for all')
    table = console.table()
    for heading in ('macro', 'default', 'set by', 'read by', 'meaning'):
        table.add_column(heading, overflow='fold', no_wrap=heading == 'macro')
    for row in rows:
        # Brackets in a cell would be styles of rich.
        cells = (row.name, row.default, row.where, row.owner, row.meaning)
        table.add_row(*(cell.replace('[', r'\[') for cell in cells))
    console.show(table, f'{len(rows)} macros; set one with --gin.NAME=VALUE', pipe_width=200)
