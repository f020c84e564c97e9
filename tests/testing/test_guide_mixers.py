"""The mixers that docs/guide/new_mixer.md defines keep every law; `tests/test_docs.py` runs its commands."""

import pathlib
import re
import runpy

import pytest

from remixer_t5x.testing import check_sublayer

PAGE = (pathlib.Path(__file__).parents[2] / 'docs/guide/new_mixer.md').read_text()


@pytest.mark.parametrize(('file', 'name'), [('my_convolutions.py', 'CausalConvolution')])
def test_a_mixer_of_the_guide_keeps_every_law(file, name, tmp_path):
    (text,) = re.findall(rf"^cat > {re.escape(file)} <<'END'\n(.*?)^END$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / file).write_text(text)
    report = check_sublayer(runpy.run_path(str(tmp_path / file))[name])
    results = {(row.law, row.side): row.result for row in report.rows}
    # It cannot read a prefix in both directions.
    assert {pair for pair, result in results.items() if result != 'holds'} == {('prefix', 'decoder')}
    assert results['decode', 'decoder'] == results['prompt', 'decoder'] == 'holds'
