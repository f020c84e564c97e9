import pytest

from tests.support.toy_house import clean_environment, house, toy_module  # noqa: F401 (fixtures)


@pytest.fixture(scope='module')
def programs(compiled):
    """Each command compiles programs that one before it has compiled: they are read from the disk instead."""
    import jax
    from jax._src import lru_cache

    from tests.support import real_processes

    settings = {
        'jax_compilation_cache_dir': str(compiled),
        'jax_persistent_cache_min_compile_time_secs': 0.0,
        'jax_persistent_cache_min_entry_size_bytes': -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lru_cache.LRUCache, 'put', real_processes.put_whole)
        _set(settings)
        yield
        _set(before)


def _set(settings):
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX decides once whether it reads from a folder, and from which.
    compilation_cache.reset_cache()
