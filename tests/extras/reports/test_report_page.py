"""The report is a self-contained, well-formed HTML file without scripts."""

import dataclasses
import html.parser
import re

import numpy as np
import pytest

from remixer_t5x.extras.reports import report_writer
from remixer_t5x.extras.reports.pictures import drawing, model_pictures
from remixer_t5x.extras.reports.pictures.drawing import Picture
from remixer_t5x.extras.reports.pictures.learned_weights import LayerArray
from remixer_t5x.extras.reports.run_records import MetricsRecord, RecordedRun

EVIL = '</script><script>alert("x")</script><img src=http://evil.example/x onerror=alert(1)> & $\\frac$ "\''
_VOID_ELEMENTS = {'meta', 'input', 'br', 'img', 'link', 'hr'}


class _Reader(html.parser.HTMLParser):
    """Collects the elements, the open elements and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.data = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in _VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f'</{tag}> closes an element that is not open'

    def handle_data(self, data):
        self.data.append(data)


@pytest.fixture(scope='module')
def pictures():
    pieces = [EVIL[:9], '$x', 'δ', '漢']
    weights = np.eye(4)
    grid = [[drawing.MatrixPanel(EVIL, weights, pieces, pieces), drawing.MatrixPanel('b', -weights)]]
    tim = [LayerArray('encoder', n, 'tim', np.full((2, 4), 0.5)) for n in (1, 2)]
    return [
        Picture('r1-maps', EVIL, EVIL, drawing.draw_matrices(grid, [EVIL])),
        Picture('r1-patterns', 'patterns', '', model_pictures.draw_competition_weights(tim, pieces)),
    ]


def _run(name, seed, setting=0):
    timing = {'tokens_per_second': 9.0, 'host_mib': 5.0}
    logged = [MetricsRecord('train', step, {'loss': 3.0 / step}, timing) for step in (1, 2)]
    logged += [
        MetricsRecord(f'eval/{EVIL}', 2, {EVIL: 5.0}, {}),
        MetricsRecord('eval/cogs', 2, {f't_{n}': 50.0 for n in range(8)}, {}),
    ]
    row = {'index': 0, 'input': EVIL, 'target': EVIL, 'prediction': f'other {EVIL}'}
    return RecordedRun(name, f'/runs/{EVIL}', logged, f"SEED = {seed}\nX = '{EVIL}{setting}'\n", (), {EVIL: [row]})


@pytest.fixture
def text(pictures):
    learned = [
        report_writer.WeightPictures(EVIL, pictures, EVIL),
        report_writer.WeightPictures('none', about=f'No pictures: {EVIL}'),
    ]
    return report_writer.render_page([_run(EVIL, 1), _run('other', 2, 1)], learned)


def test_the_page_is_well_formed_and_self_contained_and_escapes_text_from_files(text):
    reader = _Reader(text)
    assert reader.open == []
    ids = [attributes['id'] for _, attributes in reader.elements if 'id' in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    assert {first or second for first, second in used} <= set(ids)
    for tag, attributes in reader.elements:
        assert tag not in ('link', 'iframe', 'object', 'embed', 'base', 'img', 'script')
        assert not [name for name in attributes if name.startswith('on')]
        for name in ('src', 'href', 'xlink:href', 'action', 'srcset'):
            value = attributes.get(name, '#')
            assert value.startswith(('#', 'data:image/png;base64,')), f'{tag} {name}={value[:60]}'
    style = re.search(r'<style>(.*?)</style>', text, re.DOTALL)[1]
    assert '@import' not in style and 'url(' not in style
    assert reader.data.count(EVIL) > 5


def test_runs_of_a_group_have_the_same_colour():
    page = report_writer.render_page([_run('a', 1), _run('b', 2), _run('c', 1, setting=1)])
    assert 'a × 2</li>' in page and 'var(--c1)' in page and 'var(--c2)' not in page
    # The first run has no predictions.
    page = report_writer.render_page([dataclasses.replace(_run('a', 1), predictions={}), _run('b', 2)])
    assert '>b: 0 of 1 equal the target<' in page and '<dt>b</dt>' in page and '<dt>a</dt>' not in page
    assert 'b</li>' in page and 'var(--c1)' in page
    assert '<td>t_0</td>' in page and 'cogs, eval: t_0' in page
