"""Writes t5x_macros.json: the macros in T5X's gin files by script, and the flags of the scripts.

git clone https://github.com/google-research/t5x    # commit cc342d4
python tests/golden/make_t5x_macros.py t5x
"""

import json
import pathlib
import re
import sys

# T5X's gin files in `runs`, and the equivalent commands of this package.
COMMANDS = {'pretrain': 'train', 'finetune': 'finetune', 'eval': 'eval', 'infer': 'infer'}
SCRIPTS = ('main', 'train', 'eval', 'infer')


def main(t5x: pathlib.Path) -> None:
    macros: dict[str, set[str]] = {}
    for path in sorted((t5x / 't5x').rglob('*.gin')):
        if 'testdata' in path.parts:
            continue
        text = path.read_text()
        names = set(re.findall(r'^([A-Z][A-Z0-9_]+) *=', text, re.M)) | set(re.findall(r'%([A-Z][A-Z0-9_]+)', text))
        # Gin files of models and examples are used by every script.
        run = path.stem if path.parent.name == 'runs' else ''
        macros.setdefault(COMMANDS.get(run, 'any'), set()).update(names)
    flags = set()
    for script in SCRIPTS:
        text = (t5x / 't5x' / f'{script}.py').read_text()
        flags |= set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", text))
    result = {'macros': {name: sorted(names) for name, names in sorted(macros.items())}, 'flags': sorted(flags)}
    target = pathlib.Path(__file__).with_name('t5x_macros.json')
    target.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]))
