"""Adds a home page, navigation and a generated reference to the documentation site.

mkdocs calls the functions `on_*` while it builds the site (mkdocs.yml, `hooks`).
"""

import argparse
import html
import os
import pathlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import remixer_t5x
from remixer_t5x.cli import arguments, main
from remixer_t5x.cli.arguments import Command
from remixer_t5x.cli.info import settings
from remixer_t5x.models import sublayers

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / 'docs'
HOME = 'index.md'
# Matches a link to a file in this repository; the groups are the text and the path.
LINK = re.compile(r'\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the navigation to the sections and links of docs/README.md, and the anchors of headings to GitHub's."""
    sections = re.split(r'^## ', (DOCS / 'README.md').read_text(), flags=re.MULTILINE)[1:]
    config.nav = [{'Home': HOME}]
    for section in sections:
        pages = [page for _, page in LINK.findall(section) if page.endswith('.md') and not page.startswith('../')]
        config.nav.append({section.splitlines()[0]: pages})
    config.nav.append({'Generated reference': list(REFERENCE)})
    config.mdx_configs['toc']['slugify'] = lambda text, separator: github_anchor(text)
    return config


def github_anchor(title: str) -> str:
    """Returns the anchor that GitHub generates for a heading."""
    return re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    files.append(File.generated(config, HOME, content=(ROOT / 'README.md').read_text()))
    files.append(File.generated(config, 'assets/site.css', content=(DOCS / 'site/site.css').read_text()))
    for path, text in REFERENCE.items():
        files.append(File.generated(config, path, content=text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapts GitHub's Markdown to the site: replaces links to files outside docs/, and adds empty lines above lists.

    The text of a link is replaced by the title of the page if the text is a path.
    """
    path = page.file.src_uri
    source = ROOT / 'README.md' if path == HOME else DOCS / path
    markdown = LINK.sub(lambda link: _site_link(link[1], link[2], source, path, str(config.repo_url)), markdown)
    blocks = re.split(r'(^ *```.*?^ *```$)', markdown, flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(blocks), 2):
        text = '\n' * (i > 0) + blocks[i]
        blocks[i] = re.sub(r'^(?!- |\||\d+\. |\s)(.+)\n(?=- |\d+\. |\|)', r'\1\n\n', text, flags=re.MULTILINE)
    return ''.join(blocks)


def _site_link(text: str, link: str, source: pathlib.Path, page: str, repository: str) -> str:
    target = pathlib.Path(os.path.normpath(source.parent / link))
    if target == DOCS / 'README.md':
        target = DOCS / HOME
    elif not target.is_relative_to(DOCS) or target.is_dir() or target.suffix == '.ipynb':
        return f'[{text}]({repository}/blob/main/{target.relative_to(ROOT)}'
    elif re.fullmatch(r'[\w/.]+\.md', text) and target.exists():
        text = target.read_text().partition('\n')[0].removeprefix('# ')
    return f'[{text}]({os.path.relpath(target, (DOCS / page).parent)}'


def _commands_page() -> str:
    usage = (
        '`remixer-t5x COMMAND [flags]`. For every command, `--verbose` shows the log lines of libraries and tracebacks.'
    )
    parts = ['# Commands', usage, f'```text\n{arguments.GIN_HELP}```']
    for command in main.COMMANDS:
        parts += [f'## {command.name}', f'{command.help[0].upper()}{command.help[1:]}.']
        parts += ['```bash\n' + '\n'.join(command.examples) + '\n```', *_flag_table(command)]
    return '\n\n'.join(parts)


class _Recorder(argparse.ArgumentParser):
    """Argument parser that collects the arguments of a command, including those in groups."""

    def __init__(self):
        super().__init__(add_help=False)
        self.actions: list[argparse.Action] = []
        self.add_argument_group = lambda *args, **options: self  # argparse has already created its two default groups

    def add_argument(self, *args, **options):
        self.actions.append(super().add_argument(*args, **options))
        return self.actions[-1]

    def add_mutually_exclusive_group(self, **options):
        return self


def _flag_table(command: Command) -> Iterator[str]:
    recorder = _Recorder()
    command.add_arguments(recorder)
    if recorder.actions:
        rows = ['| argument | meaning |', '|---|---|']
        for action in recorder.actions:
            value = action.metavar or (','.join(map(str, action.choices)) if action.choices else action.dest.upper())
            flag = '`, `'.join(action.option_strings) or str(value)
            if action.option_strings and action.nargs != 0:
                flag += f'[={value}]' if action.nargs == '?' else f'={value}'
            help_text = (action.help or '').replace('%%', '%')
            rows.append(f'| `{flag}`{{ .name }} | {_escape_cell(help_text)} |')
        yield _stacked_table(rows)


def _macros_page() -> str:
    sections: dict[str, list[str]] = defaultdict(list)
    for row in settings.find_macros():
        folder = row.files[0].partition('/')[0] if row.files else 'No default'
        name = f'`{row.name}`{{ .name #{row.name} }}<br>{_breakable_code(row.default)}'
        place = '<br>'.join([*filter(None, [_escape_cell(row.files_summary)]), _breakable_code(row.reader)])
        sections[folder].append(f'| {name} | {_escape_cell(row.meaning)} | {place} |')
    parts = [
        '# gin macros',
        'Every macro of the shipped gin files, by the folder of `configs/` that sets its default. Set one with '
        '`--gin.NAME=VALUE`. `remixer-t5x info --settings [WORD]` prints the same table.',
    ]
    for folder, rows in sorted(sections.items()):
        head = ['| macro and default | meaning | set by, read by |', '|---|---|---|']
        parts += [f'## {folder}', _stacked_table([*head, *rows])]
    return '\n\n'.join(parts)


def _stacked_table(rows: list[str]) -> str:
    """Returns a table whose cells are stacked vertically on a narrow screen."""
    return '\n'.join(['<div class="stacked" markdown>\n', *rows, '\n</div>'])


def _breakable_code(text: str) -> str:
    """Formats code so that a browser can wrap it after dots and underscores; returns phrases unchanged."""
    if text in ('required', 'depends on the file', 'command line'):
        return text
    breakable = re.sub(r'([._])', r'\1<wbr>', _escape_cell(text)).replace('_', '&#95;')
    return f'<code>{breakable}</code>'


def _escape_cell(text: str) -> str:
    return html.escape(text, quote=False).replace('|', r'\|').replace('*', r'\*')


def _python_page() -> str:
    parts = ['# Python API', 'The public names of `remixer_t5x`. [The guide](../guide/python.md) has examples.']
    for name in remixer_t5x.__all__:
        if not name.startswith('__'):
            value = getattr(remixer_t5x, name)
            path = value.__name__ if name == 'testing' else f'{value.__module__}.{value.__qualname__}'
            parts.append(_docstring_directive(path, f'remixer_t5x.{name}'))
    return '\n\n'.join(parts)


def _sublayers_page() -> str:
    parts = [
        '# Sublayers',
        'The sublayers that gin files and `build_model` can use. [Architectures](../architectures.md) compares them.',
    ]
    for module in sorted(found.name for found in pkgutil.iter_modules(sublayers.__path__)):
        parts.append(_docstring_directive(f'remixer_t5x.models.sublayers.{module}', module))
    return '\n\n'.join(parts)


def _docstring_directive(path: str, heading: str) -> str:
    return f'::: {path}\n    options: {{heading: {heading}, toc_label: {heading}}}'


REFERENCE = {
    'reference/commands.md': _commands_page,
    'reference/macros.md': _macros_page,
    'reference/python.md': _python_page,
    'reference/sublayers.md': _sublayers_page,
}
