"""Archives of golden files, which hold plain files only."""

import pathlib
import tarfile


def unpack(archive: pathlib.Path, folder: pathlib.Path, within: str = '') -> None:
    """Writes the files whose names begin with `within` below `folder`.

    Not by `extractall`, which asks for a filter from Python 3.12 on and does not know one before 3.11.4.
    """
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            content = source.extractfile(member)
            if content is not None and member.name.startswith(within):
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
