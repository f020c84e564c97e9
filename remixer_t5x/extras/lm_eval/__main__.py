"""Runs the lm_eval command with the model `remixer_t5x` registered."""

import sys

from remixer_t5x.errors import UserError
from remixer_t5x.extras.lm_eval import register


def main() -> int:
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
