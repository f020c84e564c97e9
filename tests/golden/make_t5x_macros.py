"""Writes t5x_macros.json: the macros of each of T5X's gin files for its scripts, and the flags of the scripts.

git clone https://github.com/google-research/t5x    # commit cc342d4
python tests/golden/make_t5x_macros.py t5x
"""

import json
import pathlib
import re
import sys

# T5X's gin files of runs, and the command that does the same here.
COMMANDS = {'pretrain': 'train', 'finetune': 'finetune', 'eval': 'eval', 'infer': 'infer'}
SCRIPTS = ('main', 'train', 'eval', 'infer')


def main(t5x: pathlib.Path) -> None:
    macros: dict[str, set[str]] = {}
    for path in sorted((t5x / 't5x').rglob('*.gin')):
        if 'testdata' in path.parts:
            continue
        text = path.read_text()
        names = set(re.findall(r'^([A-Z][A-Z0-9_]+) *=', text, re.M)) | set(re.findall(r'%([A-Z][A-Z0-9_]+)', text))
        # Files of models and examples go to every script.
        run = path.stem if path.parent.name == 'runs' else ''
        macros.setdefault(COMMANDS.get(run, 'any'), set()).update(names)
    flags = set()
    for script in SCRIPTS:
        text = (t5x / 't5x' / f'{script}.py').read_text()
        flags |= set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", text))
    found = {'macros': {name: sorted(own) for name, own in sorted(macros.items())}, 'flags': sorted(flags)}
    target = pathlib.Path(__file__).with_name('t5x_macros.json')
    target.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]))
